"""What the page says in words: how it was measured, what it does not say, how to do it again."""

import re
import shlex
from dataclasses import fields
from enum import Enum
from typing import Any

from conf.schema import EvalSection
from data.eval_prompts import UNSEEN
from eval.report import DataOrigin, EvalReport
from eval.tables import Block, Bullets, Command, shown

PLAIN_WORD = re.compile(r"[\w./:+-]+")  # Hydra takes it without quotes


def how(report: EvalReport) -> Bullets:
    settings, data, section = report.settings, report.data, report.settings.eval
    answers = "greedy" if section.temperature == 0 else f"temperature {section.temperature:g}"
    return Bullets(
        [
            f"Accept rule {settings.accept_rule}, {answers}, chains of {section.n_draft} drafts, "
            f"up to {section.max_new_tokens} new tokens. τ, α and counters: "
            f"{settings.counters_dtype}. Speed: {section.speed_dtype.value}, batch "
            f"{', '.join(map(str, report.by_batch))}.",
            "A round is one verifier forward over drafts; prefill and the token it gives belong to "
            "none. Counters are taken before the cut at the end of an answer. Later turns of a "
            "conversation follow the verifier's own answers; all turns count.",
            f"Head {settings.draft}, verifier {settings.verifier} (states after "
            f"{', '.join(map(str, settings.aux_layers))} layers, attention {settings.attention}), "
            f"{settings.device}, threads: {settings.threads}.",
            f"Prompts: {', '.join(data.prompt_files)}, {data.prompts_read} read; of those measured "
            f"{data.same_pattern_prompts} use patterns of the training prompts with new content, "
            f"{data.unseen_pattern_prompts} use patterns never seen. The answers are the "
            "verifier's. A prompt that stands in several files is scored once.",
            f"Head and n-gram table trained on {data.training_samples} samples of "
            f"{', '.join(data.training_files)}, the longest of {data.longest_training_sample} "
            f"tokens; {data.held_out_samples} held out, τ there {shown(data.held_out_tau)}. "
            + learnt_from(data),
            f"Intervals: bootstrap over prompts, {section.bootstrap} resamples.",
            f"Code {report.provenance.get('git')}, torch "
            f"{report.provenance.get('packages', {}).get('torch')}.",
            *differing(report),
        ]
    )


def learnt_from(data: DataOrigin) -> str:
    """How much was supervised, and whether the answers are the verifier's (near 1) or foreign."""
    tokens, share = data.supervised_tokens, data.verifier_agreement
    many = "not recorded" if tokens is None else tokens
    agreed = "not recorded" if share is None else shown(share)
    return f"Supervised tokens: {many}; share that is the verifier's own top choice: {agreed}."


def differing(report: EvalReport) -> list[str]:
    groups = [report.lossless, *([report.tasks[UNSEEN].lossless] if UNSEEN in report.tasks else [])]
    return [
        f"{one.prompt} differs from plain decoding at token {one.position}; the worse of the two "
        f"tokens is {one.behind:.2e} below the verifier's highest logit there"
        for kept in groups
        for one in kept.differing
    ]


def limits(report: EvalReport) -> Bullets:
    settings, sizes = report.settings, sorted(report.by_batch)
    measured = ", ".join(map(str, sizes))
    return Bullets(
        [
            f"The speeds at the top hold for batch {sizes[0]} on this machine ({settings.device}); "
            f"batch {measured} was timed. On a busy server a step is bound by arithmetic, "
            "verifying several tokens costs more than one, and the speed-up shrinks; on another "
            "device c and v differ.",
            "They hold for prompts like these. Other patterns, other languages and longer answers "
            "are accepted less often.",
            f"Best N = {settings.best_n} and best shape {settings.best_shape} were chosen on the "
            "same runs whose speed-up is quoted.",
            "They say nothing of the quality of answers: an exact accept rule leaves those as the "
            "verifier's.",
            "An interval covers the choice of prompts, not another machine or another training.",
        ]
    )


def reproduce(report: EvalReport) -> list[Block]:
    run = report.settings.run
    return [
        "On the run that this head came from, with the settings that differ from Eyrie's own:",
        Command(command(run, report.settings.eval)),
        "The next step is advice on N, tree, batch and the server's settings; two heads are "
        "compared by their reports. report.json holds all figures, and the raw counters and times "
        "of every prompt (by_prompt, timings).",
        Command("python -m eval.tune"),
        Command(f"python -m eval.compare {run_report(run)} OTHER/eval/report.json"),
    ]


def run_report(run: str) -> str:
    return shlex.quote(f"runs/{run}/eval/report.json")


def command(run: str, section: EvalSection) -> str:
    """eval.main with every knob of ``section`` that is not the schema's default."""
    default = EvalSection()
    words = [f"run.name={in_hydra(run)}"]
    for one in fields(EvalSection):
        value = getattr(section, one.name)
        if value != getattr(default, one.name):
            words.append(f"eval.{one.name}={in_hydra(value)}")
    return " ".join(["python -m eval.main", *map(shlex.quote, words)])


def in_hydra(value: Any) -> str:
    """As Hydra's grammar reads it back."""
    if value is None:
        return "null"
    if isinstance(value, Enum):
        return in_hydra(value.value)
    if isinstance(value, list | tuple):
        return f"[{','.join(map(in_hydra, value))}]"
    if isinstance(value, str) and not PLAIN_WORD.fullmatch(value):
        inside = value.replace('"', '\\"')
        return f'"{inside}"'
    return str(value)
