"""Where an answer that calls tools lies in the text, and where any answer begins.

Templates write a call in a shape of their own, so there is no text of ours to look for. The answer
as it was generated is what ``whole(turns up to it)`` writes after the prompt, up to the token that
ends it. The same text must stand in the full render, but for a front that templates change which
drop the thoughts of earlier turns. Such templates change all that goes before as well, so renders
are compared from the end of the answer before on, and from the end of the text of the turn before,
which a render of the whole conversation with another text there tells.
"""

import json
from dataclasses import dataclass, replace

from data.dialects import RowRefused
from data.records import Turn
from data.render import ChatTemplate, Span, Turns

NO_CALL = "the template leaves out a tool call"
UNSTABLE = "the template writes other text around other answers"
SLACK = 64  # characters that may go before the calls besides the answer's own
STAND_IN = "\ue0a8"  # private-use character that stands for a turn's text


@dataclass(frozen=True)
class Before:
    """What goes before an answer, and the turns from it on."""

    turns: Turns
    floor: int  # where the answer before ends, without the token that ends it; 0 where none is
    rest: Turns  # the answer and what follows it


def opening(full: str, before: Before, template: ChatTemplate) -> int | None:
    """Where the generation prompt ends in ``full``: what follows is the verifier's to write.

    None when ``full`` holds another header than the prompt.
    """
    prompt = template.prompt(before.turns)
    if full.startswith(prompt) and before.floor <= len(prompt):
        return len(prompt)
    base = text_before(before.turns, template)
    rest = prompt[len(base) :]
    if prompt.startswith(base) and full.startswith(rest, before.floor):
        return before.floor + len(rest)
    given = end_of_given(full, before, template)  # some write the system text in the last question
    if given is None or not before.turns or before.turns[-1].role == "assistant":
        return None
    _, found, header = template.prompt(with_stand_in(before.turns)).partition(STAND_IN)
    fits = found and prompt.endswith(header) and full.startswith(header, given)
    return given + len(header) if fits else None


def text_before(turns: Turns, template: ChatTemplate) -> str:
    """The text up to the end of the last answer in ``turns``, as a conversation that ends there."""
    count = next((i + 1 for i in reversed(range(len(turns))) if turns[i].role == "assistant"), 0)
    return bare(template.whole(turns[:count]), template) if count else ""


def bare(text: str, template: ChatTemplate) -> str:
    """Without blanks and a token that ends a turn."""
    ended = text.rstrip()
    return ended[: len(ended) - len(template.last_special(ended))].rstrip()


def call_span(full: str, answer: Turn, before: Before, template: ChatTemplate) -> Span:
    """The span in ``full`` of an answer with calls, its end of turn included."""
    header = template.whole((*before.turns, Turn("assistant", STAND_IN))).partition(STAND_IN)[0]
    written = as_generated(answer, before, header, template)
    start = opening(full, before, template)
    # The first call from here on is the answer's: a user may have written the same one before.
    lowest = lowest_start(full, header, before, template) if start is None else start
    room = SLACK + len(answer.reasoning) + len(answer.content)
    for ended in (written, bare(written, template)):
        front, calls = split_at_calls(ended, answer)
        highest = lowest + len(ended) + room
        at = full.find(calls, lowest, highest)
        if at < 0:
            continue
        whole = full.find(ended, lowest, highest)
        if 0 <= whole <= at:  # a thought may quote the calls
            at = whole + len(front)
        end = at + len(calls)
        token = template.special.match(full, end) if len(ended) < len(written) else None
        if start is None:
            above = full[before.floor : at]
            shown = above[len(above) - shared(above[::-1], front[::-1]) :]
            start = at - len(shown.lstrip())  # the blanks can be the header's
        return start, token.end() if token else end
    raise RowRefused(UNSTABLE)


def as_generated(answer: Turn, before: Before, header: str, template: ChatTemplate) -> str:
    """What the verifier wrote. Raises RowRefused when that does not show the calls."""
    prompt = template.prompt(before.turns)
    through = template.whole((*before.turns, answer)).rstrip()
    fits = through.startswith(prompt)  # else the prompt opens a thought that is not there
    written = through[len(prompt) :] if fits else behind_thought(through, header, answer)
    if not shows_calls(written, answer):
        raise RowRefused(NO_CALL)
    return written


def behind_thought(through: str, header: str, answer: Turn) -> str:
    """What follows ``header`` in ``through``.

    A header can hold an empty thought (thinking turned off). One that the data brings is written
    into it and is as little the verifier's as the empty one. Raises RowRefused when it is unclear
    where it ends.
    """
    at = shared(through, header)
    inline = answer.content.partition("</think>")[0].rpartition("<think>")[2]
    thought = (answer.reasoning or inline).strip()
    begun = through.find(thought, max(at - len(thought) + 1, 0)) if header[at:].strip() else -1
    if not thought or begun < 0 or through[at:begun].strip():
        return through[at:]
    blank, closed, said = through[begun + len(thought) :].partition(header[min(at, begun) :])
    if blank.strip() or not closed:
        raise RowRefused(UNSTABLE)
    return said


def lowest_start(full: str, header: str, before: Before, template: ChatTemplate) -> int:
    """Behind the text of the turn before, and as far as ``full`` goes on as ``header`` does.

    The header's own history can differ from that in ``full`` (thoughts, even empty ones, that are
    shown for the last answer alone). Raises RowRefused when neither place can be told.
    """
    given = end_of_given(full, before, template)
    base = text_before(before.turns, template)
    if header.startswith(base):
        follows = before.floor + shared(full[before.floor :], header[len(base) :])
        told = given is not None or shows_text(full[before.floor : follows], before.turns[-1])
    else:
        follows = shared(full, header)
        told = given is not None
    if not told:
        raise RowRefused(UNSTABLE)
    return max(given or 0, follows)


def end_of_given(full: str, before: Before, template: ChatTemplate) -> int | None:
    """Where the text of the turn before the answer ends; None when the render does not tell."""
    if not before.turns or before.turns[-1].role == "assistant":
        return before.floor
    probe = template.whole((*with_stand_in(before.turns), *before.rest))
    above, found, below = probe.partition(STAND_IN)
    fits = full.startswith(above) and full.endswith(below)
    if not found or STAND_IN in below or not fits or len(above) + len(below) > len(full):
        return None
    return len(full) - len(below)


def with_stand_in(turns: Turns) -> Turns:
    """The same turns, but for the text of the last one."""
    return (*turns[:-1], replace(turns[-1], content=STAND_IN))


def split_at_calls(written: str, answer: Turn) -> tuple[str, str]:
    """An answer in two: the second part is the least end of it that shows all its calls."""
    at = min(written.rfind(call.name) for call in answer.calls)
    return written[:at], written[at:]


def shared(one: str, other: str) -> int:
    """How many characters two texts have in common from their beginning on."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))


def shows_calls(text: str, turn: Turn) -> bool:
    return all(call.name in text for call in turn.calls)


def shows_text(text: str, turn: Turn) -> bool:
    """Whether a turn that is given stands in ``text``, as it is or as a JSON string."""
    shown = turn.content.strip()
    return shown in text or json.dumps(shown, ensure_ascii=False)[1:-1] in text
