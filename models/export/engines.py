"""The layouts that there are, and which of them a folder is in."""

from typing import Any

from conf.schema import ConfigError, ExportFormat
from models.eagle1 import Eagle1Config
from models.export.eagle1 import EAGLE1, is_eagle1
from models.export.layout import HeadConfig, Layout
from models.export.llamacpp import LLAMACPP
from models.export.sglang import SGLANG
from models.export.speculators import SPECULATORS
from models.export.trtllm import TRTLLM
from models.export.vllm import VLLM

LAYOUTS: dict[ExportFormat, Layout] = {
    layout.format: layout for layout in (VLLM, SPECULATORS, SGLANG, LLAMACPP, TRTLLM)
}
assert set(LAYOUTS) == set(ExportFormat)


def layout_of(config: dict[str, Any]) -> Layout:
    """The layout that ``config`` is written in; the plain one where nothing tells another."""
    if "speculators_model_type" in config or "speculators_config" in config:
        return SPECULATORS
    if is_eagle1(config):
        return EAGLE1
    eagle = config.get("eagle_config")
    if isinstance(eagle, dict) and "next_layer_regular" in eagle:
        return TRTLLM
    return VLLM


def layout_for(draft: HeadConfig, layout: Layout) -> Layout:
    """``layout``, in that of the draft's family. Raises ConfigError where the engine has none."""
    if not isinstance(draft, Eagle1Config):
        return layout
    if layout.format is not EAGLE1.format:
        raise ConfigError(
            f"--to {layout.format.value}: an EAGLE-1 head is written for {EAGLE1.engine} alone; "
            f"take --to {EAGLE1.format.value}"
        )
    return EAGLE1
