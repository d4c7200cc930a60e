"""fit(): the table of contents of training."""

import json
import math
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from conf.runtime import (
    RankInfo,
    cache_dir,
    fingerprint,
    plain,
    run_dir,
    say,
    write_atomically,
)
from conf.schema import (
    ConfigError,
    DraftFamily,
    JobError,
    Normalise,
    OptimSection,
    Precision,
    RunConfig,
)
from data.distributed import gather_objects, pick_device, sum_over_ranks
from data.fp8 import restored
from data.loader import TrainLoader, on_device
from data.online import OnlineStates
from data.reader import ShardReader
from data.records import PreparedData, TTTBatch
from eval.acceptance import AcceptanceReport
from eval.replay import Place
from models.draft_file import CONFIG, save_draft
from models.heads import digest_of_head
from models.marks import part
from models.start import new_draft, vocabulary_to_train
from models.verifier import VerifierEnds, load_ends, load_facts, scaled_logits
from train.breakdown import Breakdown
from train.budget import budget_of
from train.checkpoint import Checkpoints, TrainState
from train.closed_form import fit_start
from train.engine import Engine
from train.families.choose import Trainee, trainee_for
from train.held_out import measure, measure_by_replay
from train.metrics import Interval, MetricsLog, flat
from train.spent import Spent
from train.stop import StopRequest

CPU = torch.device("cpu")
# Rounding flips near-ties, other weights flip nearly all. Measured on 661 rows of ten answers of
# SmolLM2-135M: 0.994 agree in bf16 and 0.982 in fp8, of one answer as few as 0.92 and 0.93.
MIN_TEACHER_AGREEMENT = 0.9
TEACHER_ROWS = 256


@dataclass(frozen=True)
class Schedule:
    """Linear warm-up, then a cosine down to a share of the peak."""

    optim: OptimSection
    total: int

    def lr(self, step: int) -> float:
        warm = max(1, round(self.total * self.optim.warmup_share))
        if step < warm:
            return self.optim.lr * (step + 1) / warm
        progress = (step - warm) / max(1, self.total - warm)
        floor = self.optim.min_lr_share
        return self.optim.lr * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress)))


def fit(
    cfg: RunConfig,
    prepared: PreparedData,
    source: ShardReader | OnlineStates,
    ranks: RankInfo,
    request: StopRequest,
) -> Path | None:
    """Train a draft head on the states of ``source`` -> the folder of the best one.

    None when ``request`` came true: a checkpoint holds the step that was reached.
    Raises JobError when the loss or its gradient stops being finite, and ConfigError when the
    states are another verifier's.
    """
    device = pick_device(cfg.run.device, ranks.local_rank)
    module = build(cfg, prepared, source, device)
    engine = Engine(cfg, module, ranks)
    budget = budget_of(cfg, prepared.samples, module.draft.config)
    loader = TrainLoader(source, budget.within(cfg.optim), cfg.ttt, cfg.run.seed, ranks)
    total = loader.total_steps
    schedule = Schedule(cfg.optim, total)

    folder = run_dir(cfg)
    checkpoints = Checkpoints(folder / "checkpoints", cfg.log.keep, ranks.is_main)
    fresh = TrainState(
        0, -1.0, 0, ranks.world_size, curve_fingerprint(cfg, source.manifest.fingerprint)
    )
    state = checkpoints.resume(engine, fresh)
    refuse_lost_head(folder / "best", state)
    describe(cfg, engine, loader, state.step)
    budget.announce(total, loader.steps_per_epoch)

    interval = Interval(cfg.ttt.depth, device)
    interval.take_up(state.pending, ranks.rank)
    step, best_tau, best_step = state.step, state.best_tau, state.best_step

    breakdown = Breakdown(cfg.log.breakdown, device)
    with closing(MetricsLog(cfg, folder, ranks, total)) as log, breakdown:
        log.truncate(state.step)
        for window in breakdown.watched(loader.windows(start_step=step)):
            # ---- one training step -------------------------------------------------------------
            shares = row_weights(cfg, window.batches, request.asked, device)
            for i, (packed, weight) in enumerate(zip(window.batches, shares.weights, strict=True)):
                with part("transfer"):
                    batch = on_device(packed, device, engine.dtype)
                with part("forward"):
                    output = engine(batch, weight)
                with part("backward"):
                    engine.backward(output.loss, last=i == len(window.batches) - 1)
                interval.add(output, len(batch.input_ids))
            with part("optimizer"):
                norm = engine.step(schedule.lr(step), shares.total)
            step += 1
            stops = bool(shares.stops)
            refuse_non_finite(cfg, {"grad_norm": norm}, step)
            log.bar.update(1)
            # --------------------------------------------------------------------------------------
            saves = step % cfg.log.save_every == 0 or step == total
            measures = step % cfg.log.valid_every == 0 or step == total
            if saves or measures or step % cfg.log.every == 0:
                figures = {**interval.close(cfg.ttt.decay), "lr": schedule.lr(step - 1)}
                figures |= budget.figures(step, loader.steps_per_epoch)
                refuse_non_finite(cfg, figures, step)
                log.train(step, {**figures, "grad_norm": norm})
            if measures:
                with engine.averaged():
                    report = acceptance_of(cfg, engine, source, ranks)
                    log.held_out(step, report)
                    if report.tau > best_tau or (step == total and not best_step):
                        best_tau, best_step = report.tau, step
                        keep_best(folder / "best", engine, report, ranks)
            if saves or stops:
                pending = [] if saves else gather_objects(interval.pending())
                kept = replace(fresh, step=step, best_tau=best_tau, best_step=best_step)
                checkpoints.save(engine, replace(kept, pending=pending))
            if saves or measures:
                interval.restart()  # their time is no training time
            if stops:
                break
    if request.by_any_rank(device):
        say(
            f"stopped at step {step} of {total}, as SIGTERM asked; the same command goes on from "
            f"{checkpoints.at(step)}"
        )
        return None
    flops = budget.figures(total, loader.steps_per_epoch).get("flops")
    spent = Spent(engine.trainable, total, flops, interval.seconds, timed=total - state.step)
    spent.save(folder, ranks)
    say(f"best held-out tau {best_tau:.3f} at step {best_step}: {folder / 'best'}")
    return folder / "best"


def acceptance_of(
    cfg: RunConfig, engine: Engine, source: ShardReader | OnlineStates, ranks: RankInfo
) -> AcceptanceReport:
    """Of the held-out samples, by the way that suits the family."""
    if cfg.draft.family is DraftFamily.eagle3:
        return measure(engine, source, cfg.eval.valid_depth, ranks)
    place = Place(engine.device, engine.dtype)
    return measure_by_replay(engine.module.draft, source, cfg.eval.valid_depth, ranks, place)


def build(
    cfg: RunConfig,
    prepared: PreparedData,
    source: ShardReader | OnlineStates,
    device: torch.device,
) -> Trainee:
    """The draft and what trains it, the verifier's head checked against the states' argmaxes."""
    cache = cache_dir(cfg)
    facts = load_facts(cfg.verifier, cache)
    vocab = vocabulary_to_train(cfg.draft, facts, prepared.token_counts)
    ends = load_ends(cfg.verifier, cache, torch.float32)
    check_teacher(ends, source)
    torch.manual_seed(cfg.run.seed)
    draft = new_draft(cfg.draft, facts, ends, vocab, cfg.ttt.depth)
    share = vocab.coverage(prepared.token_counts)
    size, total = len(vocab.target_ids), facts.vocab_size
    say(f"draft vocabulary: {size:,} of {total:,} tokens, {share:.1%} of the training labels")
    dtype = torch.bfloat16 if cfg.engine.precision is Precision.bfloat16 else torch.float32
    module = trainee_for(cfg, draft, ends, device, dtype)
    fit_start(cfg, draft, source)
    return module


def check_teacher(ends: VerifierEnds, source: ShardReader | OnlineStates) -> None:
    """The head on last states must give the argmaxes that came with them."""
    agrees: list[Tensor] = []
    for index in range(len(source)):
        cached = source.read(index)
        with torch.no_grad():
            last = restored(cached.last, cached.last_scales, torch.float32)
            logits = scaled_logits(last @ ends.head.T, ends.config)
        agrees.append(logits.argmax(-1) == cached.argmax)
        if sum(map(len, agrees)) >= TEACHER_ROWS:
            break
    same = float(torch.cat(agrees).float().mean())
    if same < MIN_TEACHER_AGREEMENT:
        raise ConfigError(
            f"verifier.path: its head repeats only {same:.0%} of the argmaxes stored in "
            f"{source}; the cache is from other weights, delete it or choose its verifier"
        )


def curve_fingerprint(cfg: RunConfig, states: str) -> str:
    """Everything that shapes the training curve; a checkpoint continues only its own.

    ``states`` is the capture's fingerprint, which covers verifier, template and data. Raises
    ConfigError when the head in draft.init is gone.
    """
    begun = None if cfg.draft.init is None else digest_of_head(Path(cfg.draft.init))
    return fingerprint(
        states, begun, cfg.draft, cfg.ttt, cfg.loss, cfg.optim,
        cfg.engine.precision, cfg.engine.zero_stage, cfg.engine.deepspeed, cfg.run.seed,
        cfg.eval.valid_depth, cfg.log.valid_every,  # these two choose the best head
    )  # fmt: skip


@dataclass(frozen=True)
class WindowShares:
    """What a rank needs of the others in one window, after its one reduction."""

    weights: list[Tensor]  # [B] a batch: what one supervised row of each sample adds to the loss
    total: Tensor  # []: rows at depth 0, or samples with any, over all ranks and batches
    stops: Tensor  # []: ranks that were asked to stop


def row_weights(
    cfg: RunConfig, batches: list[TTTBatch], asked: bool = False, device: torch.device = CPU
) -> WindowShares:
    """Weights on ``device`` by loss.normalise; ``asked``, the wish to stop, rides in the same
    reduction.

    token: 1/N, N the rows at depth 0 over all ranks and the whole window. sequence: 1/(S*N_i),
    S the samples with supervision, N_i the rows of sample i.
    """
    counts = [b.chains.roots.float().to(device, non_blocking=True) for b in batches]
    by_token = cfg.loss.normalise is Normalise.token
    mine = torch.cat(counts).sum() if by_token else (torch.cat(counts) > 0).sum().float()
    total, stops = sum_over_ranks(torch.stack([mine, torch.full_like(mine, float(asked))]))
    whole = total.clamp_min(1)
    ones = [torch.ones_like(count) if by_token else count.clamp_min(1) for count in counts]
    return WindowShares([1 / (count * whole) for count in ones], total, stops)


def refuse_non_finite(cfg: RunConfig, figures: dict, step: int) -> None:
    wrong = [(name, value) for name, value in flat(figures).items() if not math.isfinite(value)]
    if wrong:
        raise JobError(
            f"optim.lr={cfg.optim.lr}: training diverged, {wrong[0][0]} is {wrong[0][1]} at step "
            f"{step}; the last checkpoint and best/ stay as they are; try a smaller rate under "
            "another run.name"
        )


def refuse_lost_head(folder: Path, state: TrainState) -> None:
    """A run goes on only with the best head it has found so far."""
    if state.best_step and not (folder / CONFIG).is_file():
        raise ConfigError(
            f"{folder}: holds no head, though this run kept one at step {state.best_step}; put it "
            f"back, or delete {folder.parent} to train anew"
        )


def keep_best(folder: Path, engine: Engine, report: AcceptanceReport, ranks: RankInfo) -> None:
    state = engine.draft_state()  # on every rank: ZeRO-3 gathers
    if ranks.is_main:
        save_draft(folder, engine.module.draft.config, state)
        write_atomically(folder / "acceptance.json", json.dumps(plain(report), indent=2))


def describe(cfg: RunConfig, engine: Engine, loader: TrainLoader, start: int) -> None:
    source, verifier = loader.source, ""
    kernel = getattr(engine.module, "kernel", None)  # where the draft attends
    if isinstance(source, OnlineStates):
        verifier = f" and {source.parameters:,} of the verifier"
    say(
        f"training {engine.trainable:,} parameters ({engine.frozen:,} frozen{verifier}), depth "
        f"{cfg.ttt.depth}, {loader.total_steps} steps of {cfg.optim.packs_per_step} packs "
        f"({loader.steps_per_epoch} an epoch, a pack has {loader.samples_per_pack:.1f} samples), "
        f"ZeRO-{engine.stage} {cfg.engine.precision.value}"
        + (f", attention by {kernel.name}" if kernel else "")
        + (f", resumed at step {start}" if start else "")
    )
