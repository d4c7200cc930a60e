"""Hidden states of a real vLLM on a CPU, in the files that its connector would leave on a GPU.

Runs in vLLM's own environment. Standard input is JSON: ``runner`` (the path of vllm_runner.py,
whose engine arguments are used), its ``settings``, and ``prompts``, lists of token ids.
"""

import importlib.util
import json
import os
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

request = json.load(sys.stdin)
spec = importlib.util.spec_from_file_location("runner", request["runner"])
runner = importlib.util.module_from_spec(spec)
spec.loader.exec_module(runner)

# In one process its model runner can be reached.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
os.environ["VLLM_NO_USAGE_STATS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["OMP_NUM_THREADS"] = "1"

from vllm import LLM, SamplingParams  # noqa: E402  the engine reads the environment

given = runner.engine_arguments(request["settings"])
del given["kv_transfer_config"], given["gpu_memory_utilization"]
llm = LLM(**given, enforce_eager=True, max_num_seqs=4)
engine = llm.llm_engine.engine_core.engine_core
drafter = engine.model_executor.driver_worker.worker.model_runner.drafter
propose, seen = drafter.propose, []


def recorded(*args, **kwargs):
    seen.append([rows.clone() for rows in kwargs["target_hidden_states"]])
    return propose(*args, **kwargs)


drafter.propose = recorded
for number, ids in enumerate(request["prompts"]):
    seen.clear()
    llm.generate([{"prompt_token_ids": ids}], SamplingParams(temperature=0.0, max_tokens=1))
    (streams,) = seen
    rows = torch.stack(streams, 1)[: len(ids)]  # as the proposer stacks them: [T, A+1, D]
    path = Path(request["settings"]["folder"]) / f"{number}.safetensors"
    save_file({"hidden_states": rows, "token_ids": torch.tensor(ids)}, path)
