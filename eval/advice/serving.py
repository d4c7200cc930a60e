"""What a stack needs to know: the line that starts it, what it cannot do, and its rollback.

Read in vLLM 0.32.0 (its source, run on a CPU) and in SGLang's sources and documentation of 2025 and
2026 (not run). EAGLE-3 came to vLLM with pull request 16937 and to SGLang with 0.4.4.
"""

import json
from dataclasses import dataclass
from shlex import quote

from packaging.version import InvalidVersion, Version

from conf.schema import ConfigError
from conf.shapes import DynamicShape, parse_shape
from eval.advice.candidates import Candidate
from eval.advice.families import EAGLE1, EAGLE3, MEDUSA, Family
from eval.advice.question import Question, Stack
from models.drafts import AnyConfig
from models.eagle1 import Eagle1Config
from models.eagle3 import DraftConfig
from models.phrases import PhraseConfig
from models.small_model import ModelConfig

READ = {Stack.vllm: "0.32.0", Stack.sglang: "0.5.23"}
FIRST = {Stack.vllm: "0.8.5", Stack.sglang: "0.4.4"}  # with EAGLE-3
DRAWN_DRAFTS = "0.21"  # vLLM: draft_sample_method; before it drafts are the argmax
IN_THE_LOOP = (EAGLE3, EAGLE1, MEDUSA)  # families that are trained here, measured, and exported
OTHERS = ModelConfig | PhraseConfig  # of drafts that a report can be of, too
NORMS = "0.22"  # vLLM: fc_norm and norm_output of a head


@dataclass(frozen=True)
class Place:
    """What the line names."""

    verifier: str
    head: str
    run: str
    config: AnyConfig | None  # of the head, if its folder is there
    export: str | None = None  # the command that writes ``head``; None where it is written


@dataclass(frozen=True)
class Serving:
    stack: str
    version: str
    before: str | None  # a command that must run first
    line: str
    notes: list[str]


def version_of(question: Question) -> str:
    """The version asked for. Raises ConfigError for one that is none, or of a stack without."""
    if question.stack is Stack.eyrie:
        if question.version:
            raise ConfigError(
                f"--stack-version={question.version}: Eyrie's loop is the one of this checkout; "
                "leave it out"
            )
        return "this checkout"
    try:
        return str(Version(question.version or READ[question.stack]))
    except InvalidVersion as error:
        raise ConfigError(
            f"--stack-version={question.version}: not a version; try {READ[question.stack]}"
        ) from error


def why_not(stack: Stack, version: str, place: Place, family: Family) -> str | None:
    """Why this stack cannot serve the head, in a sentence; None when it can."""
    lacking = lacks_family(stack, version, place, family)
    if lacking or stack is Stack.eyrie or family is not EAGLE3:
        return lacking
    if Version(version) < Version(FIRST[stack]):
        return (
            f"{stack.value} {version} has no EAGLE-3, which came with {FIRST[stack]}: update it; "
            "EAGLE-1 or EAGLE-2 would need a head of their own, trained anew"
        )
    head = place.config
    if not isinstance(head, DraftConfig):
        return None
    if stack is Stack.vllm and (head.fc_norm or head.norm_output) and older(version, NORMS):
        return (
            f"vllm {version} does not read the head's fc_norm or norm_output: use {NORMS} or later"
        )
    if stack is Stack.sglang and head.qk_norm:
        return (
            "SGLang has no draft class that reads the head's qk_norm; serve it with vLLM, or train "
            "one with draft.qk_norm=false"
        )
    if stack is Stack.sglang and head.layers > 1:
        return (
            f"SGLang does not read the head's {head.layers} layers by their names; serve it with "
            "vLLM, or train one with draft.layers=1"
        )
    if stack is Stack.sglang and (head.norm_before_residual or head.norm_before_fc):
        return (
            "SGLang ignores the head's norm_before_residual or norm_before_fc, so it would accept "
            "little; serve it with vLLM, or train one with both false"
        )
    return None


def lacks_family(stack: Stack, version: str, place: Place, family: Family) -> str | None:
    """Why drafts of this family do not run there; a draft that was measured runs in our loop."""
    if stack is Stack.eyrie and family not in IN_THE_LOOP and not isinstance(place.config, OTHERS):
        return (
            "Eyrie's loop runs EAGLE-3, EAGLE-1 and Medusa heads alone, and a "
            f"{family.name} is advised: name a stack"
        )
    if stack is not Stack.sglang:
        return None
    if not family.sglang:
        return f"SGLang {version} serves no {family.name} heads: serve them with vLLM"
    if isinstance(place.config, Eagle1Config | ModelConfig):
        return f"a draft of the family {family.name} is exported for vLLM alone: serve it with that"
    return None


def older(version: str, than: str) -> bool:
    return Version(version) < Version(than)


def serve(question: Question, place: Place, family: Family, pick: Candidate, rule: str) -> Serving:
    """The line that starts the stack with ``pick``."""
    version = version_of(question)
    if question.stack is Stack.vllm:
        line, notes = vllm_line(version, place, family, pick.depth, rule)
        notes.append(f"The advice is for {at_once(question.batch)}: --max-num-seqs caps it.")
    elif question.stack is Stack.sglang:
        line, notes = sglang_line(place, family, pick, rule)
        notes.append(
            f"The advice is for {at_once(question.batch)}: --max-running-requests caps it."
        )
    else:
        line, notes = eyrie_line(place, pick, question), []
    written = family in IN_THE_LOOP or isinstance(place.config, Eagle1Config | ModelConfig)
    exported = written and question.stack is not Stack.eyrie
    if exported and not place.config:
        notes.append(
            "The head's folder was not found, so its flags were not compared with the stack."
        )
    before = place.export if exported else None
    return Serving(question.stack.value, version, before, line, notes)


def for_draws(stack: Stack, rule: str) -> list[str]:
    """What a server for greedy requests needs besides, to sample as ``rule`` was measured."""
    knobs = {
        Stack.vllm: '"draft_sample_method": "probabilistic" in the config',
        Stack.sglang: "--speculative-use-rejection-sampling",
    }
    if rule != "rejection" or stack not in knobs:
        return []
    return [
        f"Above temperature 0 the gate holds for drawn drafts: with {knobs[stack]}. Without it "
        "drafts are the argmax, whose acceptance is another (eval.rule=argmax_draft measures it)."
    ]


def at_once(batch: int) -> str:
    return "one sequence at a time" if batch == 1 else f"{batch} sequences at once"


def plain_line(question: Question, place: Place) -> Serving:
    """Without speculation."""
    lines = {
        Stack.vllm: f"vllm serve {quote(place.verifier)}",
        Stack.sglang: f"python -m sglang.launch_server --model-path {quote(place.verifier)}",
        Stack.eyrie: "plain decoding",
    }
    return Serving(question.stack.value, version_of(question), None, lines[question.stack], [])


def vllm_line(
    version: str, place: Place, family: Family, depth: int, rule: str
) -> tuple[str, list[str]]:
    config: dict[str, str | int] = {"method": family.vllm}
    notes = [f"Chains alone: no tree of guesses in vLLM {READ[Stack.vllm]}."]
    if isinstance(place.config, DraftConfig) and place.config.qk_norm:
        notes.append("The head's qk_norm needs vLLM's pull request 43132.")
    if family.drafts_with_model:
        config["model"] = place.head
    config["num_speculative_tokens"] = depth
    if family.vllm == "ngram":
        config |= {"prompt_lookup_min": 1, "prompt_lookup_max": 3}
    if rule == "rejection" and family is MEDUSA:
        notes.append(
            "vLLM's Medusa heads give their likeliest tokens at any temperature: acceptance is "
            "that of argmax_draft, not of rejection; ask again with --accept argmax_draft."
        )
    elif rule == "rejection" and older(version, DRAWN_DRAFTS):
        notes.append(
            f"vLLM before {DRAWN_DRAFTS} drafts its argmax at any temperature: acceptance is that "
            "of argmax_draft, not of rejection; ask again with --accept argmax_draft."
        )
    elif rule == "rejection":
        config["draft_sample_method"] = "probabilistic"
        notes.append("Drafts are drawn, as the acceptance was measured; the default is the argmax.")
    elif rule == "argmax_draft":
        notes.append("Drafts are the argmax, which is the default and what was measured.")
    text = quote(json.dumps(config))
    return f"vllm serve {quote(place.verifier)} --speculative-config {text}", notes


def sglang_line(place: Place, family: Family, pick: Candidate, rule: str) -> tuple[str, list[str]]:
    shape = parse_shape(pick.shape, "eval.trees")
    top_k = shape.top_k if isinstance(shape, DynamicShape) else 1
    words = [
        f"python -m sglang.launch_server --model-path {quote(place.verifier)}",
        f"--speculative-algorithm {family.sglang}",
    ]
    if family.drafts_with_model:
        words.append(f"--speculative-draft-model-path {quote(place.head)}")
    if family.sglang != "NGRAM":
        words.append(f"--speculative-num-steps {pick.depth} --speculative-eagle-topk {top_k}")
    words.append(f"--speculative-num-draft-tokens {pick.nodes + 1}")  # the root counts there
    notes = ["Read in SGLang's source, not run."]
    if family is EAGLE3:
        notes = [
            "The folder that --to vllm exports serves SGLang, too: read in its source, not run."
        ]
    if rule == "rejection" and top_k == 1:
        words.append("--speculative-use-rejection-sampling")
        notes.append(
            "Rejection by drawn drafts came with SGLang's pull request 26312: a version without "
            "that option verifies one-hot; ask again with --accept argmax_draft."
        )
    head = place.config
    if isinstance(head, DraftConfig) and (head.fc_norm or head.norm_output):
        notes.append("The head's fc_norm or norm_output needs SGLang's pull request 24663.")
    return " ".join([*words, "--enable-metrics"]), notes


def eyrie_line(place: Place, pick: Candidate, question: Question) -> str:
    """Eyrie is no server: the line times the pick with its own loop."""
    shape = (
        f"eval.n_sweep=[{pick.nodes}]" if pick.is_chain else quote(f'eval.trees=["{pick.shape}"]')
    )
    return f"python -m eval.main run.name={place.run} {shape} eval.batch_sizes=[{question.batch}]"


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
