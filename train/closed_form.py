"""A start in closed form: the linear part of a draft's first guess is solved, not trained.

What the head should read at row t is the verifier's state after its final norm at row t+1. Ridge
regression over ``draft.fit_rows`` first guesses gives the linear map to it from what the draft
knows: the aux states as they enter ``fc``, and the token x[t+1] as the first layer's attention
reads it. The part on the states becomes ``fc``. The part on the token, cut by its singular values
to as many dimensions as the keys have, goes through attention: value, then output. Queries and keys
of a token start alike there, so that a row looks at its own key first, and at those of the same
token. The final norm scales to what the map predicts. All that is left starts as it did, and
everything is trained from there.

docs/acceptance.md says what it is worth. For a moment the fit holds two matrices of 8 bytes *
((A+1)*D)^2: 0.1 GB for the demo, 4 GB for an 8B, 17 GB for a 70B.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from conf.runtime import RankInfo, progress, say
from conf.schema import JobError, RunConfig
from data.loader import TrainLoader, on_device
from data.online import OnlineStates
from data.reader import ShardReader
from data.records import TTTBatch
from models.drafts import Draft
from models.eagle3 import Eagle3Draft

RIDGE = 0.01  # of each feature's mean square: 0.003 was no better
OWN_SCORE = 4.0  # of a row's own key among scaled scores, before rotation
KEPT = 0.1  # share that stays of the random values and outputs


@dataclass(frozen=True)
class LinearMap:
    """What the fit found, and how well it explains the rows it was fitted on."""

    of_states: Tensor  # [D, A*D]
    of_token: Tensor  # [D, D]
    scale: float  # root mean square of what it predicts
    unexplained: float  # share of the targets' mean square
    rows: int


@torch.no_grad()
def fit_start(cfg: RunConfig, draft: Draft, source: ShardReader | OnlineStates) -> None:
    """Start ``draft``, on its device and in float32, from the map of cfg.draft.fit_rows rows.

    The rows are those of the first packs of one epoch, the same on every rank. Without that knob,
    or with the weights of draft.init, there is nothing to do.
    """
    if cfg.draft.fit_rows is None:
        return
    if cfg.draft.init is not None:
        say("draft.fit_rows: nothing is fitted, draft.init brings the weights")
        return
    assert isinstance(draft, Eagle3Draft), "conf/draft_rules.py refuses others"
    found = regress(draft, first_guesses(cfg, draft, source))
    say(
        f"draft.fit_rows: {found.rows:,} first guesses, of whose states a linear map explains "
        f"{1 - found.unexplained:.0%}"
    )
    place(draft, found)


def first_guesses(
    cfg: RunConfig, draft: Eagle3Draft, source: ShardReader | OnlineStates
) -> Iterator[tuple[Tensor, Tensor]]:
    """Pack after pack: features [R, (A+1)*D] and targets [R, D], cfg.draft.fit_rows rows in all."""
    one = replace(cfg.optim, packs_per_step=1), replace(cfg.ttt, depth=1)
    loader = TrainLoader(source, *one, cfg.run.seed, RankInfo(0, 1, 0))
    left = cfg.draft.fit_rows or 0
    steps = progress(range(loader.steps_per_epoch), loader.steps_per_epoch, "fit", "pack")
    for step in steps:
        (packed,) = loader.window(step).batches
        features, targets = linear_guess(
            draft, on_device(packed, draft.fc.weight.device, torch.float32)
        )
        yield features[:left], targets[:left]
        left -= len(features)
        if left <= 0:
            return


def linear_guess(draft: Eagle3Draft, batch: TTTBatch) -> tuple[Tensor, Tensor]:
    """The supervised first guesses: features [R, (A+1)*D] at row t, targets [R, D] at row t+1."""
    step = batch.chains.steps[0]
    rows = step.rows if step.emits is None else step.rows[step.emits]
    token = draft.midlayer.input_layernorm(draft.embed_tokens(batch.input_ids[rows + 1]))
    asking = rows + 1 if batch.asking is None else batch.asking[rows + 1]
    return torch.cat([draft.parts(batch.aux[rows]), token], dim=-1), batch.last[asking]


def regress(draft: Eagle3Draft, pairs: Iterator[tuple[Tensor, Tensor]]) -> LinearMap:
    """Least squares with a ridge in proportion to each feature; sums and solution in float64.

    Raises JobError for states that are not finite.
    """
    read, width = draft.fc.weight.shape[1], draft.config.hidden_size
    wide = draft.fc.weight.new_zeros((), dtype=torch.float64)
    inner = wide.new_zeros(read + width, read + width)
    outer, square, rows = wide.new_zeros(read + width, width), wide.clone(), 0
    for features, targets in pairs:
        inner += features.T @ features
        outer += features.T @ targets
        square += targets.double().square().sum()
        rows += len(features)
    if not bool(inner.isfinite().all() and outer.isfinite().all()):
        raise JobError(
            f"draft.fit_rows: states among the first {rows:,} guesses are not finite; capture them "
            "anew, perhaps with verifier.dtype=float32, in another run.cache"
        )
    ridge = RIDGE * inner.diagonal() + torch.finfo(torch.float32).tiny
    found = torch.cholesky_solve(outer, torch.linalg.cholesky(inner + ridge.diag()))
    predicted = (found * (inner @ found)).sum()  # squares of the predictions
    error = square - 2 * (found * outer).sum() + predicted
    of_states, of_token = found.T.float().split([read, width], dim=1)
    scale = float((predicted / (rows * width)).sqrt())
    return LinearMap(of_states, of_token, scale, float(error / square), rows)


def place(draft: Eagle3Draft, found: LinearMap) -> None:
    """Write the map into the weights of ``draft``."""
    draft.fc.weight.copy_(found.of_states)
    draft.norm.weight.fill_(found.scale)
    if draft.config.norm_before_residual:  # what fc says is normed before it is the residual
        draft.midlayer.hidden_norm.weight.fill_(found.scale)
    place_token_map(draft, found.of_token)


def place_token_map(draft: Eagle3Draft, of_token: Tensor) -> None:
    """Through the halves of attention that read the token; G query heads share a key head."""
    config, attention = draft.config, draft.midlayer.self_attn
    width, heads, keys = config.hidden_size, config.num_heads, config.num_kv_heads
    left, sizes, right = torch.linalg.svd(of_token)  # [D, D], [D], [D, D]
    rank = min(width, keys * config.head_dim)
    root = sizes[:rank].sqrt()
    output = left.new_zeros(width, keys * config.head_dim)
    output[:, :rank] = left[:, :rank] * root
    attention.v_proj.weight.mul_(KEPT)
    attention.v_proj.weight[:rank, :width] += root[:, None] * right[:rank]
    attention.o_proj.weight.mul_(KEPT).add_(to_query_heads(output, heads, keys) * keys / heads)
    own = torch.randn_like(attention.k_proj.weight[:, :width])
    own *= (OWN_SCORE / (width * config.head_dim**0.5)) ** 0.5
    attention.k_proj.weight[:, :width] = own
    attention.q_proj.weight[:, :width] = to_query_heads(own.T, heads, keys).T


def to_query_heads(by_key_head: Tensor, heads: int, keys: int) -> Tensor:
    """[D, Hkv*Dh] -> [D, H*Dh]: each key head's columns for each query head that reads it."""
    grouped = by_key_head.unflatten(1, (keys, -1))
    return grouped.repeat_interleave(heads // keys, dim=1).flatten(1)
