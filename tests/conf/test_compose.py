"""Bad input ends in one sentence; every shipped YAML file composes."""

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from conf.compose import FOLDER, from_command_line, knobs_holding, load_config, load_saved, to_yaml
from conf.runtime import ROOT
from conf.schema import ConfigError, RunConfig, Stage

STAGES = "stages=[train]"  # needs no file


def group_files() -> list[tuple[str, str]]:
    return sorted(
        (p.parent.name, p.stem) for p in FOLDER.glob("*/*.yaml") if "sweep" not in p.parts
    )


@pytest.mark.parametrize(("group", "option"), group_files())
def test_every_group_file_composes(group: str, option: str):
    extra = ["data.path=README.md"] if group == "data" else []
    if group == "eval":
        extra = ["eval.prompts=README.md"]
    assert isinstance(load_config([f"{group}={option}", *extra, STAGES]), RunConfig)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["ttt.dept=3"], ["ttt.dept", "dept"]),
        (["ttt.depth=deep"], ["ttt.depth", "deep"]),
        (["ttt.depth=0"], ["ttt.depth=0", "at least 1", "ttt.depth=7"]),
        (["ttt.depth=null"], ["ttt.depth"]),
        (["verifier=llama9"], ["llama9", "qwen3_8b"]),
        (["loss.kind=mse"], ["loss.kind", "mse", "kl"]),
        (["stages=[eval]", "verifier.attention=flash_attention_2"], ["attention=sdpa"]),
        (["capture.chunk_tokens=0"], ["capture.chunk_tokens=65536"]),
        (["capture.tensor_parallel=true"], ["capture.tensor_parallel=true", "torchrun"]),
        (
            ["capture.tensor_parallel=true", "capture.backend=layers"],
            ["capture.tensor_parallel=true", "backend=layers", "backend=transformers"],
        ),
        (["capture.backend=dumped"], ["capture.dumped=null", "set capture.dumped=FOLDER"]),
        (["capture.dumped=tests"], ["capture.dumped=tests", "backend=dumped"]),
        (["capture.missing=compute"], ["missing=compute", "backend=transformers", "=dumped"]),
        (["capture.vllm_args.max_num_seqs=8"], ["vllm_args={'max_num_seqs': 8}", "backend=vllm"]),
        (["capture.vllm_python=python"], ["capture.vllm_python=python", "backend=vllm"]),
        (
            ["stages=[capture]", "capture.backend=vllm"],
            ["capture.vllm_python=null", "vllm >= 0.18"],
        ),
        (
            ["stages=[capture]", "capture.backend=vllm", "capture.vllm_python=/no/python"],
            ["capture.vllm_python=/no/python"],
        ),
        (["ttt.decay=1.5"], ["ttt.decay=1.5", "0.8"]),
        (["draft.family=medusa", "ttt.feed=own"], ["ttt.feed=own", "eagle3", "set ttt.feed=data"]),
        (["optim.average=1"], ["optim.average=1.0", "try optim.average=0.99"]),
        (["optim.average=0.9", "engine.zero_stage=3"], ["optim.average=0.9", "zero_stage=1"]),
        (["optim.kind=muon"], ["optim.kind=muon", "zero_stage=1", "take engine.zero_stage=0"]),
        (["draft.family=model", "ttt.weights=missed"], ["ttt.weights=missed", "ttt.weights=decay"]),
        (["engine.deepspeed.zero_optimization.stage=3"], ["engine.zero_stage=1"]),
        (["+engine.deepspeed.checkpoint.load_universal=true"], ["load_universal", "remove it"]),
        (["log.breakdown=-1"], ["log.breakdown=10"]),
        (["optim.weight_decay=nan"], ["optim.weight_decay=nan"]),
        (["regenerate.samples=-1"], ["regenerate.samples=-1"]),
        (["regenerate.samples=2", "regenerate.temperature=0"], ["temperature=0.7"]),
        (["regenerate.retries=-1"], ["regenerate.retries=-1", "try 5"]),
        (["regenerate.timeout=0"], ["regenerate.timeout=0", "600"]),
        (["regenerate.base_url=http://x/v1"], ["regenerate.base_url", "backend=openai"]),
        (["regenerate.backend=openai"], ["regenerate.base_url=:", "http://localhost:8000/v1"]),
        (
            [
                "regenerate.backend=openai",
                "regenerate.base_url=http://x/v1",
                "regenerate.api_key_env=EYRIE_NO_SUCH_KEY",
            ],
            ["regenerate.api_key_env=EYRIE_NO_SUCH_KEY", "export the key"],
        ),
        (
            ["+data.template_kwargs.add_generation_prompt=true"],
            ["data.template_kwargs.add_generation_prompt", "remove it"],
        ),
        (["verifier=lama"], ["choose one of llama3_1_8b", "smollm2_135m;"]),
        (["draft.vocab_size=ful"], ["draft.vocab_size=ful", "full"]),
        (["draft.vocab_size=0"], ["draft.vocab_size=0", "draft.vocab_size=32000"]),
        (["draft.vocab_size=null"], ["draft.vocab_size"]),
        (["data.weights=[1,0.5]", "data.path=[README.md]"], ["data.weights", "1 entries"]),
        (["data.weights=[2]", "data.path=[README.md]"], ["2.0 must be", "divide"]),
        (["data.workers=0"], ["data.workers=0", "data.workers=null"]),
        (["draft.fc_norm=true", "draft.norm_before_fc=true"], ["norm_before_fc", "fc_norm"]),
        (["engine.zero_stage=4"], ["engine.zero_stage=4"]),
        (["engine.deepspeed.bf16.enabled=true"], ["engine.deepspeed.bf16"]),
        (["stages=[export,train]"], ["stages=[export,train]"]),
        (["stages=[fly]"], ["fly"]),
        (["run.name=../x"], ["run.name=../x"]),
        (["verifier.path=/nowhere/at/all"], ["verifier.path=/nowhere/at/all"]),
        (["stages=[prepare]", "data.path=missing.jsonl"], ["missing.jsonl", "data.regenerate"]),
        (["--multirun", "ttt.depth=1,3"], ["launch.sweep"]),
        (["-m", "ttt.depth=1,3"], ["launch.sweep"]),
        (["--fast"], ["--fast"]),
        (["ttt.depth=1,3"], ["ttt.depth"]),
        (["experiment=typo"], ["typo"]),
        (["eval=null"], ["eval=null"]),
        (["data=jsonl"], ["data.path"]),
    ],
)
def test_a_mistake_is_one_sentence(words: list[str], expected: list[str]):
    stages = (
        [] if any(word.startswith("stages") or word == "data=jsonl" for word in words) else [STAGES]
    )
    with pytest.raises(ConfigError) as caught:
        from_command_line([*words, *stages])
    message = str(caught.value)
    assert "\n" not in message
    for part in expected:
        assert part in message, message


def cpu_seconds_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_errors_answer_before_torch_is_imported():
    before = cpu_seconds_of_children()
    result = subprocess.run(
        [sys.executable, "train/main.py", "ttt.depth=0"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    seconds = cpu_seconds_of_children() - before  # unlike the clock, the same on a busy machine
    assert result.returncode == 2
    assert result.stderr.strip().count("\n") == 0
    assert "ttt.depth=0" in result.stderr
    assert seconds < 2
    probe = "import sys; sys.argv=['x']; import conf.compose; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", probe], cwd=ROOT, check=True)


def test_a_string_is_a_list_of_one():
    cfg = load_config([STAGES, "data.path=a.jsonl"])
    assert cfg.data.path == ["a.jsonl"]
    hub = "hub:owner/name:en@test"
    assert load_config(["stages=[prepare]", f"data.path={hub}"]).data.path == [hub]
    assert load_config(["stages=train"]).stages == [Stage.train]
    assert {"data.path", "stages", "verifier.aux_layers", "eval.prompts"} <= knobs_holding(list)


def test_saved_configuration_reads_back_equal(tmp_path: Path):
    cfg = load_config([STAGES, "ttt.depth=4", "data.template_kwargs={enable_thinking: false}"])
    (tmp_path / "config.yaml").write_text(to_yaml(cfg))
    assert load_saved(tmp_path / "config.yaml") == cfg


def test_more_ranks_than_packs_a_step_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(os.environ, "WORLD_SIZE", "64")
    with pytest.raises(ConfigError, match=r"optim\.packs_per_step=1: .*packs_per_step=64"):
        load_config([STAGES])
