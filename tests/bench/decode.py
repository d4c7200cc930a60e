"""Decoding speed of a head: our loop without it, with it by shape, and the library, at each batch.

    python tests/bench/decode.py runs/demo/best [--verifier FOLDER] [--repeats 5] [--json FILE]

Everything is eval.speed's own measurement: every group of prompts by every method before the next,
the order rotating, the median of the repeats. The library answers by generate and, at batch 1, with
an assistant: the verifier cut to its first layers. "ratio" is measured over predicted speed-up,
which is the loop's own overhead; "plain / generate" compares the loops without a draft, prefill
included.
"""

import argparse
import copy
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[0] = str(ROOT)
sys.path.append(str(ROOT / "tests" / "bench"))

import torch  # noqa: E402  after the path is set
from bars import Bar, bar_lines, bars_as_json  # noqa: E402
from transformers.modeling_utils import PreTrainedModel  # noqa: E402

from conf.runtime import write_atomically  # noqa: E402
from conf.schema import Precision, VerifierSection  # noqa: E402
from conf.shapes import Shape, chain, parse_shape  # noqa: E402
from data.distributed import use_threads  # noqa: E402
from data.eval_prompts import read_prompts, take  # noqa: E402
from data.template import encode_prompt  # noqa: E402
from eval.decode import DecodeSettings  # noqa: E402
from eval.report import jsonable  # noqa: E402
from eval.speed import SpeedPlan, measure_speed  # noqa: E402
from eval.speed_figures import end_to_end, rate  # noqa: E402
from eval.speed_report import ASSISTED, LIBRARY, PLAIN, SpeedFigures  # noqa: E402
from eval.tables import span, table  # noqa: E402
from eval.timed import Question  # noqa: E402
from models.bundled import SMOLLM2  # noqa: E402
from models.draft_file import load_draft  # noqa: E402
from models.generate import end_ids  # noqa: E402
from models.verifier import Verifier  # noqa: E402

TREES = ["[[0],[1],[0,0]]", "2x2", "2x2x2", "dynamic:nodes=8,depth=4,top_k=3"]
OVERHEAD = 0.90  # measured over predicted, chains at batch 1
LIBRARY_BAR = 1.0  # our loop without a draft over generate, batch 1
HEAD = ["batch", "guesses", "τ", "v", "d", "predicted", "measured", "95 %", "ratio", "tok/s"]


@dataclass(frozen=True)
class Measured:
    """One precision."""

    dtype: str
    figures: SpeedFigures

    def plain_over_generate(self, batch: int) -> float:
        """Tokens a second, prefill included on both sides."""
        here = [one for one in self.figures.timings if one.batch == batch]
        plain, library = (
            rate(end_to_end([one for one in here if one.method == name]))
            for name in (PLAIN, LIBRARY)
        )
        return plain / library


def questions_of(verifier: Verifier, files: list[str], count: int) -> list[Question]:
    """The first turn of prompts from all tasks."""
    found: list[Question] = []
    for prompt in take(read_prompts(files).prompts, count):
        asked = next(i for i, turn in enumerate(prompt.turns) if turn.role == "user")
        ids = encode_prompt(list(prompt.turns[: asked + 1]), verifier.tokenizer, {})
        found.append(Question(prompt.id, ids))
    return found


def cut_to(verifier: Verifier, layers: int) -> PreTrainedModel:
    """The verifier's first layers with its own norm and head: an assistant of the same tokens."""
    config = copy.deepcopy(verifier.model.config)
    config.num_hidden_layers = layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:layers]
    small = type(verifier.model)(config).to(verifier.device, verifier.dtype)
    own = small.state_dict()
    small.load_state_dict({k: v for k, v in verifier.model.state_dict().items() if k in own})
    small.generation_config = copy.deepcopy(verifier.model.generation_config)
    return small.eval().requires_grad_(False)


def measure(args: argparse.Namespace, dtype: Precision) -> Measured:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    precision = getattr(torch, dtype.value)
    section = VerifierSection(path=args.verifier)
    verifier = Verifier.load(section, args.cache, device, precision)
    draft = load_draft(args.head, device, precision, verifier.embedding)
    shapes: list[Shape] = [chain(n) for n in range(1, args.chains + 1)]
    shapes += [parse_shape(name, "--trees") for name in args.trees]
    plan = SpeedPlan(
        shapes=shapes,
        batch_sizes=args.batches,
        repeats=args.repeats,
        resamples=1000,
        assistant=cut_to(verifier, args.assistant_layers) if args.assistant_layers else None,
    )
    settings = DecodeSettings(args.tokens, end_ids(verifier))
    questions = questions_of(verifier, args.prompts, args.count)
    return Measured(dtype.value, measure_speed(verifier, draft, questions, settings, plan))


def rows_of(found: Measured, batch: int) -> list[list[str]]:
    at = found.figures.by_batch[batch]
    rows: list[list[str]] = []
    for one in at.shapes.values():
        figures = [one.tau, one.v, one.d, one.predicted_speedup, one.speedup_decode]
        rows.append(
            [
                *(str(batch), one.label + (" (best)" if one.shape == at.best else "")),
                *(f"{value:.2f}" for value in figures),
                *(span(one.speedup_decode_interval), f"{one.measured_over_predicted:.3f}"),
                f"{one.tokens_per_second_decode:.1f}",
            ]
        )
    return rows


def library_rows(found: Measured, batch: int) -> list[list[str]]:
    at = found.figures.by_batch[batch]
    base, library = at.baselines, at.library
    assisted = f"{library[ASSISTED].tokens_per_second:.1f}" if ASSISTED in library else ""
    figures = [
        base.plain_tokens_per_second_decode,
        base.plain_tokens_per_second_end_to_end,
        at.shapes[at.best].tokens_per_second_end_to_end,
        library[LIBRARY].tokens_per_second,
    ]
    ratio = f"{found.plain_over_generate(batch):.3f}"
    return [[str(batch), *(f"{value:.1f}" for value in figures), assisted, ratio]]


def show(found: Measured) -> None:
    batches = list(found.figures.by_batch)
    first = found.figures.by_batch[batches[0]].baselines
    print(f"\n{found.dtype}, {first.prompts} prompts, verifier steps {first.step}\n")
    print(table(HEAD, [row for batch in batches for row in rows_of(found, batch)]))
    whole = ["batch", "plain tok/s, decode", "plain tok/s", "best tok/s", "generate", "assisted"]
    rows = [row for batch in batches for row in library_rows(found, batch)]
    print("\nprefill included, but for the first:\n")
    print(table([*whole, "plain / generate"], rows))


def bars(found: Measured) -> list[Bar]:
    """The issue's, at batch 1."""
    at = found.figures.by_batch.get(1)
    if at is None:
        return []
    chains = [one for one in at.shapes.values() if one.is_chain]
    worst = min(chains, key=lambda one: one.measured_over_predicted)
    return [
        Bar(
            f"{found.dtype}: measured over predicted, worst chain (N = {worst.n})",
            worst.measured_over_predicted,
            OVERHEAD,
        ),
        Bar(
            f"{found.dtype}: our loop without a draft over generate",
            found.plain_over_generate(1),
            LIBRARY_BAR,
        ),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # pyright: ignore
    parser.add_argument("head", type=Path, help="folder of a head, as runs/demo/best")
    parser.add_argument("--verifier", default=SMOLLM2, help="the verifier it was trained on")
    parser.add_argument("--cache", type=Path, default=Path("cache"))
    parser.add_argument("--prompts", nargs="+", default=["data/demo/eval_prompts.jsonl"])
    parser.add_argument("--count", type=int, default=16, help="prompts, of all tasks")
    parser.add_argument("--tokens", type=int, default=64, help="most of an answer")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--dtypes", nargs="+", default=[one.name for one in Precision])
    parser.add_argument("--chains", type=int, default=6, help="longest chain; all up to it")
    parser.add_argument("--trees", nargs="*", default=TREES)
    parser.add_argument("--assistant-layers", type=int, default=8, help="0: no assistant")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, help="of torch; default: its own choice")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    args = parser.parse_args()
    if args.threads:
        use_threads(args.threads)
    found = [measure(args, Precision[name]) for name in args.dtypes]
    for one in found:
        show(one)
    reached = [bar for one in found for bar in bars(one)]
    print()
    for line in bar_lines(reached):
        print(line)
    if args.json:
        settings = {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()}
        figures = {one.dtype: jsonable(asdict(one.figures)) for one in found}
        whole = {**settings, "figures": figures, "bars": bars_as_json(reached)}
        write_atomically(args.json, json.dumps(whole, indent=2) + "\n")


if __name__ == "__main__":
    main()
