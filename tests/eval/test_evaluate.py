"""The evaluation stage from start to files, on a tiny random verifier and head."""

import gc
import json
import shutil
import weakref
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from conf.choices import EvalRule, StepKind
from conf.schema import ConfigError, Device, EvalSection, RunConfig, RunSection, VerifierSection
from conf.shapes import chain
from data.eval_prompts import EvalPrompt, Turn
from data.prepare import prepare
from data.records import TokenizedSample
from data.render import REFUSED
from data.split import prompt_digest
from data.template import encode_prompt
from eval import costs
from eval import main as stage
from eval.advice.serving import Place
from eval.decode import DecodeSettings
from eval.described import count_trained_prompts
from eval.foretold import HeldOut, read_held_out
from eval.main import evaluate, main
from eval.measure import Asking, placed, run_exact, training_answers
from eval.report_file import read_report
from eval.tune import place_of
from models.draft_file import load_draft, save_draft
from models.verifier import Verifier

DYNAMIC = "dynamic:nodes=4,depth=2,top_k=2"


def lines(*rows: Any) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


@pytest.fixture(autouse=True)
def few_sweeps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(costs, "SECONDS", 0.1)


@pytest.fixture
def cfg(section: VerifierSection, tmp_path: Path, make_draft) -> RunConfig:
    """Three seen prompts, one of two turns; two unseen; a head; prepared training answers."""
    prompts, answers = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    prompts.write_text(
        lines(
            {"id": "a", "task": "qa", "split": "seen_pattern", "turns": ["hello"]},
            {"id": "b", "task": "qa", "split": "seen_pattern", "turns": ["good morning"]},
            {"id": "c", "task": "chat", "turns": ["one", "two"]},
            {"id": "u", "task": "poem", "split": "unseen_pattern", "turns": ["rose"]},
            {"id": "v", "task": "poem", "split": "unseen_pattern", "turns": ["oak"]},
        )
    )
    said = [
        {"id": f"s{i}", "conversations": [user(f"say {i}"), answer(f"I say {i} and more")]}
        for i in range(20)
    ]
    answers.write_text(lines(*said))
    root, cache = str(tmp_path / "runs"), str(tmp_path / "cache")
    made = RunConfig(
        run=RunSection(name="tiny", root=root, cache=cache, device=Device.cpu),
        verifier=section,
        eval=EvalSection(
            prompts=[str(prompts)],
            speed_prompts=2,
            max_new_tokens=10,
            n_draft=3,
            n_sweep=[1, 2],
            bootstrap=50,
        ),
    )
    made.data.path = [str(answers)]
    draft = make_draft()
    save_draft(tmp_path / "runs" / "tiny" / "best", draft.config, draft.state_dict())
    prepare(made)
    return made


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def answer(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def head_of(cfg: RunConfig) -> Path:
    return Path(cfg.run.root) / cfg.run.name / "best"


def test_report_files(cfg: RunConfig, capsys: pytest.CaptureFixture[str]):
    report = evaluate(cfg, head_of(cfg))
    folder = head_of(cfg).parent / "eval"
    assert {p.name for p in folder.iterdir()} == {
        *("report.json", "report.md", "report.html", "acceptance.png", "speed.png"),
        *("time_split.png", "ranges.png"),
    }
    found = json.loads((folder / "report.json").read_text())
    assert found["tau"] == report.tau == pytest.approx(1 + sum(found["survival_by_depth"]))
    assert found["lossless"]["checked"] == found["lossless"]["identical"] == 3
    assert set(found["tasks"]) == {"qa", "chat", "unseen_patterns"}
    assert found["tasks"]["unseen_patterns"]["prompts"] == 2
    assert found["counters"]["tokens"] <= 4 * 10  # four turns
    assert set(found["by_n"]) == {"1", "2"}
    assert found["settings"]["best_n"] in (1, 2)
    assert not any("trained elsewhere" in warning for warning in report.warnings)
    assert found["data"]["training_samples"] + found["data"]["held_out_samples"] == 20
    assert found["data"]["supervised_tokens"] > found["data"]["training_samples"]
    output = capsys.readouterr().out
    assert "report.md" in output and "speed-up, decode" in output
    assert output.rstrip().endswith("python -m eval.tune")


def test_every_knob_takes_effect(cfg: RunConfig, tiny_verifier: Path):
    """Once with all of them: filters, stop, batches, trees, repeats, an assistant, temperatures."""
    section = replace(
        cfg.eval,
        max_new_tokens=6,
        stop=["a"],
        trees=["2x2", "1x1"],  # the second is the chain of two
        batch=2,
        batch_sizes=[2, 1],
        repeats=2,
        temperature=1.0,
        top_k=40,
        top_p=0.95,
        min_p=0.01,
        rule=EvalRule.argmax_draft,
        temperatures=[0.0, 0.8],
        assistant=str(tiny_verifier),
    )
    evaluate(replace(cfg, eval=section), head_of(cfg))
    found = read_report(head_of(cfg).parent)
    assert found.settings.eval == section and found.settings.accept_rule == "argmax_draft"
    assert list(found.by_tree) == ["2x2"] and list(found.by_batch) == [1, 2]
    assert [one.batch for one in found.costs] == [1, 2]
    assert set(found.by_batch[1].library) == {"generate", "assistant_model"}
    assert set(found.by_batch[2].library) == {"generate"}
    rules = [(one.temperature, one.rule) for one in found.by_temperature]
    assert rules == [(0.0, "greedy"), (0.8, "argmax_draft")]
    assert all(one.counters.rounds > 0 and one.tau >= 1 for one in found.by_temperature)
    assert found.rank_hits is not None and found.rank_hits.reached[0] == found.counters.rounds
    assert found.lossless.checked == 0


def test_an_assistant_of_other_tokens(cfg: RunConfig, tiny_verifier: Path, tmp_path: Path):
    other = tmp_path / "other"
    shutil.copytree(tiny_verifier, other)
    text = (other / "tokenizer.json").read_text()
    (other / "tokenizer.json").write_text(text.replace('"<|unk|>"', '"<|odd|>"'))
    cfg = replace(cfg, eval=replace(cfg.eval, assistant=str(other)))
    with pytest.raises(ConfigError, match=r"eval\.assistant=.*: token 0 is '<\|odd\|>'"):
        evaluate(cfg, head_of(cfg))


@pytest.mark.parametrize(
    ("knobs", "says"),
    [
        ({"step": StepKind.graphed}, r"eval\.step=graphed"),
        ({"trees": ["2y2"]}, r"eval\.trees=2y2"),
        (
            {"trees": [DYNAMIC], "rule": EvalRule.rejection, "temperature": 1.0},
            r"eval\.rule=rejection.*dynamic",
        ),
    ],
)
def test_what_cannot_be_timed_is_refused_before_the_long_part(cfg, monkeypatch, knobs, says):
    monkeypatch.setattr(stage, "load_pair", lambda *_: pytest.fail("a model was loaded"))
    with pytest.raises(ConfigError, match=says):
        evaluate(replace(cfg, eval=replace(cfg.eval, **knobs)), head_of(cfg))


def test_fewer_prompts_take_a_quarter_of_the_unseen(cfg: RunConfig):
    fewer = replace(cfg, eval=replace(cfg.eval, max_prompts=2))
    report = evaluate(fewer, head_of(cfg))
    assert report.prompts == 2 and report.tasks["unseen_patterns"].prompts == 1


def test_sampled_answers_use_exact_rejection(cfg: RunConfig):
    sampled = replace(cfg, eval=replace(cfg.eval, temperature=1.0, max_prompts=2))
    report = evaluate(sampled, head_of(cfg))
    assert report.settings.accept_rule == "rejection"
    assert report.lossless.checked == 0 and "eval.lossless" in report.lossless.note


def test_a_head_that_is_not_there(cfg: RunConfig, tmp_path: Path):
    with pytest.raises(
        ConfigError, match=r"holds no config\.json; give a published head, or a best/"
    ):
        evaluate(cfg, tmp_path / "nothing")


def publish(cfg: RunConfig, folder: Path) -> Path:
    """The run's head as others write one: no flag, no t2d, the layer's other name, one more id."""
    draft = load_draft(head_of(cfg), torch.device("cpu"), torch.float32)
    sizes = draft.config
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "hidden_size": sizes.hidden_size,
        "intermediate_size": sizes.intermediate_size,
        "num_attention_heads": sizes.num_heads,
        "num_key_value_heads": sizes.num_kv_heads,
        "head_dim": sizes.head_dim,
        "vocab_size": sizes.vocab_size,
        "draft_vocab_size": sizes.draft_vocab_size,
        "max_position_embeddings": sizes.max_positions,
        "rms_norm_eps": sizes.rms_norm_eps,
        "rope_theta": sizes.rope["rope_theta"],
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": [n - 1 for n in sizes.aux_layers],
        },
    }
    left = ("embed_tokens.weight", "t2d")
    tensors = {
        name.replace("midlayer.", "layers.0."): tensor.contiguous()
        for name, tensor in draft.state_dict().items()
        if name not in left
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_a_published_head_is_measured_under_a_name_of_its_own(cfg: RunConfig, tmp_path, capsys):
    """The weights of the head it was made of; what its files leave open is said."""
    few = replace(cfg.eval, max_prompts=1, n_sweep=[1], speed_prompts=1)
    section = replace(few, head=str(publish(cfg, tmp_path / "theirs")))
    pair = (Path(section.head), head_of(cfg))
    device = torch.device("cpu")
    theirs, ours = (stage.load_pair(cfg, one, device, torch.float32)[1] for one in pair)
    same = ours.state_dict()
    assert all(torch.equal(tensor, same[name]) for name, tensor in theirs.state_dict().items())
    quiet = replace(cfg.engine, threads=1)
    main(replace(cfg, eval=section, run=replace(cfg.run, name="foreign"), engine=quiet))
    found = read_report(tmp_path / "runs" / "foreign")
    assert found.lossless.identical == found.lossless.checked > 0
    assert found.settings.draft == section.head
    served = place_of(tmp_path, Path(section.head), "verifier", "foreign")
    assert served == Place("verifier", section.head, "foreign", None)  # nothing to export
    assert any("trained elsewhere" in warning for warning in found.warnings)
    said = capsys.readouterr().out
    assert "alone: layer outputs are assumed, the streams after [2, 4, 5] layers" in said
    assert said.count("false is assumed") == 1  # once, though it is loaded twice
    with pytest.raises(ConfigError, match=r"run\.name=tiny has a head of its own"):
        main(replace(cfg, eval=section))
    layers = replace(cfg.verifier, aux_layers=[1, 2, 3])
    with pytest.raises(ConfigError, match=r"set verifier\.aux_layers=\[2,4,5\]"):
        stage.load_pair(replace(cfg, verifier=layers), Path(section.head), device, torch.float32)


def test_a_head_of_other_tokens(cfg: RunConfig):
    (head_of(cfg) / "tokens.json").write_text(json.dumps(["<|other|>"]))
    with pytest.raises(ConfigError, match=r"verifier\.path=.*: token 0 is '<\|unk\|>'"):
        evaluate(cfg, head_of(cfg))


def test_only_unseen_prompts_are_refused(cfg: RunConfig, tmp_path: Path):
    alone = tmp_path / "unseen.jsonl"
    alone.write_text(lines({"split": "unseen_pattern", "turns": ["x"]}))
    with pytest.raises(ConfigError, match=r"eval\.prompts=.*every prompt is marked unseen"):
        evaluate(replace(cfg, eval=replace(cfg.eval, prompts=[str(alone)])), head_of(cfg))


def test_later_turns_follow_the_verifiers_own_answers(verifier: Verifier, make_draft):
    """User report B84: earlier turns are the verifier's own answers, and every turn counts."""
    settings = DecodeSettings(6, [], chain(2))
    turns = (Turn("system", "s"), Turn("user", "one"), Turn("user", "two"))
    prompt = EvalPrompt("p", "t", None, turns)
    (found,) = run_exact(verifier, make_draft(), [prompt], settings, Asking()).runs
    first, second = found.answers
    own = verifier.tokenizer.decode(first.plain.tokens, skip_special_tokens=True)
    whole = [*turns[:2], Turn("assistant", str(own)), turns[2]]
    assert second.prompt_ids == encode_prompt(whole, verifier.tokenizer, {})
    assert found.identical
    assert len(first.plain.tail) == 2
    positions = [at for at, _ in placed(first.speculative.rounds)]
    assert positions[0] == 1 and positions == sorted(set(positions))


def test_a_prompt_without_room_is_counted(verifier: Verifier, make_draft):
    settings = DecodeSettings(6, [], chain(2))
    long = EvalPrompt("p", "t", None, (Turn("user", "x" * 3000), Turn("user", "y")))
    exact = run_exact(verifier, make_draft(), [long], settings, Asking())
    assert exact.runs == [] and sum(exact.skipped.values()) == 2


@pytest.fixture
def second_user_turn_refused(verifier: Verifier, monkeypatch: pytest.MonkeyPatch) -> None:
    """The template takes one user turn and refuses conversations with another."""
    guard = "{% if messages | length > 2 %}{{ raise_exception('one turn only') }}{% endif %}"
    template = guard + str(verifier.tokenizer.chat_template)
    monkeypatch.setattr(verifier.tokenizer, "chat_template", template)


def test_a_turn_the_template_refuses_is_counted(
    verifier: Verifier, make_draft, second_user_turn_refused: None, capsys
):
    settings = DecodeSettings(6, [], chain(2))
    system = Turn("system", "s")
    prompts = [
        EvalPrompt("p", "t", None, (Turn("user", "one"), Turn("user", "two"), Turn("user", "3"))),
        EvalPrompt("q", "t", None, (system, system, Turn("user", "x"))),
        EvalPrompt("r", "t", None, (Turn("user", "x"),)),
    ]
    exact = run_exact(verifier, make_draft(), prompts, settings, Asking())
    assert [(one.prompt.id, len(one.answers)) for one in exact.runs] == [("p", 1), ("r", 1)]
    assert exact.skipped == {REFUSED: 3}
    assert capsys.readouterr().out.count("one turn only") == 1


def test_the_exact_runs_models_are_gone_when_the_timed_ones_load(cfg: RunConfig, monkeypatch):
    loaded: list[weakref.ref[torch.nn.Module]] = []
    load = Verifier.load

    def watched(*arguments: Any) -> Verifier:
        assert all(model() is None for model in loaded)
        verifier = load(*arguments)
        loaded.append(weakref.ref(verifier.model))
        return verifier

    monkeypatch.setattr(stage.Verifier, "load", watched)
    gc.disable()  # or chance would collect them
    try:
        evaluate(replace(cfg, eval=replace(cfg.eval, max_prompts=1)), head_of(cfg))
    finally:
        gc.enable()
    assert len(loaded) == 2


def test_held_out_tau_may_be_null(tmp_path: Path):
    assert read_held_out(tmp_path) == HeldOut()
    for text, value in (('{"tau": null}', None), ('{"tau": 1.5}', 1.5)):
        (tmp_path / "acceptance.json").write_text(text)
        assert read_held_out(tmp_path).tau == value


def test_training_answers_are_the_supervised_spans_of_the_training_split():
    ids = torch.arange(8)
    mask = torch.tensor([0, 1, 1, 0, 0, 1, 0, 1]).bool()
    kept = TokenizedSample("a", ids, mask, True, held_out=False)
    held = TokenizedSample("b", ids, mask, True, held_out=True)
    assert training_answers([kept, held]) == [[1, 2], [5], [7]]


def test_prompts_that_were_trained_on_are_counted():
    prompts = torch.tensor([prompt_digest([5, 6]), prompt_digest([5, 6, 7])])
    asked = [SimpleNamespace(prompt_ids=ids) for ids in ([5, 6], [5], [5, 6], [5, 6, 7])]
    exact = SimpleNamespace(runs=[SimpleNamespace(answers=asked)])
    for held_out, count in (([False, True], 2), ([False, False], 3), ([True, True], 0)):
        samples = SimpleNamespace(prompts=prompts, held_out=torch.tensor(held_out))
        assert count_trained_prompts(exact, SimpleNamespace(samples=samples)) == count


def test_a_run_that_does_not_exist_is_named(cfg: RunConfig):
    ghost = replace(cfg, run=replace(cfg.run, name="ghost"))
    with pytest.raises(ConfigError, match=r"run\.name=ghost: no such run"):
        main(ghost)
