"""The amount of work in samples: rows, guesses and keys, counted from their loss masks alone."""

import torch
from torch import Tensor

from conf.schema import Supervise, TTTSection
from data.chains import supervised_rows
from data.records import Samples
from models.flops import Counts

BLOCK = 1 << 20  # tokens counted at once: some 100 MB of masks by step


def counts_of(loss_mask: Tensor, starts: Tensor, depth: int, rule: Supervise) -> Counts:
    """loss_mask [T] bool, starts [B+1] of the documents -> what their chains compute.

    The idle row that a pack without any chain runs (data/chains.py) is not counted.
    """
    emits = supervised_rows(loss_mask, starts, depth, rule)  # [K, T]
    needed = emits.clone()  # supervised at this step or a later one
    for k in reversed(range(depth - 1)):
        needed[k] |= needed[k + 1]
    lengths = starts.diff()
    keys = torch.arange(1, len(loss_mask) + 1) - torch.repeat_interleave(starts[:-1], lengths)
    fed, targets = (torch.zeros(len(loss_mask), dtype=torch.bool) for _ in range(2))
    for k in range(min(depth, len(loss_mask))):
        fed[k:] |= needed[k, : len(loss_mask) - k]
        targets[k + 1 :] |= emits[k, : max(0, len(loss_mask) - k - 1)]
    return Counts(
        tokens=len(loss_mask),
        rows=needed.sum(1).tolist(),
        guesses=emits.sum(1).tolist(),
        fed=int(fed.sum()),
        targets=int(targets.sum()),
        pairs=(needed * keys).sum(1).tolist(),
        all_pairs=int(keys.sum()),
    )


def counts_of_training(samples: Samples, ttt: TTTSection) -> Counts:
    """One pass over the samples that are not held out; no states are read.

    A million tokens take a third of a second of one core at depth 7.
    """
    lengths = samples.lengths
    total = Counts(0, [0] * ttt.depth, [0] * ttt.depth, 0, 0, [0] * ttt.depth, 0)
    trained = (~samples.held_out).nonzero().flatten()
    blocks = lengths[trained].cumsum(0) // BLOCK
    for number in blocks.unique().tolist():
        chosen = trained[blocks == number]
        starts = torch.cat([torch.zeros(1, dtype=torch.int64), lengths[chosen].cumsum(0)])
        pieces = [samples.mask[samples.offsets[i] : samples.offsets[i + 1]] for i in chosen]
        total += counts_of(torch.cat(pieces).bool(), starts, ttt.depth, ttt.supervise)
    return total
