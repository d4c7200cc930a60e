"""Online states: what the cache would hold, without a cache."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from conf.runtime import RankInfo
from conf.schema import (
    CaptureMode,
    CaptureSection,
    ConfigError,
    Device,
    JobError,
    OptimSection,
    Precision,
    RunConfig,
    StateDtype,
    TTTSection,
    VerifierSection,
)
from data.capture import capture, main
from data.chains import shifted
from data.fp8 import restored
from data.loader import TrainLoader, on_device
from data.online import OnlineStates
from data.origin import agreement_of
from data.reader import ShardReader
from data.records import CachedSample, PreparedData, TTTBatch
from models.verifier import Verifier, VerifierStates
from train import stages
from train.held_out import measure

ALONE = RankInfo(0, 1, 0)
CPU = torch.device("cpu")


@pytest.fixture
def cfg(tiny_verifier: Path, tmp_path: Path) -> RunConfig:
    cfg = RunConfig()
    cfg.run.cache = str(tmp_path / "cache")
    cfg.run.root = str(tmp_path / "runs")
    cfg.run.device = Device.cpu
    cfg.verifier = VerifierSection(path=str(tiny_verifier), dtype=Precision.float32)
    cfg.capture = CaptureSection(dtype=StateDtype.float32, batch_tokens=128)
    return cfg


def close(one: Tensor, other: Tensor, dtype: StateDtype) -> None:
    """Equal to what another batch shape changes: the last bits, and one step of the rounding."""
    exact = dtype is StateDtype.float32
    step = 1e-5 if exact else 2**-7 if dtype is StateDtype.bfloat16 else 2**-3
    torch.testing.assert_close(one, other, rtol=step, atol=1e-5 if exact else step / 8)


@pytest.mark.parametrize("dtype", list(StateDtype))
def test_states_are_those_of_the_cache(cfg: RunConfig, prepared: PreparedData, dtype: StateDtype):
    cfg.capture.dtype = dtype
    online = OnlineStates.load(cfg, prepared, ALONE)
    assert list(Path(cfg.run.cache).glob("capture-*")) == []
    cached = ShardReader(capture(cfg, prepared, ALONE))
    assert replace(cached.manifest, shards=[]) == online.manifest
    for name in ("lengths", "held_out", "greedy"):
        assert torch.equal(getattr(online, name), getattr(cached, name))
    assert online.train_indices == cached.train_indices
    assert online.valid_indices == cached.valid_indices
    equal = 0
    for index in range(len(cached)):
        ours, theirs = online.read(index), cached.read(index)
        assert ours.sample.id == theirs.sample.id
        assert torch.equal(ours.sample.input_ids, theirs.sample.input_ids)
        assert torch.equal(ours.argmax, theirs.argmax) and ours.argmax.dtype == theirs.argmax.dtype
        torch.testing.assert_close(ours.lse, theirs.lse, rtol=1e-5, atol=1e-5)
        for one, other in zip(states(ours), states(theirs), strict=True):
            close(one, other, dtype)
            equal += int((one == other).sum())
        assert ours.aux.dtype == theirs.aux.dtype == getattr(torch, dtype.value)
    if dtype is not StateDtype.float32:  # rounding hides nearly all of the last bits
        assert equal > 0.98 * sum(cached.lengths.tolist()) * 3 * 64


def states(cached: CachedSample) -> list[Tensor]:
    parts = ((cached.aux, cached.aux_scales), (cached.last, cached.last_scales))
    return [restored(values, scales, torch.float32) for values, scales in parts]


def test_batches_are_those_of_the_cache(cfg: RunConfig, prepared: PreparedData):
    sources = OnlineStates.load(cfg, prepared, ALONE), ShardReader(capture(cfg, prepared, ALONE))
    optim = OptimSection(packs_per_step=3, micro_batch_tokens=40, epochs=1.0)
    for rank in range(2):
        ranks = RankInfo(rank, 2, rank)
        online, cached = (TrainLoader(s, optim, TTTSection(depth=3), 5, ranks) for s in sources)
        assert online.total_steps == cached.total_steps > 2
        for ours, theirs in zip(online.windows(), cached.windows(), strict=True):
            for one, other in zip(ours.batches, theirs.batches, strict=True):
                a, b = (on_device(batch, CPU, torch.float32) for batch in (one, other))
                assert torch.equal(a.input_ids, b.input_ids)
                assert torch.equal(a.positions, b.positions)
                assert a.chains.counts == b.chains.counts
                torch.testing.assert_close(a.aux, b.aux, rtol=1e-5, atol=1e-5)
                torch.testing.assert_close(a.last, b.last, rtol=1e-5, atol=1e-5)


def test_held_out_acceptance_is_the_caches(cfg: RunConfig, prepared: PreparedData):
    """Guesses that are right where a state is positive: other states give another acceptance."""

    def propose(batch: TTTBatch, depth: int) -> Tensor:
        right = torch.stack([shifted(batch.input_ids, 2 + k) for k in range(depth)])
        sums = batch.aux.unflatten(-1, (depth, -1)).sum(-1)  # [T, depth]
        return torch.where(sums.T > 0, right, -2)

    engine: Any = SimpleNamespace(device=CPU, dtype=torch.float32, propose=propose)
    online = OnlineStates.load(cfg, prepared, ALONE)
    ours = measure(engine, online, 3, ALONE)
    theirs = measure(engine, ShardReader(capture(cfg, prepared, ALONE)), 3, ALONE)
    assert ours.tau == theirs.tau and ours.counters == theirs.counters
    assert 1.1 < ours.tau < 3.5
    online.held_out = ~online.held_out
    assert measure(engine, online, 3, ALONE).tau != ours.tau


def test_a_batch_of_the_verifier_keeps_to_its_limit(
    cfg: RunConfig, prepared: PreparedData, monkeypatch: pytest.MonkeyPatch
):
    online = OnlineStates.load(cfg, prepared, ALONE)
    shapes: list[torch.Size] = []
    right = Verifier.states

    def noted(self: Verifier, input_ids: Tensor, cache: None = None) -> VerifierStates:
        shapes.append(input_ids.shape)
        return right(self, input_ids, cache)

    monkeypatch.setattr(Verifier, "states", noted)
    pack = online.read_pack(list(range(12)))
    assert [sample.id for sample in pack.samples] == [f"sample-{i}" for i in range(12)]
    assert all(shape.numel() <= 128 or shape[0] == 1 for shape in shapes)
    assert 1 < len(shapes) < 12


def test_wrong_states_are_refused_at_the_start(cfg, prepared, monkeypatch: pytest.MonkeyPatch):
    right = Verifier.states

    def unnormed(self: Verifier, input_ids: Tensor, cache: None = None) -> VerifierStates:
        found = right(self, input_ids, cache)
        return VerifierStates(found.aux, found.last * 1.1)

    monkeypatch.setattr(Verifier, "states", unnormed)
    with pytest.raises(JobError, match="after the final norm"):
        OnlineStates.load(cfg, prepared, ALONE)


def test_agreement_is_that_of_the_cache(cfg, prepared: PreparedData, monkeypatch):
    online = OnlineStates.load(cfg, prepared, ALONE)
    monkeypatch.setattr(online, "held_out", torch.zeros(len(prepared.samples), dtype=torch.bool))
    wanted = agreement_of(ShardReader(capture(cfg, prepared, ALONE)).manifest)
    assert online.agreement() == wanted and wanted.supervised < 2000
    monkeypatch.setattr("data.online.AGREEMENT_TOKENS", 40)
    assert 40 <= online.agreement().supervised < 40 + 64


def test_text_that_the_verifier_does_not_agree_with_stops_the_training(
    cfg, prepared: PreparedData, monkeypatch, capsys
):
    monkeypatch.setattr(stages, "fit", lambda *_: pytest.fail("it trained"))
    cfg.capture = replace(cfg.capture, mode=CaptureMode.online, min_agreement=0.99)
    with pytest.raises(JobError, match=r"^capture\.min_agreement=0\.99: "):
        stages.train_on(cfg, prepared, None, ALONE)
    assert "training data: " in capsys.readouterr().out
    assert not Path(cfg.run.root).exists()


def test_nothing_of_the_verifier_is_trained(cfg: RunConfig, prepared: PreparedData):
    online = OnlineStates.load(cfg, prepared, ALONE)
    weights = list(online.verifier.model.parameters())
    assert online.parameters == sum(weight.numel() for weight in weights) > 0
    assert not any(weight.requires_grad for weight in weights)
    pack = online.read_pack([0, 1])
    assert not pack.aux.requires_grad and not pack.last.requires_grad


def test_capture_alone_has_nothing_to_do(cfg: RunConfig):
    cfg.capture.mode = CaptureMode.online
    with pytest.raises(ConfigError, match=r"capture\.mode=online: writes no states.*=cache"):
        main(cfg)
