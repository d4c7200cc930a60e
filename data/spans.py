"""Where the answers lie in the text that a chat template makes of a conversation.

It comes from the chat template alone:

- from its ``{% generation %}`` markers where it has them;
- else from two renders. ``full`` is the conversation; the probe is the same with every answer
  replaced by a mark (the last one keeps its text before the mark). What stands between the marks
  is what the template writes whatever the answers are, so ``full`` must be those pieces with the
  answers between them, and is checked to. The answer starts where the generation prompt ends,
  when that prompt is a prefix of ``full``: what follows it is what the verifier has to write.

An answer that calls tools keeps its place in the probe (templates refuse results without a call);
data/call_span.py finds it. Users' text is the same in both renders, so a header written in it
cannot open an answer.
"""

from dataclasses import dataclass, replace
from itertools import pairwise

from conf.runtime import note_once
from data.call_span import (
    NO_CALL,
    UNSTABLE,
    Before,
    bare,
    call_span,
    opening,
    shows_calls,
    shows_text,
)
from data.dialects import RowRefused
from data.records import Turn
from data.render import REFUSED, ChatTemplate, Span, Turns

MARK = "\ue0a7"  # private-use character that stands for an answer in a probe
TAIL = 32  # characters at the end of an answer that its marked span must contain
LEFT_OUT = "the template leaves out an answer"
NO_RESULT = "the template leaves out the result of a tool"
NOTHING = "no supervised token"
TEMPLATE_REASONS = {UNSTABLE, LEFT_OUT, NO_CALL, NO_RESULT, NOTHING, REFUSED}


@dataclass(frozen=True)
class MarkedText:
    text: str  # ends with the last answer
    spans: list[Span]  # of the answers, in order


def mark_answers(turns: Turns, cut: bool, template: ChatTemplate) -> MarkedText:
    """The text up to the end of the last answer, and the span of every answer, in order.

    Each span includes its end of turn, the last one only if it was not ``cut``. Raises RowRefused.
    """
    full = template.whole(turns)
    check_results(full, turns)
    pieces = probe(turns, template)
    closing = closing_of(full, turns, pieces, template)
    first = template.special.search(closing)
    end_of_turn = closing[: first.end()] if first else closing.rstrip()
    answers = [turn for turn in turns if turn.role == "assistant"]
    spans = spans_from_markers(full, turns, end_of_turn, template)
    if spans is None:
        spans = spans_from_pieces(full, turns, pieces, template)
        spans = [
            # What ends a turn with calls is in its span: another token ends it than a plain one.
            (start, end if turn.calls else turn_end(full, end, end_of_turn, template))
            for turn, (start, end) in zip(answers, spans, strict=True)
        ]
    end = len(full) - len(closing) + (0 if cut else len(end_of_turn))
    spans[-1] = (spans[-1][0], end)
    if any(before[1] > after[0] for before, after in pairwise(spans)):
        raise RowRefused(UNSTABLE)
    return MarkedText(full[:end], spans)


def check_results(full: str, turns: Turns) -> None:
    """Refuse what answers a question that the text does not hold."""
    for turn in turns:
        if turn.role == "tool" and not shows_text(full, turn):
            raise RowRefused(NO_RESULT)


def probe(turns: Turns, template: ChatTemplate) -> list[str]:
    """What the template writes around the answers; the last piece is what closes the last one."""
    mark = MARK
    while any(mark in text for turn in turns for text in (turn.content, turn.reasoning)):
        mark += MARK
    plain = [turn.role == "assistant" and not turn.calls for turn in turns]
    marked = [
        replace(turn, content=mark) if is_plain else turn
        for turn, is_plain in zip(turns, plain, strict=True)
    ]
    if plain[-1]:
        marked[-1] = replace(turns[-1], content=turns[-1].content.rstrip() + mark)
    pieces = template.whole(tuple(marked)).split(mark)
    if len(pieces) != 1 + sum(plain):
        raise RowRefused(LEFT_OUT)
    return pieces


def closing_of(full: str, turns: Turns, pieces: list[str], template: ChatTemplate) -> str:
    """What the template writes after the last answer."""
    if not turns[-1].calls:
        if not full.endswith(pieces[-1]):
            raise RowRefused(UNSTABLE)
        return pieces[-1]
    ended = full.rstrip()
    token = template.last_special(ended)
    return full[len(ended) - len(token) :]


def spans_from_pieces(
    full: str, turns: Turns, pieces: list[str], template: ChatTemplate
) -> list[Span]:
    """Walk through ``full`` piece by piece: an answer lies between two of them."""
    between = pairwise(pieces)
    spans: list[Span] = []
    at = 0  # where the answer before ended that is no call
    floor = 0  # where the answer before ended
    for i, turn in enumerate(turns):
        if turn.role != "assistant":
            continue
        earlier = Before(turns[:i], floor, turns[i:])
        if turn.calls:
            start, end = call_span(full, turn, earlier, template)
            spans.append((start, end))
            floor = start + len(bare(full[start:end], template))
            continue
        before, after = next(between)
        if not full.startswith(before, at):
            raise RowRefused(UNSTABLE)
        at += len(before)
        start = at
        if i == len(turns) - 1:  # its text is the end of the piece before it
            start -= written_length(before, turn.content)
        else:
            at = find_end(full, at, turn.content, after)
        asked = opening(full, earlier, template)
        if asked is not None and asked <= at:
            start = asked
        if start >= at:
            raise RowRefused(UNSTABLE if turn.content.strip() else LEFT_OUT)
        spans.append((start, at))
        floor = at
    return spans


def written_length(before: str, content: str) -> int:
    """How many characters at the end of ``before`` are ``content``, as templates trim it."""
    answer = content.rpartition("</think>")[2]  # some show the thoughts in another shape
    trimmed = (content.rstrip(), content.strip(), answer.strip())
    return next((len(text) for text in trimmed if before.endswith(text)), 0)


def find_end(full: str, start: int, content: str, after: str) -> int:
    """Where the answer that starts at ``start`` ends: where the piece after it begins."""
    for text in (content, content.strip()):
        if full.startswith(text, start) and full.startswith(after, start + len(text)):
            return start + len(text)
    end = full.find(after, start)
    if end < 0:
        raise RowRefused(UNSTABLE)
    return end


def turn_end(full: str, end: int, end_of_turn: str, template: ChatTemplate) -> int:
    """Where the turn ends whose answer ends at ``end``: after what ends the last answer too, or
    after another special token (some templates close the last turn with one of its own)."""
    if end_of_turn and full.startswith(end_of_turn, end):
        return end + len(end_of_turn)
    other = template.special.match(full, end)
    return other.end() if other and end_of_turn else end


def spans_from_markers(
    full: str, turns: Turns, end_of_turn: str, template: ChatTemplate
) -> list[Span] | None:
    """The answers between the template's own markers, without their header and what closes them.

    None when it has no markers; and, with a note, unless each span holds the end of its answer and
    then at most an end of turn (the library miscounts markers inside a macro).
    """
    if not template.has_markers:
        return None
    answers = [i for i, turn in enumerate(turns) if turn.role == "assistant"]
    marked = template.marked(turns)
    spans: list[Span] = []
    floor = 0
    for i, (start, end) in zip(answers, marked, strict=False):
        at = marked_end(full, (start, end), turns[i], end_of_turn, template)
        if at is None:
            break
        # Some mark their header, which the verifier is given.
        asked = opening(full, Before(turns[:i], floor, turns[i:]), template)
        if asked is not None and start < asked <= at:
            start = asked
        stop = at if turns[i].calls else turn_end(full, at, end_of_turn, template)
        floor = start + len(bare(full[start:at], template)) if turns[i].calls else at
        spans.append((start, stop))
    if len(spans) == len(marked) == len(answers):
        return spans
    note_once(f"{template.location}: its generation markers miss the answers, renders are compared")
    return None


def marked_end(
    full: str, marked: Span, turn: Turn, end_of_turn: str, template: ChatTemplate
) -> int | None:
    """Where the answer ends inside its markers; None when they are not around the answer."""
    start, end = marked
    if turn.calls:
        inside = full[start:end].rstrip()
        closed = template.last_special(inside)
        end = start + len(inside)
        if not closed and (after := template.special.match(full, end)):
            end = after.end()
        return end if shows_calls(inside, turn) else None
    tail = turn.content.rstrip()[-TAIL:]
    at = full.rfind(tail, start, end) + len(tail)
    rest = full[at:end].strip()
    if at < start + len(tail):
        return None
    if rest not in ("", end_of_turn.strip()) and not template.special.fullmatch(rest):
        return None
    blanks = turn.content[len(turn.content.rstrip()) :]
    return at + len(blanks) if full.startswith(blanks, at) else at
