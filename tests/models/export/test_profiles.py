"""One profile an engine: what it reads is what was trained, or the export is refused by name."""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from conf.schema import ConfigError, ExportFormat, Precision
from models.export.check import check
from models.export.engines import LAYOUTS, layout_of
from models.export.layout import NORM_FLAGS, Setting, draft_config_of
from models.export.llamacpp import LLAMACPP
from models.export.sglang import SGLANG
from models.export.speculators import SPECULATORS
from models.export.trtllm import TRTLLM
from models.export.vllm import VLLM
from models.export.write import export
from tests.models.export.engine_readers import Head, llamacpp, sglang, tensorrt_llm

CONFIG, WEIGHTS = "config.json", "model.safetensors"
LAYERS = 8  # of the verifier
FLAGS = (*NORM_FLAGS, "qk_norm")
HEADS = {
    "".join("01"[x] for x in values): dict(zip(FLAGS, values, strict=True))
    for values in product((False, True), repeat=len(FLAGS))
} | {"two layers": {"layers": 2}}
ALL = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=lambda layout: layout.format.value)


def captured_by(layout, draft, card, folder: Path) -> list[int]:
    """The layers that TensorRT-LLM's line of options names."""
    line = next(x for x in layout.serve(card, draft, folder) if "eagle3_layers_to_capture" in x)
    return json.loads(line.partition(":")[2])


def head_run_by(layout, folder: Path, card) -> Head:
    """The head that the engine makes of ``folder``."""
    config = json.loads((folder / CONFIG).read_text())
    names = list(load_file(folder / WEIGHTS))
    if layout is SGLANG:
        return sglang(config, names, LAYERS)
    if layout is LLAMACPP:
        return llamacpp(config, names, LAYERS)
    draft = draft_config_of(config, layout)
    return tensorrt_llm(config, names, captured_by(layout, draft, card, folder))


@pytest.mark.parametrize("layout", [SGLANG, LLAMACPP, TRTLLM], ids=lambda one: one.format.value)
@pytest.mark.parametrize("changes", HEADS.values(), ids=HEADS)
def test_an_engine_runs_the_head_that_was_trained_or_export_refuses(
    layout, changes, make_head, facts_of, plain_card, tmp_path
):
    """Both ways: what is exported is read as trained, and what is refused would be misread."""
    draft = make_head(**changes)
    facts, folder = facts_of(draft.config), tmp_path / "head"
    reasons = list(layout.refusals(draft.config))
    if not reasons:
        export(draft, facts, folder, plain_card, Precision.float32, layout)
        found = head_run_by(layout, folder, plain_card)
        assert found == Head(draft.config, [])
        return
    with pytest.raises(ConfigError, match=rf"--to {layout.format.value}: .* another engine"):
        export(draft, facts, folder, plain_card, Precision.float32, layout)
    assert not folder.exists()
    careless = replace(layout, refusals=VLLM.refusals)
    export(draft, facts, folder, plain_card, Precision.float32, careless)
    try:
        found = head_run_by(layout, folder, plain_card)
    except ValueError:
        return  # the engine says so itself
    assert found != Head(draft.config, [])
    findings = check(folder, layout=layout)
    assert findings == [f"{CONFIG}: {reason}" for reason in reasons]


@ALL
def test_every_key_is_missed_and_every_other_is_too_much(
    layout, make_head, facts_of, plain_card, tmp_path
):
    draft = make_head()
    folder = export(
        draft, facts_of(draft.config), tmp_path / "x", plain_card, Precision.float32, layout
    )
    text = (folder / CONFIG).read_text()

    def findings_of(change: Callable[[dict], object]) -> str:
        config = json.loads(text)
        change(config)
        (folder / CONFIG).write_text(json.dumps(config))
        return " ".join(check(folder, layout=layout))

    def visit(reach: Callable[[dict], dict]) -> None:
        for key, value in reach(json.loads(text)).items():
            assert key in findings_of(lambda c, key=key: reach(c).pop(key)), key
            if isinstance(value, dict) and "rope_type" not in value:
                visit(lambda c, key=key: reach(c)[key])
        assert "surplus" in findings_of(lambda c: reach(c).update(surplus=1))

    visit(lambda config: config)


@ALL
def test_a_folder_tells_its_own_layout(layout, make_head, facts_of, plain_card, tmp_path):
    draft = make_head()
    folder = export(
        draft, facts_of(draft.config), tmp_path / "x", plain_card, Precision.float32, layout
    )
    told = layout_of(json.loads((folder / CONFIG).read_text()))
    same_files = {SGLANG.format: VLLM, LLAMACPP.format: VLLM}  # one folder serves the three
    assert told is same_files.get(layout.format, layout)
    assert check(folder) == []


def test_speculators_wants_its_own_spelling(make_head, facts_of, plain_card, tmp_path):
    """The library finds layers.0. alone, and skips what it does not know without a word."""
    draft = make_head()
    folder = export(
        draft, facts_of(draft.config), tmp_path / "x", plain_card, Precision.float32, SPECULATORS
    )
    tensors = load_file(folder / WEIGHTS)
    old = "layers.0.hidden_norm.weight"
    tensors["midlayer.hidden_norm.weight"] = tensors.pop(old)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    findings = check(folder)
    assert any(old in one and "missing" in one for one in findings)
    assert any("midlayer.hidden_norm.weight: unknown" in one for one in findings)


@pytest.mark.parametrize("layout", [SPECULATORS, SGLANG], ids=lambda one: one.format.value)
def test_no_stream_after_the_last_layer(layout, make_head, facts_of, plain_card, tmp_path):
    """They capture before a layer, and none comes after the last."""
    draft = make_head(aux_layers=[2, 4, LAYERS])
    facts = facts_of(draft.config)
    words = rf"aux_layers=\[2, 4, 8\]: {layout.engine} takes ids below 8"
    with pytest.raises(ConfigError, match=words):
        export(draft, facts, tmp_path / "x", plain_card, Precision.float32, layout)
    export(draft, facts, tmp_path / "y", plain_card, Precision.float32, VLLM)


def test_absolute_ids_are_seen_without_a_membership(make_head, facts_of, plain_card, tmp_path):
    """TensorRT-LLM's folders have no t2d to compare with; twice the id is still an id here."""
    draft = make_head()
    ids = torch.arange(0, 80, 2)
    ids[1] = 1  # two neighbours, as any vocabulary has
    draft.d2t.copy_(ids - torch.arange(40))
    draft.t2d.zero_()[ids] = True
    place = tmp_path / "x"
    export(draft, facts_of(draft.config), place, plain_card, Precision.float32, TRTLLM)
    assert check(place) == []
    tensors = load_file(place / WEIGHTS)
    tensors["d2t"] = ids.int()
    save_file(tensors, place / WEIGHTS, metadata={"format": "pt"})
    assert any("d2t" in one and "absolute ids" in one for one in check(place))


@pytest.mark.parametrize("verifier", [torch.float32, torch.float16, torch.bfloat16])
def test_the_embedding_is_the_verifiers_to_the_bit(
    verifier, make_head, facts_of, plain_card, tmp_path
):
    """User report B64: a copy that is rounded is another one to an engine that compares."""
    draft = make_head()
    table = draft.embed_tokens.weight
    table.copy_(table.to(verifier))
    place = tmp_path / "x"
    export(draft, facts_of(draft.config), place, plain_card, Precision.bfloat16, SPECULATORS)
    stored = load_file(place / WEIGHTS)
    assert torch.equal(stored["embed_tokens.weight"].float(), table)
    assert stored["fc.weight"].dtype is torch.bfloat16


def test_vllm_is_judged_by_the_format_that_it_reads(make_head, facts_of, plain_card, tmp_path):
    draft, place = make_head(), tmp_path / "x"
    export(draft, facts_of(draft.config), place, plain_card, Precision.float32, SPECULATORS)
    assert check(place, layout=VLLM) == []
    assert check(place, layout=SGLANG) != []


@dataclass(frozen=True)
class Case:
    value: object
    words: str


@pytest.mark.parametrize(
    ("path", "case"),
    [
        ("speculators_config.verifier.name_or_path", Case(None, "must name the verifier")),
        ("speculators_config.verifier.name_or_path", Case("", "must name the verifier")),
        ("speculators_config.algorithm", Case("eagle", 'must be "eagle3"')),
        ("transformer_layer_config.num_aux_hidden_states", Case(5, "must be 3")),
        ("transformer_layer_config.vocab_size", Case(40, "t2d")),
        ("norm_before_residual", Case(None, "must be true or false")),
        ("dtype", Case("float16", "must be float32 or bfloat16")),
    ],
)
def test_what_speculators_misreads_is_named(path, case, make_head, facts_of, plain_card, tmp_path):
    draft = make_head()
    folder = export(
        draft, facts_of(draft.config), tmp_path / "x", plain_card, Precision.float32, SPECULATORS
    )
    config = json.loads((folder / CONFIG).read_text())
    *way, last = path.split(".")
    inner = config
    for name in way:
        inner = inner[name]
    inner[last] = case.value
    (folder / CONFIG).write_text(json.dumps(config))
    assert any(case.words in one for one in check(folder)), check(folder)


@pytest.mark.parametrize("tokens", [0, None, "4", True])
def test_speculators_number_of_tokens_is_judged(tokens, make_head, facts_of, plain_card, tmp_path):
    draft = make_head()
    folder = export(
        draft, facts_of(draft.config), tmp_path / "x", plain_card, Precision.float32, SPECULATORS
    )
    config = json.loads((folder / CONFIG).read_text())
    config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] = tokens
    (folder / CONFIG).write_text(json.dumps(config))
    assert any("speculative_tokens" in one for one in check(folder))


def test_the_chain_of_the_report_is_the_one_that_speculators_serves(
    make_head, facts_of, plain_card, tmp_path
):
    draft = make_head()
    card = replace(plain_card, draft_tokens=6)
    setting = Setting.of(facts_of(draft.config), card, Precision.bfloat16)
    config = SPECULATORS.config_for(draft.config, setting)
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 6
    assert config["speculators_config"]["verifier"] == {
        "name_or_path": "org/verifier",
        "architectures": ["LlamaForCausalLM"],
    }


def test_every_format_has_its_layout():
    assert [LAYOUTS[kind].format for kind in ExportFormat] == list(ExportFormat)


@ALL
def test_the_embedding_is_written_for_the_library_that_does_not_look_it_up(
    layout, make_head, facts_of, plain_card, tmp_path
):
    draft, folder = make_head(), tmp_path / "head"
    export(draft, facts_of(draft.config), folder, plain_card, Precision.float32, layout)
    tensors = load_file(folder / WEIGHTS)
    assert ("embed_tokens.weight" in tensors) == (layout is SPECULATORS)
    if layout is not SPECULATORS:
        return
    assert torch.equal(tensors["embed_tokens.weight"], draft.embed_tokens.weight)
    del tensors["embed_tokens.weight"]
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    (finding,) = check(folder)
    assert "embed_tokens.weight missing" in finding and "speculators" in finding
