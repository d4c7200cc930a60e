"""Tokens a second of a whole capture against the bare forward of the verifier, same batches.

    python tests/bench/capture.py [--verifier tiny] [--tokens 20000] [--dtype bfloat16] [--json F]

"bare" runs the verifier over the padded batches of the capture, and its head on the rows that keep
their last state. "capture" is data.capture on the same samples into an empty folder, from the check
of the states to the manifest; the verifier is in memory for both. Timed in turns, so that a busy
machine slows both. Bytes a token are those of the files, on samples supervised in full and to a
fifth.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter

ROOT = Path(__file__).resolve().parents[2]
sys.path[0] = str(ROOT)
sys.path.append(str(ROOT / "tests" / "bench"))

import torch  # noqa: E402  after the path is set
from bars import Bar, bar_lines, bars_as_json  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402

from conf.runtime import RankInfo, write_atomically  # noqa: E402
from conf.schema import Device, Precision, RunConfig, StateDtype, VerifierSection  # noqa: E402
from data.capture import capture  # noqa: E402
from data.capture_job import plan  # noqa: E402
from data.chains import asking_rows  # noqa: E402
from data.manifest import read_manifest  # noqa: E402
from data.records import PreparedData, Samples, Skipped, TokenizedSample  # noqa: E402
from data.states import batches, padded  # noqa: E402
from models.bundled import SMOLLM2, resolve  # noqa: E402
from models.verifier import Verifier, load_tokenizer  # noqa: E402

ALONE = RankInfo(0, 1, 0)
SHARES = (1.0, 0.5, 0.2)  # of the tokens that are supervised


@dataclass(frozen=True)
class Speed:
    share: float  # of the tokens that are supervised
    tokens: int
    bare: float  # tokens a second, median over the rounds
    capture: float
    ratio: float  # median over the rounds of capture / bare, each pair timed one after the other


@dataclass(frozen=True)
class Weight:
    dtype: str
    share: float
    bytes: float  # of the shard files, a token
    allowed: float


def some_samples(tokens: int, longest: int, share: float, vocabulary: int) -> list[TokenizedSample]:
    """Random ids in samples of ``longest`` / 4 to ``longest`` tokens, the last part supervised."""
    generator = torch.Generator().manual_seed(0)
    samples: list[TokenizedSample] = []
    left = tokens
    while left > 0:
        length = int(torch.randint(longest // 4, longest + 1, (1,), generator=generator))
        ids = torch.randint(3, vocabulary, (length,), generator=generator)
        mask = torch.arange(length) >= length - round(share * length)
        samples.append(TokenizedSample(f"sample-{len(samples)}", ids, mask, False, False))
        left -= length
    return samples


def bare_forward(verifier: Verifier, shards: list[list[list[TokenizedSample]]]) -> None:
    """The batches of each shard through backbone and head: what capture cannot do without."""
    for batch in (batch for shard in shards for batch in shard):
        ids, real = padded(batch)
        lengths = [len(sample.input_ids) for sample in batch]
        mask = torch.cat([sample.loss_mask for sample in batch])
        asks = asking_rows(mask, torch.tensor([0, *lengths]).cumsum(0))
        rows = real.flatten().nonzero().flatten()[asks].to(verifier.device)
        with torch.no_grad():
            output = verifier.backbone(input_ids=ids.to(verifier.device), use_cache=False)
            verifier.logits_from(output.last_hidden_state.flatten(0, 1)[rows])
    if verifier.device.type == "cuda":
        torch.cuda.synchronize()


@contextmanager
def loaded(verifier: Verifier) -> Iterator[None]:
    """Captures find ``verifier`` in memory."""
    real = Verifier.load
    Verifier.load = lambda *_: verifier  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        Verifier.load = real


def seconds_of_capture(cfg: RunConfig, prepared: PreparedData, folder: Path) -> float:
    """Into an empty folder; the bytes it leaves stay for who counts them."""
    cfg = replace(cfg, run=replace(cfg.run, cache=str(folder)))
    begin = perf_counter()
    capture(cfg, prepared, ALONE)
    return perf_counter() - begin


def measure_speed(
    cfg: RunConfig, verifier: Verifier, share: float, args: argparse.Namespace, room: Path
) -> Speed:
    prepared = prepared_of(args, share, verifier.facts.vocab_size)
    spans = plan(replace(cfg, run=replace(cfg.run, cache=str(room))), prepared).spans
    shards = []
    for span in spans:
        samples = prepared.samples[span.first : span.first + span.count]
        lengths = [len(sample.input_ids) for sample in samples]
        groups = batches(lengths, cfg.capture.batch_tokens)
        shards.append([[samples[i] for i in places] for places in groups])
    tokens = sum(span.tokens for span in spans)
    bare: list[float] = []
    whole: list[float] = []
    for number in range(args.rounds + 1):
        begin = perf_counter()
        bare_forward(verifier, shards[:1] if number == 0 else shards)  # the first round warms up
        middle = perf_counter()
        spent = seconds_of_capture(cfg, prepared, room / f"{share}-{number}") if number else 0.0
        if number:
            bare.append(tokens / (middle - begin))
            whole.append(tokens / spent)
    ratio = median(ours / theirs for ours, theirs in zip(whole, bare, strict=True))
    found = Speed(share, tokens, median(bare), median(whole), ratio)
    print(
        f"{share:5.0%} supervised: capture {found.capture:8.1f} tokens/s, bare {found.bare:8.1f}; "
        f"ratio {found.ratio:.3f} over {tokens:,} tokens",
        flush=True,
    )
    return found


def prepared_of(args: argparse.Namespace, share: float, vocabulary: int) -> PreparedData:
    samples = some_samples(args.tokens, args.length, share, vocabulary)
    counts = torch.zeros(vocabulary, dtype=torch.int64)
    name = f"bench-{args.tokens}-{args.length}-{share}"
    rows = Skipped(len(samples), len(samples))
    return PreparedData(Path(name), name, flat(samples), counts, counts, rows)


def flat(samples: list[TokenizedSample]) -> Samples:
    """What the prepare stage makes of ``samples``."""
    ids = [torch.tensor(list(sample.id.encode()), dtype=torch.uint8) for sample in samples]
    return Samples(
        tokens=torch.cat([sample.input_ids for sample in samples]).int(),
        mask=torch.cat([sample.loss_mask for sample in samples]).to(torch.uint8),
        offsets=torch.tensor([0, *(len(sample.input_ids) for sample in samples)]).cumsum(0),
        id_text=torch.cat(ids),
        id_offsets=torch.tensor([0, *map(len, ids)]).cumsum(0),
        greedy=torch.tensor([sample.greedy for sample in samples]),
        held_out=torch.tensor([sample.held_out for sample in samples]),
        prompts=torch.arange(len(samples)),
    )


def measure_weight(
    cfg: RunConfig, verifier: Verifier, args: argparse.Namespace, room: Path
) -> list[Weight]:
    """Bytes a token of shard files, in the cases that the bars name."""
    width = verifier.facts.hidden_size
    cases = (
        (StateDtype.bfloat16, 1.0, 8 * width + 40),
        (StateDtype.bfloat16, 0.2, 6.4 * width + 40),
        (StateDtype.fp8, 1.0, 4 * width + 40),
    )
    found = []
    small = argparse.Namespace(tokens=min(args.tokens, 4000), length=args.length)
    for dtype, share, allowed in cases:
        prepared = prepared_of(small, share, verifier.facts.vocab_size)
        folder = room / f"weight-{dtype.value}-{share}"
        stored = replace(cfg.capture, dtype=dtype)
        run = replace(cfg.run, cache=str(folder))
        shards = read_manifest(
            capture(replace(cfg, capture=stored, run=run), prepared, ALONE)
        ).shards
        weight = sum(shard.bytes for shard in shards) / sum(shard.tokens for shard in shards)
        found.append(Weight(dtype.value, share, weight, allowed))
    return found


def tiny(folder: Path) -> Path:
    """A random verifier for a try of this script, with the bundled one's tokenizer."""
    config = LlamaConfig(
        vocab_size=2000,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    load_tokenizer(VerifierSection(path=SMOLLM2), ROOT / "cache").save_pretrained(folder)
    return folder


def bars_of(speeds: list[Speed], weights: list[Weight]) -> list[Bar]:
    return [
        *(Bar(f"capture / bare forward, {s.share:.0%} supervised", s.ratio, 0.95) for s in speeds),
        *(
            Bar(f"bytes a token, {w.dtype}, {w.share:.0%} supervised", w.bytes, w.allowed, False)
            for w in weights
        ),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # pyright: ignore
    parser.add_argument("--verifier", default=SMOLLM2, help="folder, hub name, wheel, or tiny")
    parser.add_argument("--tokens", type=int, default=20_000)
    parser.add_argument("--length", type=int, default=256, help="of the longest sample")
    parser.add_argument("--batch-tokens", type=int, default=4096)
    parser.add_argument("--dtype", choices=[p.value for p in Precision], default="bfloat16")
    parser.add_argument("--stored", choices=[d.value for d in StateDtype], default="bfloat16")
    parser.add_argument("--shares", type=float, nargs="*", default=SHARES)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="on the disk that is to be written")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    args = parser.parse_args()
    with TemporaryDirectory(dir=args.folder) as name:
        room = Path(name)
        path = str(tiny(room / "tiny") if args.verifier == "tiny" else args.verifier)
        if args.verifier != "tiny":
            path = str(resolve(path, ROOT / "cache"))
        cfg = RunConfig()
        cfg.verifier = VerifierSection(path=path, dtype=Precision(args.dtype))
        cfg.run.device = Device(args.device)
        cfg.capture.batch_tokens = args.batch_tokens
        cfg.capture.dtype = StateDtype(args.stored)
        dtype = getattr(torch, args.dtype)
        verifier = Verifier.load(cfg.verifier, ROOT / "cache", torch.device(args.device), dtype)
        with loaded(verifier):
            speeds = [measure_speed(cfg, verifier, share, args, room) for share in args.shares]
            weights = measure_weight(cfg, verifier, args, room)
    bars = bars_of(speeds, weights)
    print("\n".join(bar_lines(bars)))
    if args.json:
        figures = {
            "verifier": args.verifier,
            "device": args.device,
            "dtype": args.dtype,
            "stored": args.stored,
            "batch_tokens": args.batch_tokens,
            "speeds": [asdict(one) for one in speeds],
            "weights": [asdict(one) for one in weights],
            "bars": bars_as_json(bars),
        }
        write_atomically(args.json, json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
