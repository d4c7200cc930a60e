"""The layouts that there are, and which of them a folder is in."""

from typing import Any

from conf.schema import ExportFormat
from models.export.layout import Layout
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
    eagle = config.get("eagle_config")
    if isinstance(eagle, dict) and "next_layer_regular" in eagle:
        return TRTLLM
    return VLLM
