"""What real vLLM does with a head. Runs in vLLM's own environment; imports nothing of Eyrie.

    .venv-vllm/bin/python tests/launch/vllm_probe.py FOLDER < requests

Standard input names the runs, a line of JSON each (tests/launch/vllm_process.py writes them):

    name         of the run
    model        folder that vLLM opens: a verifier, or a head that names its own
    speculative  vLLM's speculative_config, or null
    watch        record the draft's first pass; needs a draft
    prompts      token ids
    max_tokens   of an answer
    stop         token ids that end one; no others do
    dtype        float32 or bfloat16
    max_length   of a prompt with its answer

Each leaves FOLDER/<name>.json: the greedy token ids and the counters of these prompts alone. A run
that watches leaves FOLDER/<name>.safetensors before, of the first prompt's prefill: the verifier's
states, the input and output of ``fc``, the draft's input ids and positions, and the logits of its
first guess.
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
SIDE_BY_SIDE = 4  # requests
BLOCKS = 64  # of 128 tokens; a whole GiB of them takes a second to clear


def load(request: dict) -> LLM:
    return LLM(
        request["model"],
        dtype=request["dtype"],
        max_model_len=request["max_length"],
        max_num_seqs=SIDE_BY_SIDE,
        num_gpu_blocks_override=BLOCKS,
        enforce_eager=True,
        enable_prefix_caching=False,
        disable_log_stats=False,
        speculative_config=request["speculative"],
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
    compute = draft.compute_logits

    def recorded_logits(hidden_states):
        logits = compute(hidden_states)
        keep("logits", logits)
        return logits

    draft.compute_logits = recorded_logits
    if combine := getattr(draft, "combine_hidden_states", None):  # EAGLE-1 has none

        def recorded_states(hidden_states):
            keep("aux", hidden_states)
            return combine(hidden_states)

        draft.combine_hidden_states = recorded_states
    return seen


def answer(llm: LLM, prompts: list[list[int]], max_tokens: int, stop: list[int]) -> list[list[int]]:
    greedy = SamplingParams(
        temperature=0.0, max_tokens=max_tokens, ignore_eos=True, stop_token_ids=stop
    )
    requests = [{"prompt_token_ids": ids} for ids in prompts]
    outputs = llm.generate(requests, greedy, use_tqdm=False)
    return [list(out.outputs[0].token_ids) for out in outputs]


def run(request: dict, folder: Path) -> dict:
    gc.freeze()  # an engine collects a dozen times: to search all that is imported took it 4 s
    llm = load(request)
    prompts = request["prompts"]
    if request["watch"]:
        seen = watch(llm)
        answer(llm, prompts[:1], 2, [])
        save_file(seen, folder / f"{request['name']}.safetensors")
    before = counters(llm)
    tokens = answer(llm, prompts, request["max_tokens"], request["stop"])
    after = counters(llm)
    del llm
    gc.collect()
    cleanup_dist_env_and_memory()
    moved = {k: [b - a for a, b in zip(before[k], after[k], strict=True)] for k in after}
    return {"tokens": tokens, "counters": moved}


def main() -> None:
    folder = Path(sys.argv[1])
    for line in sys.stdin:
        request = json.loads(line)
        found = run(request, folder)
        whole = folder / f".{request['name']}.json"
        whole.write_text(json.dumps(found))
        whole.rename(folder / f"{request['name']}.json")  # it is there once it is complete


if __name__ == "__main__":
    main()
