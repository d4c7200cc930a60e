"""What real vLLM does with a head. Runs in vLLM's own environment; imports nothing of Eyrie.

    .venv-vllm/bin/python tests/launch/vllm_probe.py FOLDER < runs

FOLDER/request.json names the verifier, the prompts (token ids), ``max_tokens`` and ``n_draft``.
Standard input names the runs, a line of JSON each: {"name": ..., "head": folder or null}, null for
vLLM without a draft. Each leaves FOLDER/<name>.json: the greedy token ids and the counters of
these prompts alone. A run with a head also leaves FOLDER/<name>.safetensors, of the first prompt's
prefill: the verifier's states, the input and output of ``fc``, the draft's input ids and
positions, and the logits of its first guess.
"""

import os

# In one process the drafter can be reached, and loading takes 11 s in place of 24 to 80.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
os.environ["VLLM_NO_USAGE_STATS"] = "1"
os.environ["VLLM_LOGGING_LEVEL"] = "WARNING"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["OMP_NUM_THREADS"] = "1"

import gc
import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory

COUNTERS = "vllm:spec_decode_num_"
MAX_MODEL_LEN = 512


def load(verifier: str, head: str | None, n_draft: int) -> LLM:
    speculative = {"method": "eagle3", "model": head, "num_speculative_tokens": n_draft}
    return LLM(
        verifier,
        dtype="float32",
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=4,
        enforce_eager=True,
        enable_prefix_caching=False,
        disable_log_stats=False,
        speculative_config=speculative if head else None,
    )


def counters(llm: LLM) -> dict[str, list[int]]:
    """Speculation counters so far, warm-up requests included; empty without a draft."""
    found = {}
    for metric in llm.get_metrics():
        if metric.name.startswith(COUNTERS):
            values = getattr(metric, "values", None) or [metric.value]
            found[metric.name.removeprefix(COUNTERS)] = [int(value) for value in values]
    return found


def watch(llm: LLM) -> dict[str, torch.Tensor]:
    """Record the drafter's first pass from now on."""
    engine = llm.llm_engine.engine_core.engine_core
    draft = engine.model_executor.driver_worker.worker.model_runner.drafter.model
    seen: dict[str, torch.Tensor] = {}

    def keep(name: str, value: torch.Tensor) -> None:
        if name not in seen:
            seen[name] = value.detach().clone().contiguous()

    def on_fc(_module, args, output):
        keep("fc_input", args[0])
        keep("fc_output", output)

    def on_draft(_module, args, kwargs):
        keep("input_ids", kwargs["input_ids"])
        keep("positions", kwargs["positions"])

    draft.model.fc.register_forward_hook(on_fc)
    draft.register_forward_pre_hook(on_draft, with_kwargs=True)
    compute, combine = draft.compute_logits, draft.combine_hidden_states

    def recorded_logits(hidden_states):
        logits = compute(hidden_states)
        keep("logits", logits)
        return logits

    def recorded_states(hidden_states):
        keep("aux", hidden_states)
        return combine(hidden_states)

    draft.compute_logits = recorded_logits
    draft.combine_hidden_states = recorded_states
    return seen


def answer(llm: LLM, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
    greedy = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    requests = [{"prompt_token_ids": ids} for ids in prompts]
    outputs = llm.generate(requests, greedy, use_tqdm=False)
    return [list(out.outputs[0].token_ids) for out in outputs]


def run(request: dict, name: str, head: str | None, folder: Path) -> dict:
    llm = load(request["verifier"], head, request["n_draft"])
    prompts = request["prompts"]
    if head:
        seen = watch(llm)
        answer(llm, prompts[:1], 2)
        save_file(seen, folder / f"{name}.safetensors")
    before = counters(llm)
    tokens = answer(llm, prompts, request["max_tokens"])
    after = counters(llm)
    del llm
    gc.collect()
    cleanup_dist_env_and_memory()
    moved = {k: [b - a for a, b in zip(before[k], after[k], strict=True)] for k in after}
    return {"tokens": tokens, "counters": moved}


def main() -> None:
    folder = Path(sys.argv[1])
    request = json.loads((folder / "request.json").read_text())
    for line in sys.stdin:
        wanted = json.loads(line)
        found = run(request, wanted["name"], wanted["head"], folder)
        (folder / f"{wanted['name']}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
