"""The library's own ways to answer: ``generate``, and with a small model that guesses for it."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers.generation.stopping_criteria import StoppingCriteriaList, StopStringCriteria
from transformers.modeling_utils import PreTrainedModel

from conf.schema import ConfigError, VerifierSection
from eval.decode import DecodeSettings
from eval.output import Output
from eval.speed_report import Timing
from eval.timed import Question, Run, digest_of
from models.facts import load_tokenizer
from models.placement import Placement, place
from models.sampling import Sampling
from models.steps import now
from models.token_strings import token_strings
from models.verifier import Verifier


def library_answers(
    verifier: Verifier,
    assistant: PreTrainedModel | None,
    group: Sequence[Question],
    settings: DecodeSettings,
    name: str,
) -> Run:
    """``generate`` with its own cache, under the same limits and sampling; timed as a whole.

    The batch is padded on the left and masked there, as the library wants it. Tokens count up to
    each sequence's own end: what fills a row up after it does not.
    """
    device, start = verifier.device, now(verifier.device)
    rows = generate(verifier, assistant, [one.ids for one in group], settings)
    seconds = now(device) - start
    verifier.forget()
    answers = [cut(verifier, one.ids, row, settings) for one, row in zip(group, rows, strict=True)]
    timing = Timing(
        batch=len(group),
        method=name,
        prompts=[one.id for one in group],
        digest=digest_of(group),
        tokens=sum(map(len, answers)),
        first_tokens=len(group),
        prefill_seconds=0.0,
        decode_seconds=seconds,
    )
    return Run(timing, [])


def generate(
    verifier: Verifier,
    assistant: PreTrainedModel | None,
    prompts: Sequence[list[int]],
    settings: DecodeSettings,
) -> list[list[int]]:
    """The rows that the library adds to each prompt, with what it fills them up with."""
    longest = max(map(len, prompts))
    padding = [longest - len(ids) for ids in prompts]
    ends = list(settings.eos_ids) or None
    filler = ends[0] if ends else 0
    ids = [[filler] * left + one for left, one in zip(padding, prompts, strict=True)]
    seen = [[0] * left + [1] * len(one) for left, one in zip(padding, prompts, strict=True)]
    answer: Any = verifier.model.generate  # a mixin's method, which the library types loosely
    output = answer(
        torch.tensor(ids, device=verifier.device),
        attention_mask=torch.tensor(seen, device=verifier.device),
        max_new_tokens=settings.max_new_tokens,
        use_cache=True,
        eos_token_id=ends,
        pad_token_id=filler,
        stopping_criteria=stopping_of(settings),
        assistant_model=assistant,
        **library_sampling(settings.sampling),
    )
    return output[:, longest:].tolist()


def stopping_of(settings: DecodeSettings) -> StoppingCriteriaList:
    """Its own check of stop strings; named to ``generate`` they reach the assistant, which has no
    tokenizer to read them with."""
    stop = settings.stop
    found = [StopStringCriteria(stop.tokenizer, list(stop.texts))] if stop else []
    return StoppingCriteriaList(found)


def cut(
    verifier: Verifier, prompt: list[int], row: list[int], settings: DecodeSettings
) -> list[int]:
    """A row up to where our own loop ends the answer."""
    output = Output(prompt, settings.ends, verifier.facts.max_positions)
    output.emit(row)
    return output.tokens


def library_sampling(sampling: Sampling) -> dict[str, float | bool | None]:
    """Spelled out, so that a model's own generation defaults do not enter the comparison."""
    neutral: dict[str, float | bool | None] = {"repetition_penalty": 1.0, "num_beams": 1}
    if sampling.greedy:
        off = {"temperature": 1.0, "top_k": 50, "top_p": 1.0, "min_p": None}
        return {**neutral, "do_sample": False, **off}
    return {
        **neutral,
        "do_sample": True,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p or None,
    }


def load_assistant(
    path: str, section: VerifierSection, cache: Path, verifier: Verifier
) -> PreTrainedModel:
    """The small model in ``path``, as the verifier is loaded.

    Raises ConfigError when it is not there or has other tokens than the verifier.
    """
    own = replace(section, path=path)
    model = place(own, cache, verifier.dtype, verifier.device, Placement.whole)
    refuse_other_assistant(path, model, own, cache, verifier)
    return model.eval().requires_grad_(False)


def refuse_other_assistant(
    path: str, model: PreTrainedModel, section: VerifierSection, cache: Path, verifier: Verifier
) -> None:
    """The library compares ids, so they must mean the same on both sides."""
    rows = [one.config.get_text_config().vocab_size for one in (model, verifier.model)]
    theirs = token_strings(load_tokenizer(section, cache))
    ours = token_strings(verifier.tokenizer)
    pairs = enumerate(zip(theirs, ours, strict=False))
    found = next(
        (f"token {i} is {a!r} and the verifier's {b!r}" for i, (a, b) in pairs if a != b), ""
    )
    if not found and (rows[0] != rows[1] or len(theirs) != len(ours)):
        found = (
            f"it has {len(theirs)} tokens in {rows[0]} rows, the verifier {len(ours)} in {rows[1]}"
        )
    if found:
        raise ConfigError(
            f"eval.assistant={path}: {found}; the library's assisted generation is timed with a "
            "model of the verifier's own tokenizer, give one or leave it null"
        )
