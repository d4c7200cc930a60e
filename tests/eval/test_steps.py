"""How a verifier step runs changes no token, and the graphs it needs are bounded."""

import shutil
from dataclasses import replace

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
from models.steps import Steps
from models.verifier import Verifier

PROMPTS = [[1, 40, 41, 42, 43, 90, 3], [7], list(range(3, 60)), [9, 8, 7, 6]]
SETTINGS = DecodeSettings(max_new_tokens=24, eos_ids=[])
SHAPES = ["3", "2x2", "dynamic:nodes=6,depth=3,top_k=3"]
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA here")


def shaped(name: str, settings: DecodeSettings) -> DecodeSettings:
    shape = parse_shape(name, "eval.trees")
    return replace(settings, shape=shape, rule=rule_of(EvalRule.auto, shape, settings.sampling))


def figures(generations: list[Generation]) -> list[tuple]:
    return [(one.tokens, one.tail, one.rounds) for one in generations]


@pytest.fixture
def without_inductor(monkeypatch: pytest.MonkeyPatch):
    """Graphs are traced and guarded as ever, and then run as they are."""
    monkeypatch.setattr(steps_module, "BACKEND", "eager")
    torch.compiler.reset()
    counters.clear()


def decodings(verifier: Verifier, draft, settings: DecodeSettings) -> list[list[tuple]]:
    """Without a draft and with every shape, batches and singles; sequences leave on their way."""
    found = []
    for prompts in (PROMPTS, PROMPTS[2:3]):
        found.append(figures(decode(verifier, None, prompts, settings, tail=2).generations))
        for name in SHAPES:
            guided = decode(verifier, draft, prompts, shaped(name, settings))
            found.append(figures(guided.generations))
    return found


def test_compiled_steps_give_the_same_text_with_a_graph_a_shape(
    verifier: Verifier, bigrams, without_inductor
):
    draft = bigrams(PROMPTS, SETTINGS)
    plain = decode(verifier, None, PROMPTS, SETTINGS).generations
    ends = [plain[0].tokens[5], plain[2].tokens[11]]
    settings = replace(SETTINGS, eos_ids=ends)
    wanted = decodings(verifier, draft, settings)
    assert len({len(tokens) for tokens, *_ in wanted[0]}) >= 3  # they left at different times
    steps = Steps(verifier, StepKind.compiled)
    got = decodings(verifier, draft, replace(settings, steps=steps))
    assert got == wanted
    # Two batch sizes, and one, four, five and seven tokens a sequence: root and guesses.
    assert counters["stats"]["unique_graphs"] == 2 * 4
    assert not counters["graph_break"]
    assert decodings(verifier, draft, replace(settings, steps=steps)) == wanted
    assert counters["stats"]["unique_graphs"] == 2 * 4


def test_longer_texts_take_more_memory_and_new_graphs(verifier: Verifier, without_inductor):
    steps = Steps(verifier, StepKind.compiled)
    short, long = [5, 6, 7], [9, 8] * 150
    settings = replace(SETTINGS, max_new_tokens=8)
    for prompt, graphs in ((short, 1), (long, 2), (short, 2)):
        one = decode(verifier, None, [prompt], replace(settings, steps=steps)).generations[0]
        assert one.tokens == decode(verifier, None, [prompt], settings).generations[0].tokens
        assert counters["stats"]["unique_graphs"] == graphs


def test_prepared_steps_make_no_graph_later(verifier: Verifier, bigrams, without_inductor):
    steps = Steps(verifier, StepKind.compiled)
    steps.prepare(len(PROMPTS), 100, [1, 4])
    assert counters["stats"]["unique_graphs"] == 2
    settings = shaped("3", replace(SETTINGS, steps=steps))
    decode(verifier, bigrams(PROMPTS, SETTINGS), PROMPTS, settings)
    decode(verifier, None, PROMPTS, settings)
    assert counters["stats"]["unique_graphs"] == 2


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


@pytest.fixture
def on_cuda(verifier: Verifier):
    """The verifier on the GPU for one test."""
    verifier.model.to("cuda")
    yield verifier
    verifier.model.to("cpu")


@on_gpu
@pytest.mark.parametrize("kind", [StepKind.graphed, StepKind.compiled, StepKind.auto])
def test_every_kind_gives_the_same_text_on_cuda(on_cuda: Verifier, bigrams, kind: StepKind):
    draft = bigrams(PROMPTS, SETTINGS).cuda()
    draft.first, draft.second = draft.first.cuda(), draft.second.cuda()
    wanted = decodings(on_cuda, draft, SETTINGS)
    steps = Steps(on_cuda, kind)
    assert decodings(on_cuda, draft, replace(SETTINGS, steps=steps)) == wanted
    assert steps.kind is not StepKind.auto


@on_gpu
def test_auto_says_what_it_takes(on_cuda: Verifier, capsys: pytest.CaptureFixture[str]):
    steps = Steps(on_cuda, StepKind.auto)
    steps.prepare(2, 100, [1, 5])
    assert f"eval.step=auto: {steps.kind.value} (" in capsys.readouterr().out
