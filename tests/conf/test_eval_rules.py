"""The rules on the evaluation's knobs: what they refuse, what they let pass, and what they say."""

from pathlib import Path

import pytest

from conf.compose import load_config
from conf.schema import ConfigError


def refused(*words: str, stages: str = "train") -> str:
    with pytest.raises(ConfigError) as error:
        load_config([f"stages=[{stages}]", *words])
    return str(error.value)


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("eval.n_sweep=[]", "try [1,2,3,4,5]"),
        ("eval.n_sweep=[2,0]", "chain lengths from 1"),
        ("eval.n_sweep=[2,2]", "none twice"),
        ("eval.n_sweep=[1,300]", "at most 256 guesses"),
        ("eval.n_draft=257", "at most 256 guesses"),
        ("eval.valid_depth=999", "at most 256 guesses"),
        ("eval.batch_sizes=[]", "try [1]"),
        ("eval.batch_sizes=[0]", "numbers of sequences from 1"),
        ("eval.batch=0", "try eval.batch=1"),
        ("eval.repeats=0", "try eval.repeats=1"),
        ("eval.top_k=-1", "0 keeps all tokens"),
        ("eval.top_p=0", "1 keeps all tokens"),
        ("eval.top_p=1.5", "at most 1"),
        ("eval.min_p=-0.1", "0 keeps all tokens"),
        ("eval.min_p=1.5", "at most 1"),
        ("eval.temperatures=[0,-1]", "try [0,0.5,1]"),
        ("eval.temperatures=[1,1]", "none twice"),
        ("eval.temperatures=[1e-46]", "try [0,0.5,1]"),  # 0 in float32, and 0/0 no distribution
        ("eval.temperatures=[1e39]", "try [0,0.5,1]"),
        ("eval.temperature=1e-46", "0, or from 1e-06 to 1e+06"),
        ("eval.temperature=1e39", "0, or from 1e-06 to 1e+06"),
        ("eval.bootstrap=1000000000000", "at most 1000000"),
        ("eval.stop=['']", "remove it"),
        ("eval.trees=[2xx2]", "no shape of guesses"),
        ("eval.trees=[40x40]", "try 2x2x2"),
        ("eval.trees=['dynamic:nodes=99,depth=2,top_k=2']", "top_k"),
        ("eval.trees=[2x2,2x2]", "lists a shape twice"),
        ("eval.rule=rejection", "at temperature 0 every rule is greedy"),
        ("eval.rule=argmax_draft", "at temperature 0 every rule is greedy"),
    ],
)
def test_a_wrong_knob_is_named_with_the_way_out(word: str, says: str):
    message = refused("eval.temperatures=[]", word)  # the demo has warm ones
    assert message.startswith(word.partition("=")[0]), message
    assert says in message and "\n" not in message


def test_rejection_does_not_judge_a_tree_chosen_by_confidence():
    tree = "eval.trees=['dynamic:nodes=8,depth=2,top_k=4']"
    message = refused(tree, "eval.rule=rejection", "eval.temperature=0.7")
    assert message.startswith("eval.rule=rejection") and "eval.rule=auto" in message
    for rule in ("auto", "argmax_draft"):
        load_config(["stages=[train]", tree, f"eval.rule={rule}", "eval.temperature=0.7"])


@pytest.mark.parametrize(
    "words",
    [
        ["eval.top_p=0.9", "eval.top_k=5", "eval.min_p=0.1"],  # temperature 0 ignores them
        ["eval.rule=rejection", "eval.temperatures=[0,0.7]"],
        ["eval.trees=[2x2x2,'[[0],[1],[0,0]]']", "eval.rule=rejection", "eval.temperature=1"],
        ["eval.step=graphed", "run.device=cuda"],
    ],
)
def test_what_makes_sense_passes(words: list[str]):
    load_config(["stages=[train]", *words])


def test_graphs_need_cuda():
    assert "eval.step=eager" in refused("eval.step=graphed", "run.device=cpu")


def test_the_assistant_must_be_there_when_the_evaluation_runs(tmp_path: Path):
    word = f"eval.assistant={tmp_path}"
    load_config(["stages=[train]", word])
    given = ["eval.prompts=README.md"]
    message = refused(word, *given, stages="eval")
    assert message.startswith(word) and "or null" in message
    (tmp_path / "config.json").write_text("{}")
    load_config(["stages=[eval]", word, *given])
