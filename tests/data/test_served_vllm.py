"""Real vLLM behind its OpenAI-compatible server gives the answers that our own decoding gives."""

import json
import os
import shutil
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from conf.schema import AnswerBackend, Device, Precision, RunConfig
from data.regenerate import regenerate

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]

NEW = 24
WORDS = ["cat", "a longer prompt than most", "hi", "what is this?", "0123456789 " * 4, "OK!"]
SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "NO_PROXY": "127.0.0.1",
}


@pytest.fixture(scope="module")
def verifier(tiny_verifier: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Heads of 32, the narrowest that vLLM takes on a CPU."""
    folder = tmp_path_factory.mktemp("served")
    shutil.copytree(tiny_verifier, folder, dirs_exist_ok=True)
    config = LlamaConfig.from_pretrained(tiny_verifier)
    config.num_attention_heads, config.num_key_value_heads, config.head_dim = 2, 1, 32
    config.initializer_range = 0.2  # with less it says one thing over and over
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def answers(verifier: Path, folder: Path, url: str | None = None) -> list[dict]:
    """Greedy answers to two turns a prompt: vLLM's at ``url``, or ours."""
    ask = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "x"}]
    rows = []
    for number, word in enumerate(WORDS):
        rows.append({"id": f"p{number}", "messages": [{**ask[0], "content": word}, *ask[1:], *ask]})
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    cfg = RunConfig()
    cfg.run.cache, cfg.run.device = str(folder / "cache"), Device.cpu
    cfg.verifier.path, cfg.verifier.dtype = str(verifier), Precision.float32
    section = cfg.regenerate
    section.prompts, section.max_new_tokens = [str(prompts)], NEW
    section.output = str(folder / f"{'vllm' if url else 'own'}.jsonl")
    if url:
        section.backend, section.base_url = AnswerBackend.openai, url
    return [json.loads(line) for line in regenerate(cfg).read_text().splitlines()]


@pytest.fixture(scope="module")
def own(verifier: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """Our own answers, once it is known what the verifier says: it then ends some of them."""
    rows = answers(verifier, tmp_path_factory.mktemp("never"))
    first = [row["answer_ids"] for row in rows if len(row["conversations"]) == 2]
    opening = {ids[0] for ids in first}
    ends = [next(token for token in ids[3:] if token not in opening) for ids in first[:2]]
    settings = json.loads((verifier / "generation_config.json").read_text())
    settings["eos_token_id"] = sorted({2, *ends})
    (verifier / "generation_config.json").write_text(json.dumps(settings))
    return answers(verifier, tmp_path_factory.mktemp("own"))


@pytest.fixture(scope="module")
def url(
    vllm_python: Path, verifier: Path, own: list[dict], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """vLLM's server in float32, after ``own`` has settled what ends an answer."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = tmp_path_factory.mktemp("log") / "vllm.txt"
    command = [vllm_python, "-m", "vllm.entrypoints.openai.api_server", "--model", verifier]
    command += ["--dtype", "float32", "--max-model-len", "1024", "--max-num-seqs", "4"]
    command += ["--enforce-eager", "--host", "127.0.0.1", "--port", str(port)]
    with log.open("w") as output:
        server = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env={**os.environ, **SETTINGS}
        )
    try:
        address = f"http://127.0.0.1:{port}"
        until = time.monotonic() + 400
        while not is_up(f"{address}/health"):
            assert server.poll() is None and time.monotonic() < until, log.read_text()[-3000:]
            time.sleep(0.5)
        yield f"{address}/v1"
    finally:
        server.kill()
        server.wait()


def is_up(address: str) -> bool:
    with suppress(OSError), urllib.request.urlopen(address) as reply:
        return reply.status == 200
    return False


def test_greedy_answers_are_those_of_the_builtin_backend(
    verifier: Path, own: list[dict], url: str, tmp_path: Path
):
    """Token for token, ends of turn and second turns too; the prompts are compared on the way."""
    served = answers(verifier, tmp_path, url)
    assert served == own
    assert {row["cut"] for row in own} == {False, True}
    assert any(len(row["answer_ids"]) == 2 for row in own if len(row["conversations"]) == 4)
