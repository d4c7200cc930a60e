"""How a verifier step runs changes no token, and the graphs it needs are bounded."""

import logging
import shutil
from collections.abc import Callable
from dataclasses import replace
from time import sleep

import pytest
import torch
from torch._dynamo.utils import counters

from conf.choices import EvalRule, StepKind
from conf.schema import ConfigError
from conf.shapes import parse_shape
from eval.decode import DecodeSettings, decode
from eval.generation import Generation
from eval.round_plan import rule_of
from models import steps as steps_module
from models.fixed import FixedCache
from models.steps import Step, Steps
from models.verifier import Verifier

PROMPTS = [[1, 40, 41, 42, 43, 90, 3], [7], list(range(3, 60)), [9, 8, 7, 6]]
SETTINGS = DecodeSettings(max_new_tokens=24, eos_ids=[])
SHAPES = ["6", "2x2", "dynamic:nodes=6,depth=3,top_k=3"]
NODES = 6  # in each of them: chains and trees share a graph


def shaped(name: str, settings: DecodeSettings) -> DecodeSettings:
    shape = parse_shape(name, "eval.trees")
    return replace(settings, shape=shape, rule=rule_of(EvalRule.auto, shape, settings.sampling))


def figures(generations: list[Generation]) -> list[tuple]:
    return [(one.tokens, one.tail, one.rounds) for one in generations]


@pytest.fixture
def without_inductor(monkeypatch: pytest.MonkeyPatch):
    """Graphs are traced and guarded as ever, and then run as they are."""
    monkeypatch.setattr(steps_module, "BACKEND", "eager")
    monkeypatch.setattr(logging.getLogger("torch.__trace"), "propagate", False)  # pytest keeps all
    torch.compiler.reset()
    counters.clear()


def decodings(verifier: Verifier, draft, settings: DecodeSettings) -> list[list[tuple]]:
    """Without a draft and with every shape, in one batch."""
    found = [figures(decode(verifier, None, PROMPTS, settings, tail=2).generations)]
    for name in SHAPES:
        found.append(figures(decode(verifier, draft, PROMPTS, shaped(name, settings)).generations))
    return found


@pytest.fixture
def early(verifier: Verifier) -> DecodeSettings:
    """Answers end at different times, so that sequences leave the batch."""
    plain = decode(verifier, None, PROMPTS, SETTINGS).generations
    return replace(SETTINGS, eos_ids=[plain[0].tokens[5], plain[2].tokens[11]])


def test_compiled_steps_give_the_same_text_with_a_graph_a_shape(
    verifier: Verifier, bigrams, early: DecodeSettings, without_inductor
):
    draft = bigrams(PROMPTS, SETTINGS)
    wanted = decodings(verifier, draft, early)
    assert len({len(tokens) for tokens, *_ in wanted[0]}) >= 3
    steps = Steps(verifier, StepKind.compiled)
    steps.prepare(len(PROMPTS), 100, [1, NODES + 1])
    assert counters["stats"]["unique_graphs"] == 2
    assert decodings(verifier, draft, replace(early, steps=steps)) == wanted
    assert counters["stats"]["unique_graphs"] == 2
    # One more for another batch size, at the memory that its longer text takes, and it stays.
    for prompt in ([9, 8] * 150, [5, 6, 7]):
        one = decode(verifier, None, [prompt], replace(SETTINGS, steps=steps)).generations
        assert figures(one) == figures(decode(verifier, None, [prompt], SETTINGS).generations)
        assert counters["stats"]["unique_graphs"] == 3
    assert not counters["graph_break"]


def test_a_step_that_cannot_be_compiled_is_said(
    verifier: Verifier, without_inductor, monkeypatch: pytest.MonkeyPatch
):
    def states(self, *args):
        torch._dynamo.graph_break()

    monkeypatch.setattr(Verifier, "states", states)
    steps = Steps(verifier, StepKind.compiled)
    cache = steps.cache(1, 10)
    with pytest.raises(ConfigError, match=r"eval\.step=compiled: a step of LlamaForCausalLM"):
        steps.take(torch.zeros(1, 1, dtype=torch.long), cache)


def test_what_cannot_work_here_is_refused_by_name(
    verifier: Verifier, monkeypatch: pytest.MonkeyPatch
):
    assert Steps(verifier, StepKind.auto).kind is StepKind.eager  # on a CPU
    with pytest.raises(ConfigError, match=r"eval\.step=graphed: CUDA graphs need CUDA"):
        Steps(verifier, StepKind.graphed)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(ConfigError, match=r"eval\.step=compiled: needs a C\+\+ compiler"):
        Steps(verifier, StepKind.compiled)


def as_captured(work: Callable[[], Step], pool: object) -> Callable[[], Step]:
    """A graph's manners without a GPU: every replay writes its results over those before."""
    step = work()

    def replay() -> Step:
        new = work()
        step.states.aux.copy_(new.states.aux)
        step.states.last.copy_(new.states.last)
        step.logits.copy_(new.logits)
        return step

    return replay


@pytest.fixture
def pretended_graphs(verifier: Verifier, monkeypatch: pytest.MonkeyPatch) -> Steps:
    monkeypatch.setattr(steps_module, "captured", as_captured)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 0))
    steps = Steps(verifier)
    steps.kind = StepKind.graphed
    return steps


def test_nothing_reads_results_that_a_replay_has_overwritten(
    verifier: Verifier, bigrams, early: DecodeSettings, pretended_graphs: Steps
):
    draft = bigrams(PROMPTS, SETTINGS)
    wanted = decodings(verifier, draft, early)
    assert decodings(verifier, draft, replace(early, steps=pretended_graphs)) == wanted


def test_stale_inputs_would_show(
    verifier: Verifier, bigrams, early: DecodeSettings, pretended_graphs: Steps, monkeypatch
):
    monkeypatch.setattr(FixedCache, "follow", lambda self, cache: None)
    wanted = decode(verifier, None, PROMPTS, early).generations
    got = decode(verifier, None, PROMPTS, replace(early, steps=pretended_graphs)).generations
    assert [one.tokens for one in got] != [one.tokens for one in wanted]


def test_auto_takes_the_fastest_and_says_what_it_goes_without(
    pretended_graphs: Steps, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def slow(work, pool):
        def replay():
            sleep(0.1)
            return work()

        return replay

    def broken(*inputs):
        raise RuntimeError("no luck\nand more")

    monkeypatch.setattr(steps_module, "captured", slow)
    monkeypatch.setattr(steps_module, "compiled_run", lambda: broken)
    monkeypatch.setattr(steps_module, "TIMED", 2)
    pretended_graphs.kind = StepKind.auto
    pretended_graphs.prepare(2, 100, [1, 4])
    assert pretended_graphs.kind is StepKind.eager
    said = capsys.readouterr().out
    assert (
        "goes without: eval.step=compiled: a step of LlamaForCausalLM cannot be (no luck)" in said
    )
    assert "eval.step=auto: eager (" in said and "graphed" in said and "and more" not in said


@pytest.fixture
def on_cuda(verifier: Verifier):
    """The verifier on the GPU for one test."""
    torch.nn.Module.to(verifier.model, "cuda")
    yield verifier
    torch.nn.Module.to(verifier.model, "cpu")


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(StepKind.graphed, marks=pytest.mark.gpu("graphs", seconds=20)),
        pytest.param(StepKind.compiled, marks=pytest.mark.gpu("graphs", seconds=60)),
        pytest.param(StepKind.auto, marks=pytest.mark.gpu("graphs", seconds=60)),
    ],
)
def test_every_kind_gives_the_same_text_on_cuda(
    on_cuda: Verifier, bigrams, kind: StepKind, capsys: pytest.CaptureFixture[str]
):
    draft = bigrams(PROMPTS, SETTINGS).cuda()
    draft.first, draft.second = draft.first.cuda(), draft.second.cuda()
    wanted = decodings(on_cuda, draft, SETTINGS)
    steps = Steps(on_cuda, kind)
    assert decodings(on_cuda, draft, replace(SETTINGS, steps=steps)) == wanted
    assert steps.kind is not StepKind.auto
    chosen = f"eval.step=auto: {steps.kind.value} (" in capsys.readouterr().out
    assert chosen == (kind is StepKind.auto)
