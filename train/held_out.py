"""Held-out acceptance during training: the greedy loop's own result, without decoding.

On text the verifier wrote itself, an EAGLE-3 head is unrolled on its own guesses at every row of an
answer; walking the rounds row by row then gives the counters that the decoding loop would give.
Other families play their rounds over the text (eval/replay.py).
"""

from typing import Protocol

import torch
from torch import Tensor

from conf.runtime import RankInfo
from data.chains import Chains
from data.distributed import sum_over_ranks
from data.loader import batch_of, on_device
from data.records import CachedPack, CachedSample
from eval.acceptance import AcceptanceReport, Counters, count_hits, report_acceptance, walk
from eval.replay import Place, replay
from models.drafts import Draft
from train.engine import Engine

PLAYED = 64  # samples whose states are in memory at once
RESAMPLES = 200  # a training line needs a rough interval only


class HeldOut(Protocol):
    """Where held-out samples are read from."""

    @property
    def greedy(self) -> Tensor:
        """[S] bool: the answers are the verifier's own greedy text."""
        ...

    @property
    def valid_indices(self) -> list[int]: ...

    def read(self, index: int) -> CachedSample: ...


def measure(engine: Engine, source: HeldOut, n_draft: int, ranks: RankInfo) -> AcceptanceReport:
    """Acceptance of an EAGLE-3 head's chains of ``n_draft`` on the held-out samples, equal on all
    ranks.

    Only samples with the verifier's own greedy text, if there are any. On other text a guess
    counts when it equals the data: less than the loop would accept.
    """
    chosen = samples_to_play(source)
    table = torch.zeros(len(chosen), 2 * n_draft + 4, dtype=torch.int64)
    laps = -(-len(chosen) // ranks.world_size)
    for lap in range(laps):  # every rank runs every lap: ZeRO-3 gathers weights in the forward
        slot = lap * ranks.world_size + ranks.rank
        cached = source.read(chosen[min(slot, len(chosen) - 1)])
        pack = CachedPack.of([cached])
        chains = Chains.of_answers(cached.sample.loss_mask, pack.starts)
        batch = on_device(batch_of(pack, chains), engine.device, engine.dtype)
        proposed = engine.propose(batch, n_draft).T  # [T, N]
        if slot < len(chosen):
            sample = cached.sample
            counters = walk_answers(proposed.cpu(), sample.input_ids, sample.loss_mask)
            table[slot] = to_row(counters)
    return report_of(table.to(engine.device), n_draft)


def measure_by_replay(
    draft: Draft, source: HeldOut, n_draft: int, ranks: RankInfo, place: Place
) -> AcceptanceReport:
    """The same of any family. Ranks play samples of their own at their own pace, so the weights
    must be whole on each of them: no ZeRO-3. Raises ConfigError for chains it cannot propose."""
    chosen = samples_to_play(source)
    table = torch.zeros(len(chosen), 2 * n_draft + 4, dtype=torch.int64)
    for first in range(ranks.rank, len(chosen), PLAYED * ranks.world_size):
        slots = range(first, len(chosen), ranks.world_size)[:PLAYED]
        cached = [source.read(chosen[slot]) for slot in slots]
        for slot, counters in zip(slots, replay(draft, cached, n_draft, place), strict=True):
            table[slot] = to_row(counters)
    return report_of(table.to(place.device), n_draft)


def samples_to_play(source: HeldOut) -> list[int]:
    """The held-out ones, of which those with the verifier's own greedy text where there are any."""
    chosen = source.valid_indices
    return [i for i in chosen if source.greedy[i]] or chosen


def report_of(table: Tensor, n_draft: int) -> AcceptanceReport:
    """From the rows that each rank has filled, a sample a row."""
    rows = sum_over_ranks(table).cpu().tolist()
    return report_acceptance([from_row(row, n_draft) for row in rows], RESAMPLES, seed=0)


def walk_answers(proposed: Tensor, input_ids: Tensor, loss_mask: Tensor) -> Counters:
    """proposed [T, N] target ids by row -> the counters of all answers of one sample."""
    depth = proposed.shape[1]
    hits = count_hits(proposed, input_ids)
    edges = torch.cat([torch.zeros(1), loss_mask.float(), torch.zeros(1)]).diff()
    starts, ends = (edges > 0).nonzero().flatten(), (edges < 0).nonzero().flatten()
    counters = Counters(0, 0, 0, [0] * depth, [0] * depth, 0)
    for first, end in zip(starts.tolist(), ends.tolist(), strict=True):
        counters = counters + walk(hits, max(first - 1, 0), end - 2, depth)
    return counters


def to_row(counters: Counters) -> Tensor:
    """Counters as numbers that ranks can add."""
    head = [counters.rounds, counters.drafted, counters.tested, counters.tokens]
    return torch.tensor([*head, *counters.accepted_by_depth, *counters.reached_by_depth])


def from_row(row: list[int], n_draft: int) -> Counters:
    rounds, drafted, tested, tokens, *by_depth = row
    return Counters(
        rounds, drafted, tested, by_depth[:n_draft], by_depth[n_draft : 2 * n_draft], tokens
    )
