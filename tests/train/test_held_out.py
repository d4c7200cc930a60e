"""The held-out walk gives what the decoding loop gives on text the verifier wrote itself."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from conf.runtime import RankInfo
from conf.schema import (
    FULL,
    DraftSection,
    HeadInit,
    LossKind,
    Precision,
    Supervise,
    TTTSection,
    VerifierSection,
)
from conf.shapes import chain
from data.chains import Chains
from data.loader import batch_of
from data.records import CachedPack, CachedSample, TokenizedSample
from data.states import states_of
from eval import replay as played
from eval.acceptance import AcceptanceReport, Counters, report_acceptance, total
from eval.decode import DecodeSettings, decode
from eval.drafters.eagle3 import Eagle3Drafter
from eval.replay import Place, captured, replay
from models.eagle3 import DraftConfig, Eagle3Draft
from models.kernels import CPU_FLASH
from models.verifier import Verifier, load_ends
from models.vocab import DraftVocab
from train import held_out
from train.held_out import from_row, measure, measure_by_replay, to_row, walk_answers
from train.loss import Distillation
from train.ttt import TrainingTimeTest, unroll_own

CHAINS = (1, 3, 5)
ALONE = RankInfo(0, 1, 0)
PLACE = Place(torch.device("cpu"), torch.float32)
LIMIT = 36  # tokens of an answer


@dataclass
class Asked:
    prompt: list[int]
    eos_ids: list[int]


@dataclass
class Bench:
    """A verifier, a draft that is right now and then, and answers of the verifier's own."""

    verifier: Verifier
    draft: Eagle3Draft
    asked: list[Asked]
    samples: list[CachedSample]  # prompt, greedy answer, and max(CHAINS) tokens beyond it

    def live(self, n_draft: int) -> list[Counters]:
        """What decoding gives for every prompt."""
        counters = []
        for one in self.asked:
            settings = DecodeSettings(LIMIT, one.eos_ids, chain(n_draft))
            run = decode(self.verifier, self.draft, [one.prompt], settings).generations[0]
            counters.append(Counters.of(run.rounds, len(run.tokens), n_draft))
        return counters


def greedy_sample(verifier: Verifier, one: Asked) -> CachedSample:
    prompt = one.prompt
    settings = DecodeSettings(LIMIT, one.eos_ids)
    plain = decode(verifier, None, [prompt], settings, tail=max(CHAINS)).generations[0]
    ids = torch.tensor([*prompt, *plain.tokens, *plain.tail])
    mask = torch.zeros(len(ids), dtype=torch.bool)
    mask[len(prompt) : len(prompt) + len(plain.tokens)] = True
    sample = TokenizedSample("", ids, mask, greedy=True, held_out=True)
    return CachedSample(sample=sample, **vars(states_of(verifier, [sample], verifier.dtype)[0]))


def mask_of(samples: list[CachedSample]) -> Tensor:
    return torch.cat([cached.sample.loss_mask for cached in samples])


def overfit(
    draft: Eagle3Draft, samples: list[CachedSample], head: Tensor, verifier: Verifier
) -> None:
    """A few updates on the very text: enough to be right now and then, too few to be always."""
    ttt, mask = TTTSection(depth=2), mask_of(samples)
    pack = CachedPack.of(samples)
    batch = batch_of(pack, Chains.of(mask, pack.starts, ttt.depth, Supervise.span))
    teacher = Distillation(LossKind.ce, head, verifier.model.config)
    module = TrainingTimeTest(draft, teacher, ttt, CPU_FLASH)
    trained = [p for p in draft.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=3e-3)
    weights = torch.full((len(samples),), 1 / int(mask.sum()))
    for _ in range(40):
        module(batch, weights).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    draft.eval().requires_grad_(False)


@pytest.fixture(scope="module", params=[1, pytest.param(2, marks=pytest.mark.slow)])
def bench(request, tiny_verifier: Path, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    cache = tmp_path_factory.mktemp("cache")
    section = VerifierSection(path=str(tiny_verifier), dtype=Precision.float32)
    verifier = Verifier.load(section, cache, torch.device("cpu"), torch.float32)
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(3, 128, (size,), generator=generator).tolist() for size in (1, 7, 20)]
    asked = [Asked(prompt, []) for prompt in prompts]
    samples = [greedy_sample(verifier, one) for one in asked]
    first = samples[2].sample.input_ids.tolist()[20:]
    asked[2].eos_ids = [first[17]]  # from now on this answer ends before the limit
    samples[2] = greedy_sample(verifier, asked[2])
    assert 2 < int(samples[2].sample.loss_mask.sum()) <= 18
    torch.manual_seed(0)
    options = DraftSection(vocab_size=FULL, layers=request.param)
    draft = Eagle3Draft(DraftConfig.of(options, verifier.facts))
    ends = load_ends(section, cache, torch.float32)
    vocab = DraftVocab.from_counts(torch.ones(128, dtype=torch.int64), 128)
    draft.initialise(ends, vocab, HeadInit.verifier)
    overfit(draft, samples, ends.head, verifier)
    return Bench(verifier, draft, asked, samples)


def proposals(bench: Bench, samples: list[CachedSample], n_draft: int) -> Tensor:
    """[N, T] from the rows of ``samples``, end to end, from which a decoding loop can ask."""
    chains = Chains.of_answers(mask_of(samples), CachedPack.of(samples).starts)
    return unroll_own(bench.draft, batch_of(CachedPack.of(samples), chains), CPU_FLASH, n_draft)


@pytest.mark.parametrize("n_draft", CHAINS)
def test_the_walk_gives_the_loops_own_counters(bench: Bench, n_draft: int):
    live = bench.live(n_draft)
    for cached, counters in zip(bench.samples, live, strict=True):
        proposed = proposals(bench, [cached], n_draft).T
        sample = cached.sample
        assert walk_answers(proposed, sample.input_ids, sample.loss_mask) == counters
    assert 0 < total(live).accepted < total(live).drafted  # else the test shows nothing


@pytest.mark.parametrize("n_draft", CHAINS)
def test_a_replay_gives_the_loops_own_counters(bench: Bench, n_draft: int):
    """In a ragged batch that sequences leave, and each alone."""
    live = bench.live(n_draft)
    assert replay(bench.draft, bench.samples, n_draft, PLACE) == live
    alone = [replay(bench.draft, [one], n_draft, PLACE) for one in bench.samples]
    assert [counters for [counters] in alone] == live


def test_a_replay_keeps_to_the_drafts_positions(bench: Bench):
    """Fewer guesses near the limit, and none beyond, as in the loop."""
    limited = Eagle3Draft(replace(bench.draft.config, max_positions=30))
    limited.load_state_dict(bench.draft.state_dict())
    limited.eval().requires_grad_(False)
    of_limited = replace(bench, draft=limited)
    live = of_limited.live(3)
    assert replay(limited, bench.samples, 3, PLACE) == live
    assert sum(one.rounds for one in live) < sum(one.rounds for one in bench.live(3))


@pytest.mark.parametrize("by", [1, -1])
def test_a_replay_of_states_of_other_rows_shows(bench: Bench, by: int):
    moved = [replace(one, aux=one.aux.roll(by, 0)) for one in bench.samples]
    assert replay(bench.draft, moved, 3, PLACE) != bench.live(3)


def test_a_replay_hands_on_the_last_states_of_the_rows_it_plays(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
):
    """The cache has those of rows that ask alone: the row before a root is one, always."""
    cached = bench.samples[1]
    text = cached.sample.input_ids
    wanted = bench.verifier.states(text[None]).last[0]
    end = int(cached.sample.loss_mask.nonzero()[-1]) + 1
    rows: list[int] = []

    class Spy(Eagle3Drafter):
        def begin(self, prompts, states, roots, lengths):
            self.check(states, lengths[0] - 1, lengths[0] - 1)
            super().begin(prompts, states, roots, lengths)
            rows.append(lengths[0])

        def feed(self, tokens, states, counts):
            super().feed(tokens, states, counts)
            if rows and rows[-1] + counts[0] < end - 1:  # begin feeds, too; an ended answer leaves
                self.check(states, 0, rows[-1])
                assert tokens[0].tolist() == text[rows[-1] + 1 :][: counts[0]].tolist()
                rows.append(rows[-1] + counts[0])

        def check(self, states, row: int, place: int) -> None:
            found = states.last[0, row:]
            torch.testing.assert_close(found, wanted[place:][: len(found)], atol=1e-5, rtol=1e-5)

    monkeypatch.setattr(played, "drafter_for", Spy)
    replay(bench.draft, [cached], 3, PLACE)
    assert len(rows) > 3 and captured(cached, PLACE).last[0].isnan().all()


def test_a_replay_finds_every_answer(bench: Bench):
    """Two answers in one text, one of them the first tokens: as the walk has them."""
    cached = bench.samples[2]
    ids = cached.sample.input_ids
    mask = torch.zeros(len(ids), dtype=torch.bool)
    mask[:7] = mask[12:20] = True
    sample = replace(cached.sample, loss_mask=mask)
    states = states_of(bench.verifier, [sample], bench.verifier.dtype)[0]
    twice = CachedSample(sample=sample, **vars(states))
    walked = walk_answers(proposals(bench, [twice], 3).T, ids, mask)
    assert replay(bench.draft, [twice], 3, PLACE) == [walked]
    assert walked.rounds > 2 and walked.tokens == 6 + 8


def test_a_pack_is_walked_like_its_samples(bench: Bench):
    """A neighbour changes no proposal."""
    together = proposals(bench, bench.samples, 3)
    alone = [proposals(bench, [cached], 3) for cached in bench.samples]
    assert torch.equal(together, torch.cat(alone, 1))


def test_rows_that_are_not_unrolled_count_nowhere(bench: Bench):
    """The walk of an answer asks no row but those of its chains."""
    cached = bench.samples[1]
    sample, starts = cached.sample, CachedPack.of([cached]).starts
    everyone = torch.ones(1, len(sample.input_ids), dtype=torch.bool)
    every_row = batch_of(CachedPack.of([cached]), Chains.build(~everyone, everyone, starts))
    every = unroll_own(bench.draft, every_row, CPU_FLASH, 3).T
    some = proposals(bench, [cached], 3).T
    assert (some == -1).all(1).any() and not (every == -1).any()
    walked = [walk_answers(rows, sample.input_ids, sample.loss_mask) for rows in (some, every)]
    assert walked[0] == walked[1]


def test_every_answer_of_a_sample_is_walked(bench: Bench):
    """Two answers in one text: each starts at the row before its own first token."""
    ids = torch.arange(12)
    mask = torch.tensor([0, 0, 1, 1, 1, 0, 0, 1, 1, 1, 1, 0], dtype=torch.bool)
    right = torch.stack([ids + 2, ids + 3], 1)  # row t: x[t+2], x[t+3]
    found = walk_answers(right, ids, mask)
    # [2, 5): rows 1, 2 in one round; [7, 11): rows 6, 7, 8 in one round
    assert found == Counters(2, 4, 4, [2, 2], [2, 2], 3 + 4)
    wrong = walk_answers(torch.zeros_like(right), ids, mask)
    assert wrong == Counters(5, 10, 5, [0, 0], [5, 0], 3 + 4)
    assert walk_answers(right, ids, mask & (ids == 4)).rounds == 0  # one token: nothing to draft


class FakeReader:
    """The part of ShardReader that ``measure`` uses."""

    def __init__(self, samples: list[CachedSample], greedy: list[bool]):
        self.samples, self.greedy = samples, greedy
        self.valid_indices = list(range(len(samples)))

    def read(self, index: int) -> CachedSample:
        return self.samples[index]


def measured(bench: Bench, greedy: list[bool], ranks: RankInfo) -> AcceptanceReport:
    engine = SimpleNamespace(
        device=torch.device("cpu"),
        dtype=torch.float32,
        propose=lambda batch, depth: unroll_own(bench.draft, batch, CPU_FLASH, depth),
    )
    return measure(engine, FakeReader(bench.samples, greedy), 3, ranks)


def test_measure_reports_the_loops_counters(bench: Bench):
    live = bench.live(3)
    report = measured(bench, [True] * 3, ALONE)
    assert report == report_acceptance(live, held_out.RESAMPLES, seed=0)
    assert report.tau == pytest.approx(1 + sum(report.survival_by_depth))
    assert measured(bench, [False, True, False], ALONE).counters == live[1]  # others' text is left
    assert measured(bench, [False] * 3, ALONE).counters == total(live)  # unless there is no other


def by_replay(bench: Bench, greedy: list[bool], ranks: RankInfo) -> AcceptanceReport:
    return measure_by_replay(bench.draft, FakeReader(bench.samples, greedy), 3, ranks, PLACE)


def test_a_replay_is_reported_as_the_walk_is(bench: Bench):
    assert by_replay(bench, [True] * 3, ALONE) == measured(bench, [True] * 3, ALONE)
    assert by_replay(bench, [False, True, False], ALONE).counters == bench.live(3)[1]


@pytest.mark.parametrize("measured", [measured, by_replay])
@pytest.mark.parametrize("world", [2, 3, 5])
def test_ranks_share_the_samples_and_agree(
    bench: Bench, world: int, measured: Callable, monkeypatch: pytest.MonkeyPatch
):
    """Each rank fills its own rows of one table; their sum is the table of one rank alone."""
    tables: list[Tensor] = []

    def note(table: Tensor) -> Tensor:
        tables.append(table.clone())
        return table

    expected = measured(bench, [True] * 3, ALONE)
    monkeypatch.setattr(held_out, "sum_over_ranks", note)
    for rank in range(world):
        # A rank alone sees part of the rounds, perhaps none; only its table counts here.
        monkeypatch.setattr(held_out, "report_acceptance", lambda *_args, **_named: None)
        measured(bench, [True] * 3, RankInfo(rank, world, rank))
    summed = reduce(torch.add, tables)
    assert all(int((table.sum(1) > 0).sum()) <= -(-3 // world) for table in tables)
    counters = [from_row(row, 3) for row in summed.tolist()]
    assert report_acceptance(counters, held_out.RESAMPLES, seed=0) == expected


def test_a_row_holds_all_counters():
    counters = Counters(7, 21, 12, [5, 3, 1], [7, 5, 3], 40)
    row = to_row(counters)
    assert row.shape == (2 * 3 + 4,) and from_row(row.tolist(), 3) == counters
    assert from_row((row + row).tolist(), 3) == counters + counters
