"""The EAGLE-1 head: what it takes from its verifier, and what it refuses."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import CohereConfig, Gemma2Config
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from conf.schema import ConfigError, DraftSection, Precision, VerifierSection
from models.eagle1 import Eagle1Config, Eagle1Draft
from models.final_norm import final_norm_of
from models.verifier import Verifier, load_ends

WIDTH = 48


def with_weight(module: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(3)
    for parameter in module.parameters():
        parameter.data.normal_(generator=generator)
    return module


def test_a_final_norm_is_read_whatever_its_family_stores():
    llama, gemma = with_weight(LlamaRMSNorm(WIDTH, 1e-5)), with_weight(Gemma2RMSNorm(WIDTH, 1e-6))
    plain, added = final_norm_of(llama), final_norm_of(gemma)
    assert plain is not None and added is not None
    assert torch.equal(plain.weight, llama.weight) and plain.eps == 1e-5
    assert torch.equal(added.weight, 1 + gemma.weight) and added.eps == 1e-6


@pytest.mark.parametrize(
    "norm",
    [
        nn.LayerNorm(WIDTH, bias=False),
        with_weight(nn.LayerNorm(WIDTH)),
        nn.LayerNorm(WIDTH, elementwise_affine=False),
        None,
    ],
)
def test_another_norm_is_none_of_ours(norm: nn.Module | None):
    assert final_norm_of(norm) is None


@pytest.fixture(scope="module")
def section(tiny_verifier: Path) -> VerifierSection:
    return VerifierSection(path=str(tiny_verifier), dtype=Precision.float32, aux_layers=[8])


@pytest.fixture(scope="module")
def load(tmp_path_factory) -> Callable[[VerifierSection], Verifier]:
    cache = tmp_path_factory.mktemp("cache")
    return lambda section: Verifier.load(section, cache, torch.device("cpu"), torch.float32)


@pytest.fixture(scope="module")
def verifier(load, section: VerifierSection) -> Verifier:
    return load(section)


@pytest.fixture(scope="module")
def draft(verifier: Verifier) -> Eagle1Draft:
    torch.manual_seed(0)
    draft = Eagle1Draft(Eagle1Config.of(DraftSection(), verifier.facts))
    draft.initialise(verifier.ends)
    return draft


def test_its_state_is_the_verifiers_final_one(load, section, verifier, draft):
    ids = torch.arange(3, 20)[None]
    states = verifier.states(ids)
    assert torch.equal(draft.fuse(states.aux), states.last)
    logits = draft.logits(draft.fuse(states.aux))
    assert torch.equal(logits, verifier.logits_from(states.last))
    early = load(replace(section, aux_layers=[7])).states(ids)  # one layer early
    assert not torch.allclose(draft.fuse(early.aux), states.last, atol=1e-2)


def test_the_files_give_the_ends_that_the_loaded_verifier_has(section, verifier, tmp_path):
    read, own = load_ends(section, tmp_path, torch.float32), verifier.ends
    assert read.norm is not None and own.norm is not None
    assert torch.equal(read.norm.weight, own.norm.weight)
    assert read.norm.eps == own.norm.eps


def test_only_the_fc_and_the_layer_are_trained(draft: Eagle1Draft):
    frozen = {n for n, p in draft.named_parameters() if not p.requires_grad}
    assert frozen == {"embed_tokens.weight", "lm_head.weight", "final_norm.weight"}
    assert not {n for n in draft.state_dict() if "input_layernorm" in n}


def test_its_config_returns_from_its_file(draft: Eagle1Draft):
    text = draft.config.to_json()
    assert Eagle1Config.from_json(text) == draft.config
    assert '"family": "eagle1"' in text and '"aux_layers": [\n    8\n  ]' in text


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (('"eagle1"', '"eagle3"'), "family is not eagle1"),
        (('"vocab_size": 128', '"vocab_size": "128"'), "must be of kind int"),
        (('"num_kv_heads": 2', '"num_kv_heads": 3'), "must divide"),
        (('"rope": {', '"other": 1, "rope": {'), "other"),
        (("{", "["), "not a draft"),
    ],
)
def test_a_broken_file_is_refused_by_name(draft: Eagle1Draft, change: tuple[str, str], words: str):
    text = draft.config.to_json()
    assert change[0] in text
    with pytest.raises(ConfigError, match=words):
        Eagle1Config.from_json(text.replace(*change, 1))


def test_another_stream_is_refused(verifier: Verifier):
    facts = replace(verifier.facts, aux_layers=[2, 4, 5])
    with pytest.raises(ConfigError, match=r"aux_layers=\[2, 4, 5\].*set verifier.aux_layers=\[8\]"):
        Eagle1Config.of(DraftSection(), facts)


def test_a_verifier_that_changes_its_state_or_logits_otherwise_is_refused(verifier, draft):
    ends = verifier.ends
    assert ends.norm is not None
    for wrong, words in (
        (replace(ends, norm=None), "no RMSNorm"),
        (replace(ends, norm=replace(ends.norm, eps=0.1)), "epsilon"),
        (replace(ends, config=CohereConfig(logit_scale=0.06)), "logit_scale"),
        (replace(ends, config=Gemma2Config()), "final_logit_softcapping"),
        (replace(ends, head=ends.head[:-1]), r"head is \(127, 64\)"),
    ):
        with pytest.raises(ConfigError, match=words):
            Eagle1Draft(draft.config).initialise(wrong)
