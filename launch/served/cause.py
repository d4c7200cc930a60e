"""Why a server accepts other shares than the report: each cause with the evidence that shows it.

What to look for is from users' reports: heads that were not in use, exported with absolute ids,
for other layers, trained on another template, or measured on another verifier or precision.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from eval.acceptance import Counters, total
from eval.report import EvalReport
from launch.served.compare import TOLERANCE, Comparison, share
from launch.served.evidence import HeadSide, ServerSide, TemplateSide
from launch.served.run import Question, Served, Talked
from models.verifier import VerifierFacts

NEAR_ZERO = 0.1  # of our survival at the first position
SWITCHED_OFF = 0.1  # share of the tokens that came from steps without guesses
SHORT = 0.9  # guesses a round, of those the server may make


@dataclass(frozen=True)
class Cause:
    text: str
    mend: str  # what to do or run next
    fault: bool = True  # false: not by itself wrong, named where figures lie apart alone


@dataclass(frozen=True)
class Evidence:
    run: Path
    report: EvalReport
    facts: VerifierFacts
    trained_dtype: str  # of the states that the head learnt from
    own_quantisation: str | None  # of the verifier that it learnt from
    questions: Sequence[Question]
    served: Served
    comparison: Comparison
    head: HeadSide
    server: ServerSide
    template: TemplateSide
    by_chat: bool

    @property
    def export(self) -> str:
        return f"python -m launch.export {self.run}/best --to vllm"


def find_causes(evidence: Evidence) -> list[Cause]:
    """The gravest first; where figures lie apart there is one at least."""
    found = [cause for look in LOOKS for cause in look(evidence)]
    return found or ([unknown(evidence)] if evidence.comparison.large else [])


def unknown(e: Evidence) -> Cause:
    exact = e.report.settings.counters_dtype
    if e.server.dtype == exact:
        mend = f"python -m launch.export --check {e.head.folder} --verifier {e.facts.path}"
    else:
        mend = f"python -m launch.serve_check {e.run} --dtype {exact}, on a server of its own"
    return Cause("none found by what this command can look at", mend)


def not_in_use(e: Evidence) -> Iterator[Cause]:
    if not e.served.positions:
        yield Cause(
            "the server has no speculative counters: it runs without the head",
            "start it with --speculative-config, as the card in the exported folder says",
        )
    elif not e.comparison.theirs.rounds:
        yield Cause(
            "the server's speculative counters did not move: the head is loaded and not in use",
            "see its log for why speculation is off; another replica may have answered",
        )


def switched_off(e: Evidence) -> Iterator[Cause]:
    """Tokens that no round accounts for came from plain steps."""
    theirs = e.comparison.theirs
    if not theirs.rounds:
        return
    alone = sum(max(0, undrafted(one.counters, len(one.exchanges))) for one in e.served.talks)
    if alone > SWITCHED_OFF * theirs.tokens:
        yield Cause(
            f"{alone} of {theirs.tokens} tokens came from steps without guesses: speculation is "
            "switched off for some steps",
            "look for num_speculative_tokens_per_batch_size, --max-num-seqs and --max-model-len "
            "in the server's command",
        )
    made = theirs.drafted / theirs.rounds
    if made < SHORT * e.served.positions:
        yield Cause(
            f"rounds had {made:.2f} guesses on average, of {e.served.positions} that the server "
            "may make: it drafts less under load or near its length limit",
            "look for num_speculative_tokens_per_batch_size in the server's command",
        )


def undrafted(counters: Counters, answers: int) -> int:
    """A round emits what it accepted and one more; prefill gives each answer's first token."""
    return counters.tokens - answers - counters.rounds - counters.accepted


def broken_folder(e: Evidence) -> Iterator[Cause]:
    for finding in e.head.findings:
        yield Cause(f"{e.head.folder}: {finding}", e.export)


def other_layers(e: Evidence) -> Iterator[Cause]:
    """vLLM takes 2, L//2, L-3 where a folder names no layers."""
    ours, listed = e.head.draft.aux_layers, e.head.aux_layers
    layers = e.facts.num_layers
    read = sorted(set(listed)) if listed else [2, layers // 2, layers - 3]
    if read != ours:
        named = "names" if listed else "names no layers, so vLLM takes"
        yield Cause(
            f"{e.head.folder} {named} {read}, and the head was trained on the states after "
            f"{ours} decoder layers",
            e.export,
        )


def other_head(e: Evidence) -> Iterator[Cause]:
    if e.head.foreign:
        yield Cause(
            f"{e.head.folder} holds another head than {e.run}/best: {', '.join(e.head.foreign)} "
            "differ; it was exported before the last training",
            e.export,
        )


def other_template(e: Evidence) -> Iterator[Cause]:
    """In chats alone: prompts of token ids pass no template."""
    seen = e.template
    if not seen.different:
        return
    text = (
        f"the server renders {seen.different} of {seen.compared} chats otherwise than the run did "
        f"({seen.example})"
    )
    if seen.mended_by:
        words = ", ".join(f"{name}={value}" for name, value in seen.mended_by.items())
        thinks = any("think" in name for name in seen.mended_by)
        what = "its default of the thinking mode is another" if thinks else "it lacks arguments"
        text += f": {what}, with chat_template_kwargs {words} both agree"
        mend = "send these chat_template_kwargs, or start it with --default-chat-template-kwargs"
    else:
        mend = "start it with --chat-template and the template of the run's verifier"
    if not e.by_chat:
        mend += f"; measure with python -m launch.serve_check {e.run} --chat"
    yield Cause(text, mend)


def other_verifier(e: Evidence) -> Iterator[Cause]:
    if e.server.other_verifier:
        yield Cause(
            e.server.other_verifier,
            "serve the verifier that the head was trained on, or train a head for this one",
            fault=False,
        )
    elif e.server.quantisation and not e.own_quantisation:
        yield Cause(
            f"the server quantises its verifier ({e.server.quantisation})",
            "serve it as the head was trained, or train a head on the quantised verifier's states",
            fault=False,
        )


def too_far(e: Evidence) -> Iterator[Cause]:
    """Positions beyond the head's own limit, its window, or what training reached."""
    draft, trained = e.head.draft, e.report.data.longest_training_sample
    limits = [(draft.max_positions, "the head's max_position_embeddings")]
    limits += [(e.head.window, "its sliding window")] if e.head.window else []
    limits += [(trained, "the longest training sample")] if trained else []
    for limit, name in sorted(limits):
        pairs = list(zip(e.questions, e.served.talks, strict=True))
        beyond = [pair for pair in pairs if pair[1].length > limit]
        within = [pair for pair in pairs if pair[1].length <= limit]
        if beyond and falls(beyond) and not falls(within):
            yield Cause(
                f"the difference is in the {len(beyond)} of {len(pairs)} conversations longer than "
                f"{limit} positions, {name}",
                "train on longer samples (data.max_length), with draft.max_positions as long",
                fault=False,
            )
            return


def falls(pairs: Sequence[tuple[Question, Talked]]) -> bool:
    """Whether the server accepts less at the first position than the report."""
    ours = total([question.ours for question, _ in pairs])
    theirs = total([talk.counters for _, talk in pairs])
    return share(theirs, 0, 1) < share(ours, 0, 1) - TOLERANCE


def other_precision(e: Evidence) -> Iterator[Cause]:
    served, counted = e.server.dtype, e.report.settings.counters_dtype
    if served is None:
        return
    if served != e.trained_dtype:
        yield Cause(
            f"the server computes in {served}, and the head learnt from states of "
            f"{e.trained_dtype}",
            f"start it with --dtype {e.trained_dtype}",
            fault=False,
        )
    elif served != counted:
        yield Cause(
            f"the server computes in {served} and the report counts in {counted}: answers part at "
            "near ties, which moves few prompts' counts by more than many's",
            f"python -m launch.serve_check {e.run} --dtype {counted}, on all prompts",
            fault=False,
        )


def other_chain(e: Evidence) -> Iterator[Cause]:
    ours = len(e.comparison.ours.accepted_by_depth)
    if e.served.positions and ours != e.served.positions:
        yield Cause(
            f"the server drafts {e.served.positions} tokens a round and the report {ours}: rounds "
            "begin at other tokens",
            f"python -m eval.main run.name={e.report.settings.run} "
            f"eval.n_draft={e.served.positions}",
            fault=False,
        )


def near_zero(e: Evidence) -> Iterator[Cause]:
    survival = e.comparison.survival
    if (
        survival
        and survival[0].theirs < NEAR_ZERO * survival[0].ours
        and e.comparison.theirs.rounds
    ):
        yield Cause(
            f"at the first position {survival[0].theirs:.3f} is accepted, next to nothing: the "
            "head reads other states than it was trained on, or its tokens are mapped wrong",
            f"python -m launch.export --check {e.head.folder} --verifier {e.facts.path}",
            fault=False,
        )


LOOKS: list[Callable[[Evidence], Iterator[Cause]]] = [
    not_in_use,
    switched_off,
    broken_folder,
    other_layers,
    other_head,
    other_verifier,
    other_template,
    too_far,
    other_chain,
    other_precision,
    near_zero,
]
