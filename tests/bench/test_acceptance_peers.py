"""The feed that peers train on, the schedule of their training, and that their heads run here."""

import itertools
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

sys.path.append(str(Path(__file__).resolve().parent))  # the benchmark's modules import each other

from acceptance_feed import BATCH, Ends, Facts, Feed, FeedSample, write_feed
from acceptance_training import FLOOR, PROBED, WARMUP, Budget, share_of_peak
from transformers import LlamaConfig

from conf.schema import Supervise
from data.chains import Chains
from data.records import TTTBatch
from models.eagle3 import Eagle3Draft
from models.facts import VerifierFacts
from models.heads import load_head
from models.kernels import CPU_FLASH
from models.layer_shape import LayerShape
from models.verifier import VerifierEnds
from train.ttt import unroll

HERE = Path(__file__).resolve().parent
LENGTHS = [9, 24, 17, 12, 31]
SMALL = Facts(
    source="random",
    verifier="random",
    num_layers=8,
    aux_layers=[2, 4, 5],
    hidden_size=32,
    intermediate_size=48,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    vocab_size=96,
    draft_vocab_size=40,
    rms_norm_eps=1e-5,
    max_positions=128,
    rope={"rope_type": "default", "rope_theta": 10000.0},
)


def small_ends(generator: torch.Generator) -> Ends:
    ids = torch.randperm(SMALL.vocab_size, generator=generator)[: SMALL.draft_vocab_size].sort()[0]
    t2d = torch.zeros(SMALL.vocab_size, dtype=torch.bool)
    t2d[ids] = True
    tables = torch.randn(2, SMALL.vocab_size, SMALL.hidden_size, generator=generator).bfloat16()
    return Ends(tables[0], tables[1], ids - torch.arange(len(ids)), t2d)


def small_samples(generator: torch.Generator) -> list[FeedSample]:
    samples = []
    for length in LENGTHS:
        states = torch.randn(length, 4 * SMALL.hidden_size, generator=generator).bfloat16()
        ids = torch.randint(SMALL.vocab_size, (length,), generator=generator)
        aux, last = states.split([3 * SMALL.hidden_size, SMALL.hidden_size], -1)
        samples.append(FeedSample(ids, torch.arange(length) >= length // 2, aux, last))
    return samples


@dataclass(frozen=True)
class Small:
    path: Path
    ends: Ends
    samples: list[FeedSample]


@pytest.fixture
def small(tmp_path: Path) -> Small:
    generator = torch.Generator().manual_seed(3)
    made = Small(tmp_path / "train.feed", small_ends(generator), small_samples(generator))
    write_feed(made.path, SMALL, made.ends, LENGTHS, made.samples)
    return made


def test_a_feed_gives_back_what_was_written(small: Small):
    feed = Feed(small.path)
    assert feed.facts == SMALL
    assert len(list(feed)) == len(feed) == len(LENGTHS)
    for found, written in zip(feed, small.samples, strict=True):
        assert all(torch.equal(vars(found)[name], tensor) for name, tensor in vars(written).items())
    for name, tensor in vars(small.ends).items():
        assert torch.equal(getattr(feed.ends, name), tensor)
    assert small.ends.t2d[feed.ends.target_ids].all()
    assert not small.path.with_name("train.feed.partial").exists()
    load_file(small.path)  # a whole safetensors file to its own library


@pytest.mark.parametrize("lengths", [LENGTHS[:-1], [*LENGTHS, 5], [10, *LENGTHS[1:]]])
def test_samples_that_are_not_those_told_leave_no_feed(
    tmp_path: Path, small: Small, lengths: list[int]
):
    with pytest.raises(ValueError, match="told"):
        write_feed(tmp_path / "other.feed", SMALL, small.ends, lengths, small.samples)
    assert not (tmp_path / "other.feed").exists()


def test_every_sample_comes_once_an_epoch_in_an_order_of_the_seed(small: Small):
    feed = Feed(small.path)
    count = len(LENGTHS)  # odd: the third batch spans two epochs
    batches = list(itertools.islice(feed.batches(seed=1), 2 * count // BATCH))
    assert all(len(batch) == BATCH for batch in batches)
    stream = list(itertools.chain.from_iterable(batches))
    assert sorted(stream[:count]) == sorted(stream[count:]) == list(range(count))
    again = list(itertools.islice(Feed(small.path).batches(seed=1), len(batches)))
    assert again == batches
    orders = [feed.order(seed, epoch) for seed in range(3) for epoch in range(3)]
    assert len({tuple(order) for order in orders}) > 3


def test_the_rate_rises_to_its_peak_and_falls_to_the_floor():
    rates = [share_of_peak(number / 1000) for number in range(1001)]
    assert 0 < rates[0] < 0.2
    assert max(rates) == rates[round(1000 * WARMUP)] == 1
    assert rates == sorted(rates[:40]) + sorted(rates[40:], reverse=True)
    assert rates[520] == pytest.approx((1 + FLOOR) / 2)  # half the way down
    assert rates[-1] == pytest.approx(FLOOR)


def test_a_budget_counts_what_is_done_inside_it():
    steps, seconds = Budget(4, None), Budget(None, 0.02)
    while steps.progress < 1:
        with steps:
            pass
    assert steps.updates == 4
    sum(range(2_000_000))  # not counted
    assert seconds.progress == 0
    while seconds.progress < 1:
        with seconds:
            sum(range(200_000))
    assert seconds.used >= 0.02
    assert 1 <= seconds.updates <= 20


# ---- with the peers --------------------------------------------------------------------------


def python_of(peer: str) -> Path:
    envs = os.environ.get("EYRIE_PEER_ENVS", "")
    python = Path(envs) / peer / "bin" / "python"
    if not envs or not python.is_file():
        pytest.skip(f"EYRIE_PEER_ENVS={envs}: no {peer} there; run tests/bench/peer_envs.sh")
    return python


def facts_of(facts: Facts) -> VerifierFacts:
    return VerifierFacts(
        path=facts.verifier,
        architectures=["LlamaForCausalLM"],
        hidden_size=facts.hidden_size,
        num_layers=facts.num_layers,
        vocab_size=facts.vocab_size,
        max_positions=facts.max_positions,
        layer=LayerShape(
            num_heads=facts.num_heads,
            num_kv_heads=facts.num_kv_heads,
            head_dim=facts.head_dim,
            intermediate_size=facts.intermediate_size,
            rms_norm_eps=facts.rms_norm_eps,
        ),
        rope=facts.rope,
        aux_layers=facts.aux_layers,
        bos_id=None,
        eos_ids=[],
    )


def our_logits(draft: Eagle3Draft, sample: FeedSample) -> list[Tensor]:
    """K times [T-2-k, Vd] fp32: row t, step k guesses x[t+2+k]."""
    length = len(sample.input_ids)
    mask, starts = torch.ones(length, dtype=torch.bool), torch.tensor([0, length])
    batch = TTTBatch(
        input_ids=sample.input_ids,
        positions=torch.arange(length),
        aux=sample.aux.float(),
        last=sample.last.float(),
        argmax=sample.input_ids,  # targets: nothing here is scored
        lse=torch.zeros(length),
        samples=1,
        chains=Chains.of(mask, starts, PROBED, Supervise.span),
    )
    steps = unroll(draft, batch, CPU_FLASH)
    for k, step in enumerate(batch.chains.steps):
        assert step.rows.tolist() == list(range(length - 2 - k))
    return [draft.logits(normed) for normed in steps]


TRAINED = {
    "specforge": ["--depth", "3"],
    "specforge fc_norm": ["--depth", "2", "--fc-norm"],
    "speculators": ["--optimizer", "muon"],
    "speculators adamw": ["--optimizer", "adamw", "--fc-norm", "--no-norm-before-fc"],
    "speculators plain": [
        "--no-norm-before-residual", "--no-norm-before-fc", "--no-norm-output", "--depth", "4",
    ],
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(1200)  # a peer alone imports for 20 CPU-seconds
@pytest.mark.parametrize("case", TRAINED)
def test_a_head_that_a_peer_trained_guesses_here_as_in_its_own_forward(
    case: str, small: Small, tmp_path: Path
):
    peer = case.split()[0]
    python, head, probe = python_of(peer), tmp_path / "head", tmp_path / "probe.safetensors"
    command = [python, HERE / f"acceptance_{peer}.py", "--feed", small.path, "--out", head]
    run = subprocess.run(
        [*command, "--steps", "6", "--probe", probe, *TRAINED[case]],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    figures = json.loads(run.stdout.splitlines()[-1])
    assert figures["updates"] == 6
    assert figures["samples"] == 12
    assert 0 < figures["supervised"] < sum(LENGTHS) * 3
    theirs = load_file(probe)
    ends = VerifierEnds(small.ends.embedding.float(), small.ends.head.float(), LlamaConfig())
    draft = load_head(head, facts_of(SMALL), ends)
    sample = small.samples[0]
    ours = our_logits(draft, sample)
    assert len(ours) == len(theirs["logits"]) == PROBED
    for k, (mine, other) in enumerate(zip(ours, theirs["logits"], strict=True)):
        other = other[: len(mine)]
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-4 * float(other.std()))
        assert (mine[1:] - other[:-1]).abs().mean() > 0.1 * other.std(), k  # one row off is seen
    if peer == "speculators":  # its targets, from states after the norm: those of x[t+2] at row t
        head_rows = small.ends.head[Feed(small.path).ends.target_ids].float()
        wanted = F.linear(sample.last[1:].float(), head_rows)
        torch.testing.assert_close(theirs["targets"], wanted, rtol=1e-5, atol=1e-4)
