"""A vLLM that leaves hidden states in files. Runs in vLLM's own Python; imports nothing of Eyrie.

    python vllm_runner.py SETTINGS

SETTINGS is JSON: ``model``, ``layers`` (n: the stream after n decoder layers, ascending),
``folder`` (where the files go) and ``arguments`` (more of them, for vllm.LLM). Each line on
standard input is JSON, a list of sequences of token ids; the answer on standard output is a line
with the list of their files, in the same order. All else that is printed goes to standard error.
"""

import json
import os
import sys
from typing import IO

sys.path[0:1] = []  # this folder, whose modules must not stand before installed ones
# The connector writes a file one step after its request has ended. In a process of its own the
# engine takes that step; inside this one it would wait for the next request.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"


def engine_arguments(settings: dict) -> dict:
    """What vllm.LLM is given: hidden states are a speculative method, a connector writes them.

    A prefix that is found in the cache is not computed, so it would have no states of its own.
    """
    return {
        "model": settings["model"],
        "enable_prefix_caching": False,
        "speculative_config": {
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {
                "hf_config": {"eagle_aux_hidden_state_layer_ids": settings["layers"]}
            },
        },
        "kv_transfer_config": {
            "kv_connector": "ExampleHiddenStatesConnector",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {"shared_storage_path": settings["folder"]},
        },
        **settings["arguments"],
    }


def say(answers: IO[str], value: object) -> None:
    answers.write(json.dumps(value) + "\n")
    answers.flush()


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM logs on standard output, and so do the processes that it starts
    from vllm import LLM, SamplingParams  # pyright: ignore[reportMissingImports]

    engine = LLM(**engine_arguments(json.loads(sys.argv[1])))
    one_token = SamplingParams(temperature=0.0, max_tokens=1, detokenize=False)
    say(answers, "ready")
    for line in sys.stdin:
        prompts = [{"prompt_token_ids": ids} for ids in json.loads(line)]
        outputs = engine.generate(prompts, one_token, use_tqdm=False)
        paths = [output.kv_transfer_params["hidden_states_path"] for output in outputs]
        say(answers, paths)


if __name__ == "__main__":
    main()
