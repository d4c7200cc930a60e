"""draft.fit_rows: the linear start is the ridge solution of plain loops, in its place."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from conf.runtime import RankInfo
from conf.schema import (
    CaptureSection,
    Device,
    DraftSection,
    JobError,
    Precision,
    RunConfig,
    StateDtype,
    VerifierSection,
)
from data.capture import capture
from data.loader import TrainLoader, on_device
from data.prepare import find_prepared, prepare
from data.reader import ShardReader
from data.records import PreparedData
from models.eagle3 import Eagle3Draft
from train.closed_form import RIDGE, LinearMap, first_guesses, place_token_map, regress
from train.loop import build
from train.ttt import TrainingTimeTest

CPU, ALONE = torch.device("cpu"), RankInfo(0, 1, 0)
ALL = 1 << 20  # more rows than there are


@dataclass(frozen=True)
class Captured:
    cfg: RunConfig
    prepared: PreparedData
    source: ShardReader

    def build(self, **draft: object) -> TrainingTimeTest:
        section = replace(DraftSection(vocab_size=64, fc_norm=True), **draft)
        module = build(replace(self.cfg, draft=section), self.prepared, self.source, CPU)
        assert isinstance(module, TrainingTimeTest)
        return module


@pytest.fixture(scope="module")
def captured(place, tmp_path_factory: pytest.TempPathFactory) -> Captured:
    folder = tmp_path_factory.mktemp("closed")
    cfg = RunConfig()
    cfg.run.cache, cfg.run.device = str(folder / "cache"), Device.cpu
    cfg.verifier = VerifierSection(path=str(place.verifier), dtype=Precision.float32)
    cfg.data.path, cfg.data.valid_share = [str(place.folder / "answers.jsonl")], 0.2
    cfg.capture = CaptureSection(dtype=StateDtype.float32, batch_tokens=256)
    cfg.ttt.depth, cfg.engine.precision = 2, Precision.float32
    cfg.optim.packs_per_step, cfg.optim.micro_batch_tokens = 2, 192
    prepare(cfg)
    prepared = find_prepared(cfg)
    return Captured(cfg, prepared, ShardReader(capture(cfg, prepared, ALONE)))


def plain_rows(source: ShardReader, draft: Eagle3Draft) -> tuple[Tensor, Tensor]:
    """Features and targets of every first guess, row by row: x[t+1] and x[t+2] are supervised."""
    features, targets = [], []
    for index in source.train_indices:
        pack = source.read_pack([index])
        (sample,) = pack.samples
        mask, ids = sample.loss_mask.tolist(), sample.input_ids
        asks = [j for j in range(len(mask) - 1) if mask[j + 1]]
        for t in range(len(mask) - 2):
            if mask[t + 1] and mask[t + 2]:  # ttt.supervise=span
                parts = pack.aux[t].chunk(len(draft.fc_norm))
                normed = [norm(part) for norm, part in zip(draft.fc_norm, parts, strict=True)]
                token = draft.midlayer.input_layernorm(draft.embed_tokens(ids[t + 1]))
                features.append(torch.cat([*normed, token]))
                targets.append(pack.last[asks.index(t + 1)])
    return torch.stack(features).double(), torch.stack(targets).double()


@torch.no_grad()
def test_the_map_is_the_ridge_solution_of_plain_loops(captured: Captured):
    draft = captured.build().draft
    cfg = replace(captured.cfg, draft=DraftSection(fit_rows=ALL))
    found = regress(draft, first_guesses(cfg, draft, captured.source))
    x, y = plain_rows(captured.source, draft)
    weight = (RIDGE * x.square().sum(0)).sqrt().diag()  # a ridge as further rows of zeros
    wanted = torch.linalg.lstsq(
        torch.cat([x, weight]), torch.cat([y, y.new_zeros(len(weight), y.shape[1])])
    ).solution
    assert found.rows == len(x) > 200
    whole = torch.cat([found.of_states, found.of_token], 1).double()
    torch.testing.assert_close(whole, wanted.T, rtol=0, atol=1e-3 * float(wanted.abs().max()))
    error = (y - x @ wanted).square().sum() / y.square().sum()
    assert found.unexplained == pytest.approx(float(error), rel=1e-4)
    assert found.scale == pytest.approx(float((x @ wanted).square().mean().sqrt()), rel=1e-4)


@torch.no_grad()
def test_rows_one_off_are_explained_less(captured: Captured):
    """The control of the test above: the map is of these targets and no others."""
    draft = captured.build().draft
    cfg = replace(captured.cfg, draft=DraftSection(fit_rows=ALL))
    pairs = list(first_guesses(cfg, draft, captured.source))
    right = regress(draft, iter(pairs)).unexplained
    shifted = [(features[1:], targets[:-1]) for features, targets in pairs]
    assert regress(draft, iter(shifted)).unexplained > 1.05 * right


def test_a_limit_is_kept_to_the_row(captured: Captured):
    draft = captured.build().draft
    cfg = replace(captured.cfg, draft=DraftSection(fit_rows=101))
    pairs = first_guesses(cfg, draft, captured.source)
    assert sum(len(features) for features, _ in pairs) == 101


@torch.no_grad()
def test_states_that_are_not_finite_are_one_sentence(captured: Captured):
    draft = captured.build().draft
    cfg = replace(captured.cfg, draft=DraftSection(fit_rows=ALL))
    pairs = list(first_guesses(cfg, draft, captured.source))
    pairs[1][1][0, 0] = float("nan")
    with pytest.raises(JobError, match=r"draft\.fit_rows: states .* not finite; capture them anew"):
        regress(draft, iter(pairs))


@torch.no_grad()
def test_the_token_goes_through_attention_as_the_map_says(captured: Captured):
    """A row that sees its own key alone: value, heads, output are the map at the keys' rank."""
    draft = captured.build().draft
    config, attention = draft.config, draft.midlayer.self_attn
    width, rank = config.hidden_size, config.num_kv_heads * config.head_dim
    for projection in (attention.v_proj, attention.o_proj):
        projection.weight.zero_()
    generator = torch.Generator().manual_seed(3)
    low = torch.randn(width, rank // 2, generator=generator)
    of_token = low @ torch.randn(rank // 2, width, generator=generator)
    place_token_map(draft, of_token)
    token = torch.randn(5, width, generator=generator)
    values = (token @ attention.v_proj.weight[:, :width].T).unflatten(1, (config.num_kv_heads, -1))
    groups = config.num_heads // config.num_kv_heads
    seen = values.repeat_interleave(groups, dim=1).flatten(1)
    torch.testing.assert_close(attention.o_proj(seen), token @ of_token.T, rtol=1e-3, atol=1e-3)
    query = (token @ attention.q_proj.weight[:, :width].T).unflatten(1, (config.num_heads, -1))
    key = (token @ attention.k_proj.weight[:, :width].T).unflatten(1, (config.num_kv_heads, -1))
    assert torch.equal(query, key.repeat_interleave(groups, dim=1))


def losses(captured: Captured, module: TrainingTimeTest) -> Tensor:
    """[K] mean loss by step over all packs, untrained."""
    loader = TrainLoader(captured.source, captured.cfg.optim, captured.cfg.ttt, 0, ALONE)
    total = torch.zeros(2, captured.cfg.ttt.depth)
    with torch.no_grad():
        for step in range(loader.steps_per_epoch):
            for packed in loader.window(step).batches:
                batch = on_device(packed, CPU, torch.float32)
                output = module(batch, torch.ones(batch.samples))
                total += torch.stack((output.sums, output.counts))
    return total[0] / total[1]


@pytest.mark.parametrize(
    "draft",
    [
        {},
        {"fc_norm": False, "norm_before_fc": True},
        {"fc_norm": False},
        {"norm_before_residual": True},
        {"norm_output": True},
        {"qk_norm": True},
        {"layers": 2},
    ],
    ids=lambda draft: "-".join(draft) or "plain",
)
def test_every_kind_of_head_starts_lower(captured: Captured, draft: dict):
    random = losses(captured, captured.build(**draft))
    fitted = losses(captured, captured.build(**draft, fit_rows=ALL))
    assert fitted[0] < 0.95 * random[0]


def test_all_ranks_start_alike(captured: Captured, monkeypatch: pytest.MonkeyPatch):
    alone = captured.build(fit_rows=300).draft.state_dict()
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    second = captured.build(fit_rows=300).draft.state_dict()
    assert all(torch.equal(tensor, second[name]) for name, tensor in alone.items())


def test_the_map_is_written_where_it_belongs(captured: Captured):
    draft = captured.build(fit_rows=ALL).draft
    plain = captured.build().draft
    cfg = replace(captured.cfg, draft=DraftSection(fit_rows=ALL))
    with torch.no_grad():
        found: LinearMap = regress(plain, first_guesses(cfg, plain, captured.source))
    assert torch.equal(draft.fc.weight, found.of_states)
    assert torch.equal(draft.norm.weight, torch.full_like(draft.norm.weight, found.scale))
    kept = ("lm_head", "embed_tokens", "midlayer.mlp", "layernorm", "d2t", "t2d")
    ours, theirs = draft.state_dict(), plain.state_dict()
    for name in ours:
        if any(part in name for part in kept):
            assert torch.equal(ours[name], theirs[name]), name
