"""Heads in the real decoding loop: chains at a temperature, by the ratio rule where it draws.

    python tests/bench/acceptance_decode.py --work DIR [--temperature 1] [--count 40] HEAD_DIR ...

Float32, the held-out prompts, a spread over all tasks. Temperature 0 must repeat what the walk
counted on the same prompts, but for the rounds near an answer's end; above it guesses are drawn
from the head and kept by min(1, target/draft). Beside each head: decode-<temperature>.json.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[0] = str(ROOT)
sys.path.append(str(ROOT / "tests" / "bench"))

import torch  # noqa: E402  after the path is set
from acceptance_data import HELD, HELD_TOKENS, rows_of  # noqa: E402
from acceptance_states import CPU, find_inputs  # noqa: E402

from conf.runtime import cache_dir, progress, write_atomically  # noqa: E402
from conf.shapes import chain  # noqa: E402
from data.distributed import use_threads  # noqa: E402
from data.records import Turn  # noqa: E402
from data.template import encode_prompt  # noqa: E402
from eval.acceptance import Counters  # noqa: E402
from eval.decode import DecodeSettings, decode  # noqa: E402
from eval.generation import Generation  # noqa: E402
from eval.verify import AcceptRule  # noqa: E402
from models.generate import end_ids  # noqa: E402
from models.heads import load_head  # noqa: E402
from models.sampling import Sampling  # noqa: E402
from models.verifier import Verifier  # noqa: E402

BATCH = 8
GUESSES = 5


def spread(rows: Sequence[dict], count: int) -> list[dict]:
    """``count`` of them, evenly through the file, which goes task by task."""
    return [rows[i * len(rows) // count] for i in range(min(count, len(rows)))]


def settings_of(verifier: Verifier, temperature: float) -> DecodeSettings:
    return DecodeSettings(
        max_new_tokens=HELD_TOKENS,
        eos_ids=end_ids(verifier),
        shape=chain(GUESSES),
        sampling=Sampling(temperature),
        rule=AcceptRule.rejection if temperature else AcceptRule.greedy,
        measure_overlap=True,
    )


def counted(answers: Sequence[Generation]) -> dict[str, object]:
    counters = [Counters.of(one.rounds, len(one.tokens), GUESSES) for one in answers]
    overlap = [value for one in answers for value in one.overlap]
    whole = sum(counters, Counters())
    return {
        "tau": whole.tau,
        "alpha_tv": sum(overlap) / max(len(overlap), 1),
        "counters": [asdict(one) for one in counters],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--layers", default="2,15,27")
    parser.add_argument("heads", nargs="+", type=Path)
    args = parser.parse_args()
    use_threads(1)
    layers = [int(word) for word in args.layers.split(",")]
    cfg = find_inputs(args.work, HELD, layers, None, []).cfg
    verifier = Verifier.load(cfg.verifier, cache_dir(cfg), CPU, torch.float32)
    rows = spread(list(rows_of(args.work / "held_prompts.jsonl")), args.count)
    prompts = [
        encode_prompt(
            [Turn(turn["role"], turn["content"]) for turn in row["conversations"]],
            verifier.tokenizer,
            {},
        )
        for row in rows
    ]
    settings = settings_of(verifier, args.temperature)
    for folder in args.heads:
        draft = load_head(folder, verifier.facts, verifier.ends)
        answers: list[Generation] = []
        groups = range(0, len(prompts), BATCH)
        for start in progress(groups, len(groups), folder.name, "batch"):
            group = prompts[start : start + BATCH]
            seeds = list(range(start, start + len(group)))
            answers += decode(verifier, draft, group, settings, seeds).generations
        found = {"temperature": args.temperature, **counted(answers)}
        write_atomically(folder / f"decode-{args.temperature:g}.json", json.dumps(found))
        print(json.dumps({"head": str(folder), **{k: found[k] for k in ("tau", "alpha_tv")}}))


if __name__ == "__main__":
    main()
