"""What becomes of rejected guesses in the cache: where each stack does it, and in batches."""

from eval.question import Stack

COMMON = (
    "The token emitted last has no cache entry yet: it is the root of the next round, whatever was "
    "accepted."
)
PLANS = {
    Stack.eyrie: [
        "By logical length: models/kv.py holds one length a sequence, writes guesses beyond it and "
        "advances by what stands; the rest is overwritten. No copy for chains.",
        "On a tree the accepted path's rows are moved together before the length advances.",
        "In a batch every sequence has a length of its own, so one rejecting at 2 while another "
        "accepts all costs nothing beyond the shared forward. The draft's cache of guesses is "
        "dropped each round and rebuilt from the verifier's states.",
    ],
    Stack.vllm: [
        "By block table: the scheduler allots slots for the guesses ahead (num_lookahead_tokens, "
        "v1/core/sched/scheduler.py); after sampling it takes the rejected ones off the request's "
        "num_computed_tokens, the blocks stay and their slots are overwritten.",
        "In a batch v1/sample/rejection_sampler.py judges all requests at once, each with its own "
        "number of guesses; the lengths part per request. Read in version 0.32.0.",
        "After verification the draft runs over the accepted rows with the verifier's states and "
        "overwrites its own guessed entries.",
    ],
    Stack.sglang: [
        "By token slots: speculative/eagle_info.py frees the slots of rejected guesses in the "
        "token-to-KV pool after verification; with pages and top-k above 1 it first moves the "
        "accepted entries together, with pages and top-k 1 it frees whole pages alone.",
        "In a batch seq_lens grows per request by its accepted guesses and one. Read in the source "
        "of 2026, not run.",
    ],
}


def plan_of(stack: Stack) -> list[str]:
    return [*PLANS[stack], COMMON]


FORBIDDEN = {
    Stack.eyrie: ["eval.rule takes exact rules alone: there is nothing to switch off."],
    Stack.vllm: [
        "rejection_sample_method stays standard: synthetic accepts guesses unseen by the verifier "
        "and is for benchmarks.",
    ],
    Stack.sglang: [
        "--speculative-accept-threshold-single and --speculative-accept-threshold-acc stay 1.0: "
        "anything lower accepts guesses that the verifier would not draw.",
        "Where the tree sampling kernel is missing (AMD builds) SGLang falls back to greedy "
        "verification at any temperature, with a warning in its log: do not sample there.",
    ],
}
