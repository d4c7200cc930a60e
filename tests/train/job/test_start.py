"""draft.init: training starts from the weights and the vocabulary of a head that is there."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from conf.runtime import RankInfo, note_once
from conf.schema import (
    CaptureSection,
    ConfigError,
    Device,
    DraftSection,
    HeadInit,
    LayerInit,
    Precision,
    RunConfig,
    StateDtype,
    VerifierSection,
)
from data.capture import capture
from data.loader import TrainLoader
from data.prepare import find_prepared, prepare
from data.reader import ShardReader
from data.records import PreparedData
from models.draft_file import load_draft, save_draft
from models.eagle3 import DraftConfig, Eagle3Draft
from models.export.card import CardFacts, DataFacts
from models.export.write import export
from models.start import config_to_train, vocabulary_to_train
from models.verifier import VerifierEnds, VerifierFacts, load_ends, load_facts
from models.vocab import DraftVocab
from train.loop import build, curve_fingerprint, row_weights
from train.stages import refuse_unfit_start

CPU = torch.device("cpu")
ALONE = RankInfo(0, 1, 0)
CARD = CardFacts("a/verifier", "a/verifier", "float32", "0123", DataFacts("answers.jsonl"))


@dataclass(frozen=True)
class Job:
    """Prepared and captured data of the tiny verifier; and a head of it, trained elsewhere."""

    cfg: RunConfig
    prepared: PreparedData
    source: ShardReader
    facts: VerifierFacts
    ends: VerifierEnds
    head: Eagle3Draft
    folder: Path

    def started(self, init: Path | None, **draft: object) -> RunConfig:
        """Settings of a run that starts from ``init``; they fit the head unless changed."""
        section = replace(DraftSection(vocab_size=48, fc_norm=True), **draft)
        section.init = None if init is None else str(init)
        return replace(self.cfg, draft=section)

    def build(self, cfg: RunConfig):
        return build(cfg, self.prepared, self.source, CPU)


def random_head(facts: VerifierFacts) -> Eagle3Draft:
    """As many tokens as asked for, but not the frequent ones; everything random, norms too."""
    draft = Eagle3Draft(DraftConfig.of(DraftSection(vocab_size=48, fc_norm=True), facts))
    generator = torch.Generator().manual_seed(9)
    for parameter in draft.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    vocab = DraftVocab.of_ids(torch.arange(80, 128), 128)
    draft.d2t.copy_(vocab.d2t)
    draft.t2d.copy_(vocab.t2d)
    return draft.eval().requires_grad_(False)


@pytest.fixture(scope="module")
def job(place, tmp_path_factory: pytest.TempPathFactory) -> Job:
    folder = tmp_path_factory.mktemp("start")
    cfg = RunConfig()
    cfg.run.cache, cfg.run.device, cfg.run.root = str(folder / "cache"), Device.cpu, str(folder)
    cfg.verifier = VerifierSection(path=str(place.verifier), dtype=Precision.float32)
    cfg.data.path, cfg.data.valid_share = [str(place.folder / "answers.jsonl")], 0.2
    cfg.capture = CaptureSection(dtype=StateDtype.float32, batch_tokens=256)
    cfg.draft, cfg.ttt.depth = DraftSection(vocab_size=48, fc_norm=True), 2
    cfg.engine.precision = Precision.float32
    cfg.optim.packs_per_step, cfg.optim.micro_batch_tokens = 2, 192
    prepare(cfg)
    prepared = find_prepared(cfg)
    source = ShardReader(capture(cfg, prepared, ALONE))
    facts = load_facts(cfg.verifier, folder)
    head = random_head(facts)
    save_draft(folder / "best", head.config, head.state_dict())
    export(head, facts, folder / "vllm", CARD, Precision.float32)
    ends = load_ends(cfg.verifier, folder, torch.float32)
    return Job(cfg, prepared, source, facts, ends, head, folder)


@pytest.mark.parametrize("kind", ["best", "vllm"])
def test_training_begins_with_the_bits_of_the_head(job: Job, kind: str):
    """User report B34. The embedding alone is the verifier's, and stays frozen."""
    module = job.build(job.started(job.folder / kind, fit_rows=64))  # which has nothing to fit
    ours, theirs = module.draft.state_dict(), job.head.state_dict()
    assert torch.equal(ours.pop("embed_tokens.weight"), job.ends.embedding)
    assert not module.draft.embed_tokens.weight.requires_grad
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
    counted = vocabulary_to_train(DraftSection(vocab_size=48), job.facts, job.prepared.token_counts)
    assert not torch.equal(module.draft.d2t, counted.d2t)
    rows = job.ends.head[module.draft.d2t + torch.arange(48)]
    assert torch.equal(module.distillation.head, rows)  # the teacher speaks of the same tokens
    assert module.draft.lm_head.weight.requires_grad


def test_layers_begin_as_the_verifiers_last_one(job: Job):
    cfg = job.started(None, layers=2, layer_init=LayerInit.verifier)
    refuse_unfit_start(cfg)
    stored = load_file(Path(cfg.verifier.path) / "model.safetensors")
    for layer in job.build(cfg).draft.stack:
        for name in ("self_attn.o_proj.weight", "mlp.up_proj.weight"):
            assert torch.equal(layer.get_parameter(name), stored[f"model.layers.7.{name}"])
    cfg.draft.intermediate_size = 80
    with pytest.raises(ConfigError, match=r"layer_init=verifier: .*mlp\.gate_proj.*\(80, 64\)"):
        refuse_unfit_start(cfg)


def test_a_head_of_other_layers_is_no_start(job: Job):
    with pytest.raises(ConfigError, match=r"its layers is 1, here .* 2; set draft\.layers=1"):
        refuse_unfit_start(job.started(job.folder / "best", layers=2))


def one_step(job: Job, cfg: RunConfig, rate: float) -> dict[str, torch.Tensor]:
    """The draft's tensors after one step at ``rate``."""
    module = job.build(cfg)
    trainable = [p for p in module.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=rate, weight_decay=0.0)
    batches = TrainLoader(job.source, cfg.optim, cfg.ttt, 0, ALONE).window(0).batches
    weights = row_weights(cfg, batches).weights
    torch.stack([module(b, w).loss for b, w in zip(batches, weights, strict=True)]).sum().backward()
    optimizer.step()
    return {name: tensor.clone() for name, tensor in module.draft.state_dict().items()}


def test_a_step_moves_the_heads_weights_and_not_new_ones(job: Job):
    begun, new = job.started(job.folder / "best"), job.started(None)
    still, moved, scratch = (
        one_step(job, begun, 0.0),
        one_step(job, begun, 1e-3),
        one_step(job, new, 1e-3),
    )
    theirs = job.head.state_dict()
    fixed = ("embed_tokens.weight", "d2t", "t2d")
    for name in theirs.keys() - set(fixed):
        assert torch.equal(still[name], theirs[name])
        assert 0 < float((moved[name] - theirs[name]).abs().max()) < 2e-3, name
        assert not torch.equal(moved[name], scratch[name])
    assert torch.equal(moved["d2t"], theirs["d2t"]) and not torch.equal(
        scratch["d2t"], moved["d2t"]
    )


def test_frozen_rows_are_the_verifiers_of_the_heads_tokens(
    job: Job, capfd: pytest.CaptureFixture[str]
):
    note_once.cache_clear()
    draft = job.build(job.started(job.folder / "best", head_init=HeadInit.frozen)).draft
    assert torch.equal(draft.lm_head.weight, job.ends.head[80:128])
    assert not draft.lm_head.weight.requires_grad
    assert torch.equal(draft.fc.weight, job.head.fc.weight)
    assert "which are not taken" in "".join(capfd.readouterr())
    job.build(job.started(job.folder / "best"))  # its rows are taken: nothing to say
    assert "rows of its own" not in "".join(capfd.readouterr())


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            {"vocab_size": 64},
            "its draft_vocab_size is 48, here it would be 64; set draft.vocab_size=48",
        ),
        ({"vocab_size": "full"}, "here it would be 128; set draft.vocab_size=48"),
        ({"fc_norm": False}, "its fc_norm is True, here it would be False; set draft.fc_norm=true"),
        ({"norm_output": True}, "set draft.norm_output=false"),
        ({"norm_before_residual": True}, "set draft.norm_before_residual=false"),
        ({"intermediate_size": 96}, "is 128, here it would be 96; set draft.intermediate_size=128"),
    ],
)
@pytest.mark.parametrize("kind", ["best", "vllm"])
def test_other_sizes_and_flags_name_the_override(job: Job, kind: str, change: dict, says: str):
    with pytest.raises(ConfigError, match=r"draft\.init=") as refused:
        config_to_train(job.started(job.folder / kind, **change).draft, job.facts)
    assert says in str(refused.value)


def test_other_verifiers_name_the_way_out(job: Job):
    section = job.started(job.folder / "vllm").draft
    with pytest.raises(
        ConfigError, match=r"its hidden_size is 64, .* 32; give the verifier it was"
    ):
        config_to_train(section, replace(job.facts, hidden_size=32))
    with pytest.raises(ConfigError, match=r"set verifier\.aux_layers=\[2,4,5\]"):
        config_to_train(section, replace(job.facts, aux_layers=[1, 2, 3]))


def published(job: Job, name: str, change: Callable[[dict], object]) -> Path:
    folder = Path(shutil.copytree(job.folder / "vllm", job.folder / name))
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_what_no_knob_sets_is_the_heads(job: Job, capsys):
    """A head with another rotary base and a low limit (user report B49) trains as it is."""
    folder = published(
        job,
        "low",
        lambda config: config.update(
            max_position_embeddings=256, rope_theta=5e5, rope_parameters={"rope_theta": 5e5}
        ),
    )
    trained = config_to_train(job.started(folder).draft, job.facts)
    assert trained.rope == {"rope_type": "default", "rope_theta": 5e5}
    assert trained.max_positions == job.facts.max_positions  # a limit, no weight
    said = capsys.readouterr().out
    assert "rope is the head's" in said and "the head had 256 (draft.max_positions)" in said
    kept = config_to_train(job.started(folder, max_positions=256).draft, job.facts)
    assert kept.max_positions == 256
    assert "draft.max_positions=256: below the verifier's 2048" in capsys.readouterr().out


def test_a_limit_that_would_change_the_table_is_refused(job: Job, monkeypatch):
    folder = published(job, "turned", lambda config: config.update(max_position_embeddings=256))
    monkeypatch.setattr("models.start.Rotary", lambda rope: FakeRotary(rope.max_positions))
    with pytest.raises(ConfigError, match=r"holds for 256 positions, .*draft\.max_positions=256"):
        config_to_train(job.started(folder).draft, job.facts)


class FakeRotary:
    """A table that depends on the limit; none of the static types' does."""

    scaling = 1.0

    def __init__(self, limit: int):
        self.inverse_frequencies = torch.tensor([float(limit)])


def test_prepare_speaks_of_the_heads_tokens(job: Job, capsys):
    shutil.rmtree(find_prepared(job.cfg).folder)
    again = prepare(job.started(job.folder / "vllm"))
    said = capsys.readouterr().out
    assert again.fingerprint == job.prepared.fingerprint  # the data does not depend on the head
    labels = job.prepared.token_counts
    share = float(labels[80:].sum() / labels.sum())
    assert f"draft vocabulary: 48 of 128 tokens cover {share:.1%} of the training" in said


def test_another_head_is_another_run(job: Job):
    folder = Path(shutil.copytree(job.folder / "best", job.folder / "later"))
    cfg = job.started(folder)
    first = curve_fingerprint(cfg, "states")
    assert first == curve_fingerprint(cfg, "states")
    assert first != curve_fingerprint(job.started(job.folder / "best"), "states")
    moved = load_draft(folder, CPU, torch.float32)
    moved.fc.weight[0, 0] += 1e-3
    save_draft(folder, moved.config, moved.state_dict())
    assert first != curve_fingerprint(cfg, "states")
    shutil.rmtree(folder)
    with pytest.raises(
        ConfigError, match=r"draft\.init=.*later: holds no head, and the run begins"
    ):
        curve_fingerprint(cfg, "states")


@pytest.mark.slow
def test_a_job_starts_from_a_head_and_resumes_without_it(place, finished: Path):
    """A run from another's best/, once whole and once taken up in the middle, is the same run."""
    few = ["stages=[train]", "log.valid_every=4", "log.save_every=4", "optim.max_steps=8"]
    words = [*few, f"draft.init={finished / 'best'}"]
    place.finish(place.words("begun", *words))
    run, cut = place.run("begun"), place.run("cut")
    shutil.copytree(run, cut)
    (cut / "stages.json").unlink()
    shutil.rmtree(cut / "checkpoints" / "step-00000008")
    out, _ = place.finish(place.words("cut", *words))
    assert "resumed at step 4" in out
    place.assert_same_training("begun", "cut")
    _, err = place.finish(place.words("cut", *few), code=2)
    assert f"draft.init=None: run.name=cut was made with draft.init={finished / 'best'}" in err
