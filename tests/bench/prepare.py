"""Tokens a second of data.prepare against one plain tokenise pass, and its memory by rows.

    python tests/bench/prepare.py [--rows 100000] [--workers N] [--rounds 3] [--json FILE]

The plain pass is ``tokenizer(texts)`` in batches on texts that are rendered and in memory already,
on all cores. Ours starts with a jsonl file and ends with the folder on disk: it reads, starts its
workers, decodes, renders, marks, tokenises, looks for copies, splits, counts labels and writes.
Each runs in a process of its own, in turns, so that a busy machine slows both.

Memory: the proportional set size of the process and all its workers, looked at five times a
second (pages that processes share count once), at a quarter of the rows and at all of them.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[2]
sys.path[0] = str(ROOT)

from conf.runtime import write_atomically  # noqa: E402  after the path is set
from conf.schema import RunConfig, VerifierSection  # noqa: E402
from data.prepare import prepare  # noqa: E402
from data.records import Turn  # noqa: E402
from data.render import ChatTemplate  # noqa: E402
from models.bundled import SMOLLM2, resolve  # noqa: E402
from models.facts import load_tokenizer  # noqa: E402

WORDS = ROOT / "data/demo/answers.jsonl"
TURNS = ("user", "assistant", "user", "assistant")
BATCH = 1000  # texts a call of the plain pass
MIB = 1 << 20


@dataclass(frozen=True)
class Pass:
    """What one process did."""

    seconds: float
    tokens: int
    peak: int = 0  # bytes, of all its processes together


@dataclass(frozen=True)
class Round:
    plain: Pass
    eyrie: Pass


@dataclass(frozen=True)
class Figures:
    rows: int
    tokens: int  # of the plain pass
    workers: int | None
    cores: int
    plain_tokens_per_s: float
    eyrie_tokens_per_s: float
    ratio: float  # median over the rounds of eyrie / plain in tokens a second
    quarter_peak_mib: float  # with a quarter of the rows
    peak_mib: float
    bytes_a_row: float  # what a further row adds to the peak
    rounds: list[Round]


def write_rows(file: Path, rows: int, words: int) -> None:
    """Rows of the demo's words, drawn by a fixed seed; no two are alike."""
    known: list[str] = []
    for line in WORDS.read_text(encoding="utf-8").splitlines():
        for turn in json.loads(line)["conversations"]:
            known += turn["content"].split()
    draw = random.Random(0)
    with file.open("w", encoding="utf-8") as out:
        for row in range(rows):
            turns = [
                {"role": role, "content": " ".join(draw.choices(known, k=words))} for role in TURNS
            ]
            out.write(json.dumps({"id": f"row-{row}", "messages": turns}) + "\n")


def plain_pass(section: VerifierSection, file: Path) -> Pass:
    tokenizer = load_tokenizer(section, ROOT / "cache")
    template = ChatTemplate(tokenizer, {})
    texts = []
    for line in file.open(encoding="utf-8"):
        turns = json.loads(line)["messages"]
        texts.append(template.whole(tuple(Turn(turn["role"], turn["content"]) for turn in turns)))
    tokenizer(texts[:BATCH], verbose=False)  # starts the threads
    begin = time.perf_counter()
    tokens = 0
    for at in range(0, len(texts), BATCH):
        tokens += sum(map(len, tokenizer(texts[at : at + BATCH], verbose=False)["input_ids"]))
    return Pass(time.perf_counter() - begin, tokens)


def eyrie_pass(section: VerifierSection, file: Path, cache: str, workers: int | None) -> Pass:
    cfg = RunConfig(verifier=section)
    cfg.data.path, cfg.data.workers, cfg.run.cache = [str(file)], workers, cache
    begin = time.perf_counter()
    prepared = prepare(cfg)
    return Pass(time.perf_counter() - begin, prepared.samples.tokens.numel())


def run(kind: str, file: Path, args: argparse.Namespace) -> Pass:
    """One pass in a process of its own, watched from here."""
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        answer = Path(folder) / "answer.json"
        command = [sys.executable, __file__, "--only", kind, "--file", str(file)]
        command += ["--answer", str(answer), "--verifier", args.verifier, "--folder", folder]
        command += ["--workers", str(args.workers)] if args.workers else []
        # A session of its own: its workers are found by it.
        with subprocess.Popen(command, start_new_session=True, stdout=subprocess.DEVNULL) as child:
            peak = 0
            while child.poll() is None:
                peak = max(peak, memory_of_session(child.pid))
                time.sleep(0.2)
        if child.returncode:
            raise SystemExit(f"{kind}: ended with exit code {child.returncode}")
        found = json.loads(answer.read_text())
        return Pass(found["seconds"], found["tokens"], peak)


def memory_of_session(leader: int) -> int:
    """Bytes of proportional set size of all processes in a session."""
    total = 0
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if os.getsid(int(process.name)) != leader:
                continue
            for line in (process / "smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    total += int(line.split()[1]) * 1024
        except (OSError, ProcessLookupError):
            continue  # it has ended meanwhile
    return total


def measure(args: argparse.Namespace) -> Figures:
    quarter, whole = args.folder / "quarter.jsonl", args.folder / "whole.jsonl"
    write_rows(quarter, args.rows // 4, args.words)
    write_rows(whole, args.rows, args.words)
    small = run("eyrie", quarter, args)
    rounds = [
        Round(run("plain", whole, args), run("eyrie", whole, args)) for _ in range(args.rounds)
    ]
    peak = max(one.eyrie.peak for one in rounds)
    tokens = rounds[0].plain.tokens
    rate = [
        median(one.tokens / one.seconds for one in some)
        for some in ([r.plain for r in rounds], [r.eyrie for r in rounds])
    ]
    ratios = [
        (one.eyrie.tokens / one.eyrie.seconds) / (one.plain.tokens / one.plain.seconds)
        for one in rounds
    ]
    return Figures(
        rows=args.rows,
        tokens=tokens,
        workers=args.workers,
        cores=len(os.sched_getaffinity(0)),
        plain_tokens_per_s=rate[0],
        eyrie_tokens_per_s=rate[1],
        ratio=median(ratios),
        quarter_peak_mib=small.peak / MIB,
        peak_mib=peak / MIB,
        bytes_a_row=(peak - small.peak) / (args.rows - args.rows // 4),
        rounds=rounds,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # pyright: ignore
    parser.add_argument("--verifier", default=SMOLLM2, help="folder, hub name or wheel")
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--words", type=int, default=60, help="words a turn")
    parser.add_argument("--workers", type=int, help="data.workers; none: its default")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="for rows and results; none: a temporary one")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    for word in ("--only", "--file", "--answer"):  # of the processes that it starts itself
        parser.add_argument(word, help=argparse.SUPPRESS)
    args = parser.parse_args()
    section = VerifierSection(path=args.verifier)
    if args.only:
        file, folder = Path(args.file), str(args.folder)
        plain = args.only == "plain"
        found = (
            plain_pass(section, file) if plain else eyrie_pass(section, file, folder, args.workers)
        )
        write_atomically(Path(args.answer), json.dumps(asdict(found)))
        return
    # Converted or fetched before anything is timed.
    args.verifier = str(resolve(args.verifier, ROOT / "cache"))
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        args.folder = Path(folder)
        figures = measure(args)
    print(
        f"{figures.rows:,} rows, {figures.tokens:,} tokens, {figures.cores} cores\n"
        f"plain {figures.plain_tokens_per_s:,.0f} tokens/s, data.prepare "
        f"{figures.eyrie_tokens_per_s:,.0f} tokens/s: ratio {figures.ratio:.2f} (bar: 0.5)\n"
        f"peak memory {figures.quarter_peak_mib:,.0f} MiB at a quarter of the rows, "
        f"{figures.peak_mib:,.0f} MiB at all: {figures.bytes_a_row:,.0f} bytes a row"
    )
    if args.json:
        write_atomically(args.json, json.dumps(asdict(figures), indent=2) + "\n")


if __name__ == "__main__":
    main()
