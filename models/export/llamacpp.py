"""What llama.cpp's converter reads: the plain layout, of fewer heads. Run by launch/llamacpp.sh.

The converter takes the tokenizer from the verifier's folder and writes GGUF; the runtime wants
three aux states and one layer.
"""

from collections.abc import Iterator
from pathlib import Path
from shlex import quote

from conf.schema import ExportFormat
from models.eagle3 import DraftConfig
from models.export.card import CardFacts
from models.export.layout import PLAIN_KEYS, PLAIN_SETTING, Layout
from models.export.vllm import plain_config

AUX_STATES = 3


def refusals(draft: DraftConfig) -> Iterator[str]:
    if draft.norm_output:
        yield "norm_output is true, and llama.cpp feeds back the state before the final norm"
    if draft.fc_norm:
        yield "fc_norm is true, and llama.cpp's converter has no place for fc_norm.*.weight"
    if draft.qk_norm:
        yield "qk_norm is true, and llama.cpp's draft layer has no norm of query and key"
    if draft.layers > 1:
        yield f"layers={draft.layers}: llama.cpp's converter takes a head of one layer alone"
    if len(draft.aux_layers) != AUX_STATES:
        yield (
            f"aux_layers={draft.aux_layers}: llama.cpp's runtime takes exactly {AUX_STATES} aux "
            "states"
        )


def serve(card: CardFacts, _draft: DraftConfig, folder: Path) -> list[str]:
    verifier, head = card.served_verifier.rstrip("/"), str(folder)
    name = verifier.rpartition("/")[2]
    return [
        f"python convert_hf_to_gguf.py {quote(verifier)} --outfile {quote(name + '.gguf')}",
        f"python convert_hf_to_gguf.py {quote(head)} --target-model-dir {quote(verifier)} "
        f"--outfile {quote(name + '-eagle3.gguf')}",
        f"llama-server -m {quote(name + '.gguf')} -md {quote(name + '-eagle3.gguf')} "
        f"--spec-type draft-eagle3 --spec-draft-n-max {card.serve_n}",
    ]


LLAMACPP = Layout(
    ExportFormat.llamacpp,
    "llama.cpp",
    PLAIN_KEYS,
    PLAIN_SETTING,
    plain_config,
    refusals,
    serve,
)
