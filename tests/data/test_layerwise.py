"""Capture layer by layer, and with one verifier over two ranks: the states of the plain way."""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

from conf.runtime import RankInfo
from conf.schema import (
    Attention,
    CaptureSection,
    ConfigError,
    Device,
    JobError,
    Precision,
    RunConfig,
    StateBackend,
    StateDtype,
    VerifierSection,
)
from data.capture import capture
from data.manifest import read_manifest
from data.reader import ShardReader
from data.records import PreparedData
from models import layerwise
from models.layerwise import states_by_layer
from models.placement import Placement
from models.verifier import Verifier

ALONE = RankInfo(0, 1, 0)
CPU = torch.device("cpu")


@pytest.fixture
def cfg(tiny_verifier: Path, tmp_path: Path) -> RunConfig:
    cfg = RunConfig()
    cfg.run.cache = str(tmp_path / "cache")
    cfg.run.device = Device.cpu
    cfg.verifier = VerifierSection(path=str(tiny_verifier), dtype=Precision.float32)
    cfg.capture = CaptureSection(dtype=StateDtype.float32, batch_tokens=128)
    return cfg


def in_layers(cfg: RunConfig, tmp_path: Path) -> RunConfig:
    section = replace(cfg.capture, backend=StateBackend.layers, chunk_tokens=512)
    return replace(cfg, run=replace(cfg.run, cache=str(tmp_path / "layers")), capture=section)


# ---- the same states ------------------------------------------------------------------------


def test_states_are_those_of_the_plain_way(
    cfg, prepared: PreparedData, tmp_path: Path, monkeypatch
):
    """Chunks of 200 tokens in batches of 128; each is a shard, which costs one reading."""
    plain = capture(cfg, prepared, ALONE)
    other = in_layers(cfg, tmp_path)
    other.capture.chunk_tokens = 200
    chunks = []
    right = layerwise.states_by_layer
    monkeypatch.setattr(
        "data.states.states_by_layer", lambda *given: chunks.append(len(given[1])) or right(*given)
    )
    folder = capture(other, prepared, ALONE)
    assert len(chunks) == len(read_manifest(folder).shards) == 3 and max(chunks) > 1
    assert folder.name == plain.name  # who computed them is no part of what they are
    left, right = ShardReader(plain), ShardReader(folder)
    for index in range(len(left)):
        a, b = left.read(index), right.read(index)
        torch.testing.assert_close(a.aux, b.aux, atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(a.last, b.last, atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(a.lse, b.lse, atol=1e-6, rtol=1e-6)
        assert torch.equal(a.argmax, b.argmax)
    assert {path.name for path in Path(other.run.cache).iterdir()} == {folder.name}  # no scratch


SMALL = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
}
MLA = {
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


def add_tokenizer(folder: Path, verifier: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (folder / name).write_bytes((verifier / name).read_bytes())


FAMILIES = [  # what differs between families, and how many tensors must be written again
    ("llama", {"tie_word_embeddings": True}, Attention.sdpa, 0),
    ("mistral", {"sliding_window": 8}, Attention.sdpa, 0),
    ("gemma2", {"sliding_window": 8}, Attention.eager, 0),  # scaled embedding, two kinds of mask
    ("qwen3_moe", EXPERTS, Attention.sdpa, 8),  # experts are stored one by one: two a layer
    ("deepseek_v3", MLA, Attention.sdpa, 6),
]


def small_model(family: str, more: dict) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **{**SMALL, **more}))


@pytest.mark.parametrize(("family", "more", "attention", "rewritten"), FAMILIES)
def test_every_family_runs_its_own_layers(
    family: str, more: dict, attention: Attention, rewritten: int, tiny_verifier, tmp_path: Path
):
    """Bit by bit the plain forward, of a batch longer than a sliding window beside a short one."""
    folder = tmp_path / family
    small_model(family, more).save_pretrained(folder)
    add_tokenizer(folder, tiny_verifier)
    section = VerifierSection(path=str(folder), aux_layers=[1, 2, 4], attention=attention)
    cache = tmp_path / "cache"
    plain = Verifier.load(section, cache, CPU, torch.float32)
    paged = Verifier.load(section, cache, CPU, torch.float32, Placement.layers)
    (scratch,) = cache.iterdir()
    assert len([path for path in scratch.iterdir() if path.name != "lock"]) == rewritten
    assert {p.device.type for p in paged.backbone.layers.parameters()} == {"meta"}
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randint(0, 128, shape, generator=generator) for shape in ((3, 20), (2, 7))]
    by_layer = states_by_layer(paged, batches)
    assert {p.device.type for p in paged.backbone.layers.parameters()} == {"meta"}
    for ids, found in zip(batches, by_layer, strict=True):
        for other in (found, paged.states(ids)):
            assert torch.equal(other.aux, plain.states(ids).aux)
            assert torch.equal(other.last, plain.states(ids).last)
        assert torch.equal(paged.logits_from(found.last), plain.logits_from(found.last))


def test_weights_are_read_once_a_chunk(cfg: RunConfig, monkeypatch):
    """Five batches of a chunk: each layer comes in once, not five times."""
    verifier = Verifier.load(
        cfg.verifier, Path(cfg.run.cache), CPU, torch.float32, Placement.layers
    )
    pagers = [layer._hf_hook for layer in verifier.backbone.layers]
    fetched = []
    for n, pager in enumerate(pagers):
        real = pager.pre_forward
        monkeypatch.setattr(
            pager,
            "pre_forward",
            lambda *a, n=n, real=real, **k: (fetched.append(n), real(*a, **k))[1],
        )
    states_by_layer(verifier, [torch.ones(1, 5, dtype=torch.long)] * 5)
    assert fetched == list(range(8))
    verifier.states(torch.ones(1, 5, dtype=torch.long))
    assert fetched == [*range(8), *range(8)]  # the plain way brings them in as well


# ---- wrong states are refused ---------------------------------------------------------------


def test_a_mask_that_is_lost_is_refused(cfg, prepared: PreparedData, tmp_path: Path, monkeypatch):
    """Were a layer called without what the model hands it, capture must not go on."""
    right = layerwise.enter

    def without_positions(verifier, ids):
        batch = right(verifier, ids)
        for given in batch.given:
            cos, sin = given["position_embeddings"]
            given["position_embeddings"] = (cos.roll(1, 1), sin.roll(1, 1))
        return batch

    monkeypatch.setattr(layerwise, "enter", without_positions)
    with pytest.raises(JobError):
        capture(in_layers(cfg, tmp_path), prepared, ALONE)


# ---- memory ---------------------------------------------------------------------------------

LAYERS = 24
ALLOWED = 100 << 20  # beside what the imports hold; the whole model takes 700 MB in float32
STORED = 353 << 20  # its files in bfloat16: mapped while they are opened, which counts though
# nothing of them need be held
LIMITED = f"""
import os, resource, sys
from dataclasses import replace
import torch
from transformers.models.llama import modeling_llama
from conf.runtime import RankInfo
from conf.schema import StateBackend
from data.capture import capture

def held():
    lines = open("/proc/self/status").read().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("VmData"))) << 10

for backend in (StateBackend.layers, StateBackend.transformers):
    sys.stdout.flush()
    if not os.fork():
        limit = held() + {STORED + ALLOWED}
        resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.RLIM_INFINITY))
        cfg.capture = replace(cfg.capture, backend=backend)
        cfg.run.cache += backend.value
        try:
            capture(cfg, prepared, RankInfo(0, 1, 0))
            print(backend.value, "captured", flush=True)
        except (MemoryError, RuntimeError, OSError) as error:
            print(backend.value, type(error).__name__, error, flush=True)
        os._exit(0)
    os.wait()
"""


@pytest.fixture(scope="module")
def large_verifier(tiny_verifier: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """24 layers of 29 MB in float32, stored in bfloat16 in files of 50 MB."""
    folder = tmp_path_factory.mktemp("large_verifier")
    config = LlamaConfig(
        **{**SMALL, "hidden_size": 512, "intermediate_size": 4096, "num_hidden_layers": LAYERS},
        dtype="bfloat16",
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config).bfloat16()
    model.to_empty(device="cpu")
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        for parameter in model.parameters():
            parameter.uniform_(-0.04, 0.04)
    model.save_pretrained(folder, max_shard_size="50MB")
    add_tokenizer(folder, tiny_verifier)
    return folder


def test_a_memory_limit_that_the_whole_model_breaks(
    cfg: RunConfig, prepared: PreparedData, large_verifier: Path, start_script: Callable, flatten
):
    """Both ways in processes that may allocate 100 MB beside their imports and mapped files."""
    cfg.verifier.path = str(large_verifier)
    some = replace(prepared, samples=flatten(prepared.samples[:4]))
    done = start_script(LIMITED, cfg, some, [sys.executable])
    assert done.returncode == 0, done.stderr[-2000:]
    said = [line for line in done.stdout.splitlines() if line.startswith(("layers", "transf"))]
    assert said[0] == "layers captured", done.stdout + done.stderr[-2000:]
    assert "memory" in said[1].lower(), said


# ---- one verifier over two ranks ------------------------------------------------------------

TWO_RANKS = """
import torch
from conf.runtime import RankInfo
from data.capture import capture
from data.distributed import setup, shutdown
from models import placement

setup(torch.device("cpu"))
real = placement.over_ranks
def over_ranks(*words):
    model = real(*words)
    own = sum(getattr(p, "to_local", lambda: p)().numel() for p in model.parameters())
    print("holds", own, "of", sum(p.numel() for p in model.parameters()), flush=True)
    return model
placement.over_ranks = over_ranks
capture(cfg, prepared, RankInfo.from_env())
shutdown()
"""
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


@pytest.mark.slow
def test_two_ranks_hold_one_verifier(cfg, prepared, tmp_path: Path, start_script: Callable):
    plain = ShardReader(capture(cfg, prepared, ALONE))
    cfg.run.cache = str(tmp_path / "two")
    cfg.capture = replace(cfg.capture, tensor_parallel=True)
    done = start_script(TWO_RANKS, cfg, prepared, TORCHRUN)
    assert done.returncode == 0, done.stderr[-3000:]
    held = [line.split() for line in done.stdout.splitlines() if line.startswith("holds")]
    assert len(held) == 2 and all(int(own) < 0.6 * int(of) for _, own, _, of in held)
    found = ShardReader(tmp_path / "two" / plain.folder.name)
    assert len(found) == len(plain) == len(prepared.samples)
    for index in range(len(plain)):
        a, b = plain.read(index), found.read(index)
        torch.testing.assert_close(a.aux, b.aux, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(a.last, b.last, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(a.lse, b.lse, atol=1e-5, rtol=1e-5)


def test_heads_that_do_not_deal_evenly_are_refused(cfg: RunConfig, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(ConfigError, match=r"2 key-value heads .* evenly to 3 ranks"):
        Verifier.load(cfg.verifier, Path(cfg.run.cache), CPU, torch.float32, Placement.ranks)
