"""What the speculators library makes of heads. Runs in its own environment, without Eyrie.

    python tests/launch/speculators_probe.py FOLDER HEAD...

Every HEAD is a folder in speculators' format, FOLDER/<its name>.safetensors its input: ``aux``
[T, A*D], the verifier's states, and ``tokens`` [T], one ahead of them. Each leaves
FOLDER/<its name>-logits.safetensors: ``logits`` [STEPS, T, Vd], every step fed with the tokens of
the data, and the verifier ids that the draft's stand for where it has fewer.
"""

import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from speculators import SpeculatorModel
from speculators.models.eagle3 import Eagle3SpeculatorConfig

STEPS = 3


@torch.no_grad()
def logits_of(head: Path, given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    config = Eagle3SpeculatorConfig.from_pretrained(head)
    config.transformer_layer_config._attn_implementation = "sdpa"  # flex needs a compiler
    model = SpeculatorModel.from_pretrained(head, config=config, dtype=torch.float32).eval()
    steps: list[torch.Tensor] = []
    model.lm_head.register_forward_hook(lambda _module, _args, output: steps.append(output[0]))
    rows = len(given["tokens"])
    model(
        hidden_states=given["aux"][None],
        input_ids=given["tokens"][None],
        document_ids=torch.zeros(1, rows, dtype=torch.long),
        position_ids=torch.arange(rows)[None],
        ttt_steps=STEPS,
    )
    found = {"logits": torch.stack(steps)}
    if model.d2t is not None:
        found["ids"] = model.d2t + torch.arange(len(model.d2t))
    return {name: tensor.contiguous() for name, tensor in found.items()}


def main() -> None:
    folder = Path(sys.argv[1])
    for head in map(Path, sys.argv[2:]):
        found = logits_of(head, load_file(folder / f"{head.name}.safetensors"))
        save_file(found, folder / f"{head.name}-logits.safetensors")


if __name__ == "__main__":
    main()
