"""The smoke run: the whole job in a few steps, on a random verifier made on the spot."""

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from conf.runtime import ROOT

STEPS, NAME = 4, "smoke"
PATIENCE = 900.0  # seconds; a slow home folder takes minutes to import torch for the first time
TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL = ["<|unk|>", "<|im_start|>", "<|im_end|>"]
SETTINGS = f"""
    data=jsonl data.max_length=96 data.valid_share=0.2 draft.vocab_size=64 ttt.depth=2
    verifier.aux_layers=null verifier.dtype=float32 capture.min_agreement=0
    optim.micro_batch_tokens=192 optim.max_steps={STEPS}
    log.every=1 log.valid_every={STEPS} log.save_every={STEPS}
    eval.max_prompts=2 eval.max_new_tokens=8 eval.speed_prompts=1 eval.n_sweep=[1]
    eval.n_draft=2 eval.valid_depth=2 eval.bootstrap=20
    """.split()


@dataclass(frozen=True)
class Smoke:
    """How the run ended."""

    seconds: float
    problem: str | None  # None: a head was trained, measured and exported
    tail: list[str]  # the last lines of what it printed, where it failed


def make_verifier(folder: Path) -> None:
    """A Llama of eight layers and width 64 whose tokens are characters."""
    import torch
    from tokenizers import Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import WordLevel
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    tokens = [*SPECIAL, "\n", *map(chr, range(32, 127))]
    core = Tokenizer(WordLevel({token: i for i, token in enumerate(tokens)}, unk_token=SPECIAL[0]))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    core.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        unk_token=SPECIAL[0],
        bos_token=SPECIAL[1],
        eos_token=SPECIAL[2],
        pad_token=SPECIAL[2],
        chat_template=TEMPLATE,
    )
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def write_rows(folder: Path) -> None:
    """24 short conversations, and two prompts to measure with."""
    rows = []
    for i in range(24):
        answer = " ".join(map(str, range(5 + i % 7))) + " done"
        turns = [
            {"role": "user", "content": f"count to {i % 7}"},
            {"role": "assistant", "content": answer},
        ]
        rows.append({"id": f"c{i}", "messages": turns})
    prompts = [{"id": f"p{i}", "task": "count", "turns": [f"count to {i}"]} for i in (3, 4)]
    for name, lines in (("answers.jsonl", rows), ("prompts.jsonl", prompts)):
        (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines))


def command(folder: Path, ranks: int) -> list[str]:
    return [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={ranks}",
        str(ROOT / "train" / "main.py"),
        f"verifier.path={folder / 'verifier'}",
        f"data.path={folder / 'answers.jsonl'}",
        f"eval.prompts={folder / 'prompts.jsonl'}",
        f"run.root={folder / 'runs'}",
        f"run.cache={folder / 'cache'}",
        f"run.name={NAME}",
        f"optim.packs_per_step={2 * ranks}",
        *SETTINGS,
    ]


def smoke(folder: Path, ranks: int) -> Smoke:
    """Make everything in ``folder``, which is empty, and run the job through torchrun."""
    start = time.perf_counter()
    (folder / "verifier").mkdir()
    make_verifier(folder / "verifier")
    write_rows(folder)
    quiet = {"HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled", "TOKENIZERS_PARALLELISM": "false"}
    try:
        done = subprocess.run(
            command(folder, ranks),
            cwd=folder,
            env={**os.environ, **quiet},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=PATIENCE,
        )
    except subprocess.TimeoutExpired:
        return Smoke(PATIENCE, f"not at its end after {PATIENCE:g} s", [])
    problem = problem_of(folder / "runs" / NAME, done.returncode)
    tail = [] if problem is None else done.stdout.splitlines()[-20:]
    return Smoke(time.perf_counter() - start, problem, tail)


def problem_of(run: Path, code: int) -> str | None:
    """What is wrong with a finished run: its exit code, or something that it should have left."""
    if code:
        return f"torchrun ended with exit code {code}"
    report = run / "eval" / "report.json"
    for path in (run / "best" / "draft.json", report, run / "export" / "vllm" / "config.json"):
        if not path.is_file():
            return f"{path.relative_to(run.parent)} is missing"
    checked = json.loads(report.read_text())["lossless"]
    if not checked["checked"] or checked["identical"] != checked["checked"]:
        return f"{checked['identical']} of {checked['checked']} answers are the verifier's own"
    return None
