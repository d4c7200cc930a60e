"""The lines that start a server, flag by flag, and the stacks that cannot serve a head."""

import json
import shlex
from dataclasses import replace

import pytest

from conf.compose import load_config
from conf.shapes import parse_shape
from eval.advice.advise import Advice, advise_on_figures, advise_on_report
from eval.advice.question import Accept, Figures, Question, Stack
from models.eagle1 import Eagle1Config
from models.eagle3 import DraftConfig
from models.small_model import ModelConfig

GREEDY_VLLM = (
    "vllm serve some/verifier --speculative-config "
    '\'{"method": "eagle3", "model": "runs/demo/export/vllm", "num_speculative_tokens": 4}\''
)


def config(layers: int = 1, **flags: bool) -> DraftConfig:
    names = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "qk_norm")
    values = [flags.get(name, False) for name in names]
    return DraftConfig(*(64, 128, 4, 2, 16, 128, 64, [2, 4, 5], 1e-5, 512, {}), *values, layers)


@pytest.fixture
def measured(made):
    heat = {
        (1.0, "rejection"): (0.6, 0.36, 0.216, 0.13),
        (1.0, "argmax_draft"): (0.5, 0.25, 0.125, 0.06),
    }
    return made.report(costs=[made.costs(1, 0.0)], heat=heat)


def vllm_config(advice: Advice) -> dict:
    words = shlex.split(advice.serving.line)
    assert words[:3] == ["vllm", "serve", "some/verifier"] and words[3] == "--speculative-config"
    assert len(words) == 5
    return json.loads(words[4])


def test_vllm_greedy(made, measured):
    advice = advise_on_report(measured, Question(), made.place)
    assert advice.serving.line == GREEDY_VLLM and advice.serving.version == "0.32.0"
    assert any('"draft_sample_method": "probabilistic"' in note for note in advice.notes)
    cold = made.report(costs=[made.costs(1, 0.0)])
    assert not any(
        "gate holds" in note for note in advise_on_report(cold, Question(), made.place).notes
    )


def test_vllm_draws_as_acceptance_was_measured(made, measured):
    drawn = advise_on_report(measured, Question(temperature=1.0), made.place)
    assert vllm_config(drawn) == {
        "method": "eagle3",
        "model": "runs/demo/export/vllm",
        "num_speculative_tokens": 2,
        "draft_sample_method": "probabilistic",
    }
    one_hot = Question(temperature=1.0, accept=Accept.argmax_draft)
    assert "draft_sample_method" not in vllm_config(advise_on_report(measured, one_hot, made.place))
    old = advise_on_report(measured, Question(temperature=1.0, version="0.20"), made.place)
    assert "draft_sample_method" not in vllm_config(old)
    assert any("--accept argmax_draft" in note for note in old.serving.notes)


def test_the_head_is_exported_first_where_it_is_not(made, measured):
    place = replace(made.place, export="python -m launch.export runs/demo/best --to vllm")
    assert advise_on_report(measured, Question(), place).serving.before == place.export
    assert advise_on_report(measured, Question(), made.place).serving.before is None
    own = advise_on_report(measured, Question(stack=Stack.eyrie), place)
    assert own.serving.before is None


def test_names_with_spaces_are_quoted(made, measured):
    place = replace(made.place, verifier="my models/v", head="it's/h")
    words = shlex.split(advise_on_report(measured, Question(), place).serving.line)
    assert words[2] == "my models/v" and json.loads(words[4])["model"] == "it's/h"


def test_sglang_chain(made, measured):
    advice = advise_on_report(measured, Question(stack=Stack.sglang), made.place)
    assert advice.serving.line == (
        "python -m sglang.launch_server --model-path some/verifier "
        "--speculative-algorithm EAGLE3 --speculative-draft-model-path runs/demo/export/vllm "
        "--speculative-num-steps 4 --speculative-eagle-topk 1 --speculative-num-draft-tokens 5 "
        "--enable-metrics"
    )
    drawn = Question(stack=Stack.sglang, temperature=1.0)
    line = advise_on_report(measured, drawn, made.place).serving.line
    assert "--speculative-num-steps 2 " in line and "--speculative-num-draft-tokens 3 " in line
    assert "--speculative-use-rejection-sampling" in line


def test_sglang_dynamic_tree(made):
    """The root counts among SGLang's draft tokens: 24 guesses are 25."""
    name = "dynamic:nodes=24,depth=5,top_k=4"
    report = made.report(costs=[made.costs(1, 0.0)], timed={1: [made.timed(name, 5, 24, 4.0, 2.5)]})
    advice = advise_on_report(report, Question(stack=Stack.sglang), made.place)
    assert advice.pick.shape == name
    assert (
        "--speculative-num-steps 5 --speculative-eagle-topk 4 --speculative-num-draft-tokens 25"
        in advice.serving.line
    )


def test_eyrie_times_the_pick(made):
    """The line is one that eval.main takes, and the shape comes through the shell whole."""
    paths = "[[0],[1],[0,0],[0,1]]"
    report = made.report(costs=[made.costs(1, 0.0)], timed={1: [made.timed(paths, 2, 4, 3.0, 2.5)]})
    own = Question(stack=Stack.eyrie)
    advice = advise_on_report(report, own, made.place)
    words = shlex.split(advice.serving.line)
    assert words[:3] == ["python", "-m", "eval.main"]
    cfg = load_config(words[3:])
    assert (cfg.run.name, cfg.eval.trees, cfg.eval.batch_sizes) == ("demo", [paths], [1])
    assert parse_shape(cfg.eval.trees[0], "x").nodes == 4
    chain = advise_on_report(made.report(costs=[made.costs(1, 0.0)]), own, made.place)
    assert load_config(shlex.split(chain.serving.line)[3:]).eval.n_sweep == [4]


def test_a_draft_model_and_a_look_up(made):
    small = Figures(0.7, 0.05, [], {})
    advice = advise_on_figures(small, Question(dialogues=0), made.place)
    found = vllm_config(advice)
    assert found["method"] == "draft_model" and found["model"] == made.place.head
    table = Figures(0.5, 0.0, [0.5, 0.3], {})
    advice = advise_on_figures(table, Question(dialogues=0), made.place)
    assert vllm_config(advice) == {
        "method": "ngram",
        "num_speculative_tokens": 2,
        "prompt_lookup_min": 1,
        "prompt_lookup_max": 3,
    }
    on_sglang = Question(dialogues=0, stack=Stack.sglang)
    line = advise_on_figures(table, on_sglang, made.place).serving.line
    assert "--speculative-algorithm NGRAM --speculative-num-draft-tokens 3" in line
    assert "draft-model-path" not in line
    own = advise_on_figures(small, Question(dialogues=0, stack=Stack.eyrie), made.place)
    assert own.verdict == "off"
    assert "Eyrie's loop runs EAGLE-3, EAGLE-1 and Medusa heads alone" in own.reason


def test_a_report_on_an_eagle1_head_names_its_method(made, measured):
    rope = {"rope_type": "default", "rope_theta": 1e4}
    head = Eagle1Config(8, 8, 1, 1, 8, 9, [4], 1e-6, 64, rope)
    place = replace(made.place, config=head)
    advice = advise_on_report(measured, Question(), place)
    assert advice.family.family.name == "EAGLE-1" and "an EAGLE-1 head" in advice.family.why[0]
    assert vllm_config(advice)["method"] == "eagle"
    on_sglang = advise_on_report(measured, Question(stack=Stack.sglang), place)
    assert on_sglang.verdict == "off" and "exported for vLLM alone" in on_sglang.reason


def test_a_report_is_of_its_own_family(made, measured):
    """A small model is served by its own method, and for the stack that it is exported for."""
    place = replace(made.place, config=ModelConfig({}, 128, 512), export="write it")
    advice = advise_on_report(measured, Question(), place)
    assert vllm_config(advice)["method"] == "draft_model" and advice.serving.before == "write it"
    assert "a small draft model" in advice.family.why[0]
    off = advise_on_report(measured, Question(stack=Stack.sglang), place)
    assert off.verdict == "off" and "exported for vLLM alone" in off.reason
    assert advise_on_report(measured, Question(stack=Stack.eyrie), place).verdict == "on"


@pytest.mark.parametrize(
    ("stack", "version", "flags", "said"),
    [
        (Stack.vllm, "0.8.4", {}, "has no EAGLE-3, which came with 0.8.5"),
        (Stack.sglang, "0.4.3", {}, "EAGLE-1 or EAGLE-2 would need a head of their own"),
        (Stack.vllm, "0.21", {"fc_norm": True}, "does not read the head's fc_norm"),
        (Stack.vllm, "0.21", {"norm_output": True}, "use 0.22 or later"),
        (Stack.sglang, None, {"norm_before_residual": True}, "serve it with vLLM"),
        (Stack.sglang, None, {"norm_before_fc": True}, "serve it with vLLM"),
        (Stack.sglang, None, {"qk_norm": True}, "reads the head's qk_norm"),
        (Stack.sglang, None, {"layers": 2}, "train one with draft.layers=1"),
    ],
)
def test_stacks_that_lack_the_family(made, measured, stack, version, flags, said):
    place = replace(made.place, config=config(**flags))
    advice = advise_on_report(measured, Question(stack=stack, version=version), place)
    assert advice.verdict == "off" and said in advice.reason
    assert "speculative" not in advice.serving.line and advice.telemetry == []


def test_heads_that_they_do_read(made, measured):
    for stack, version, flags in (
        (Stack.vllm, "0.22", {"fc_norm": True, "norm_output": True}),
        (Stack.vllm, "0.8.5", {}),
        (Stack.vllm, None, {"qk_norm": True}),
        (Stack.vllm, None, {"layers": 2}),
        (Stack.sglang, "0.4.4", {}),
        (Stack.eyrie, None, {"norm_before_residual": True}),
    ):
        place = replace(made.place, config=config(**flags))
        advice = advise_on_report(measured, Question(stack=stack, version=version), place)
        assert advice.verdict == "on", advice.reason
        noted = any("qk_norm needs" in note for note in advice.serving.notes)
        assert noted is flags.get("qk_norm", False)
