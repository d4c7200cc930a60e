"""SGLang's reading of the plain layout. Read in its source of 2025 and of 2026, not run.

SGLang takes layer ids from ``eagle_config`` alone, as layer outputs, and knows neither
``norm_before_residual`` nor ``norm_before_fc``: it would draft with another head, without a word.
A layer after the first has its input norm as ``hidden_norm`` there, and in the source of 2025 all
its tensors as ``additional_layers.*``; what it finds under other names it leaves out.
"""

from collections.abc import Iterator
from pathlib import Path
from shlex import quote

from conf.schema import ExportFormat
from models.eagle3 import DraftConfig
from models.export.card import CardFacts
from models.export.layout import PLAIN_KEYS, PLAIN_SETTING, Layout
from models.export.vllm import plain_config


def refusals(draft: DraftConfig) -> Iterator[str]:
    if draft.norm_before_residual:
        yield "norm_before_residual is true, and SGLang's residual is always the raw state"
    if draft.norm_before_fc:
        yield "norm_before_fc is true, and SGLang drops input_norm.weight"
    if draft.qk_norm:
        yield "qk_norm is true, and SGLang's draft layer has no norm of query and key"
    if draft.layers > 1:
        yield (
            f"layers={draft.layers}: SGLang has tensors of layers after the first under names of "
            "its own, hidden_norm for input_layernorm, and drops ours"
        )


def serve(card: CardFacts, _draft: DraftConfig, folder: Path) -> list[str]:
    n = card.serve_n
    return [
        f"python -m sglang.launch_server --model-path {quote(card.served_verifier)} "
        f"--speculative-algorithm EAGLE3 --speculative-draft-model-path {quote(str(folder))} "
        f"--speculative-num-steps {n} --speculative-eagle-topk 1 "
        f"--speculative-num-draft-tokens {n + 1}"
    ]


SGLANG = Layout(
    ExportFormat.sglang,
    "SGLang",
    PLAIN_KEYS,
    PLAIN_SETTING,
    plain_config,
    refusals,
    serve,
    last_stream=False,  # captured before a layer, and none comes after the last
    both_spellings=False,  # the 2025 revision ignores the other without a word
)
