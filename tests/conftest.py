"""What every test may ask for: a quiet CPU environment, shared data, and two verifiers."""

import os

# Before torch and transformers are imported: one thread (the machine has few, and ranks share
# them), no accelerator probing by DeepSpeed, no hub.
os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("WANDB_MODE", "disabled")
os.environ.setdefault("MPLBACKEND", "Agg")

import sys
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

sys.path.append(str(Path(__file__).resolve().parent / "gpu"))

from gpu_list import GpuList

from conf.schema import ConfigError
from models.bundled import SMOLLM2, resolve

ROOT = Path(__file__).resolve().parent.parent
SPECIAL_TOKENS = ["<|unk|>", "<|im_start|>", "<|im_end|>"]  # ids 0, 1, 2
VOCAB = 128
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

torch.set_num_threads(1)


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(GpuList(torch.cuda.is_available()), "gpu-list")


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder with data that several checkouts share; EYRIE_SHARED, or ../shared."""
    folder = Path(os.environ.get("EYRIE_SHARED", ROOT.parent / "shared"))
    if not folder.is_dir():
        pytest.skip(f"no shared test data at {folder} (set EYRIE_SHARED)")
    return folder


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """128 tokens: three special ones, then one a character (newline, printable ASCII, à to ü).

    Other characters become <|unk|>. Roles and spaces are characters like all others, so
    decode(encode(text)) gives the text back.
    """
    characters = ["\n", *(chr(code) for code in [*range(32, 127), *range(0xE0, 0xFD)])]
    vocabulary = {token: index for index, token in enumerate([*SPECIAL_TOKENS, *characters])}
    core = Tokenizer(WordLevel(vocabulary, unk_token="<|unk|>"))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        unk_token="<|unk|>",
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        chat_template=CHAT_TEMPLATE,
    )


@pytest.fixture(scope="session")
def tiny_verifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random eight-layer Llama with a tokenizer, as a folder that verifier.path can name."""
    folder = tmp_path_factory.mktemp("tiny_verifier")
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The demo's verifier, converted once into the checkout's cache/."""
    try:
        return resolve(SMOLLM2, ROOT / "cache")
    except ConfigError as error:
        pytest.skip(f"the bundled verifier cannot be had: {error}")


@pytest.fixture(scope="session")
def vllm_python() -> Path:
    """vLLM's interpreter; skips, with the reason, where there is none."""
    if reason := os.environ.get("EYRIE_NO_VLLM"):
        pytest.skip(reason)
    path = Path(os.environ.get("EYRIE_VLLM_PYTHON", ROOT / ".venv-vllm" / "bin" / "python"))
    if not path.is_file():
        pytest.skip(f"no vLLM interpreter at {path}: bash launch/vllm_env.sh makes one")
    return path
