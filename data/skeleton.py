"""What a template writes around turns, learnt once a sequence of roles and applied to many rows.

Most conversations differ in their texts alone, and most templates write the same around any text.
So the answers' places are worked out on turns that hold a single character each; a row whose full
render is those pieces with its own texts between them has its answers at the same places. Any
other row (trimmed in part, thoughts taken out, a date) is worked out by itself. That saves the
probe and a prompt an answer, four renders of five in a conversation of four turns.
"""

from itertools import accumulate

from data.dialects import RowRefused
from data.records import Conversation, Turn
from data.render import ChatTemplate, Shape, Skeleton, Span
from data.spans import MarkedText, mark_answers

FILLER = "\ue0a9"  # private-use character that stands for a turn's text
SHAPES = 1024  # sequences of roles kept; each costs a few kilobytes at most


def mark_conversation(conversation: Conversation, template: ChatTemplate) -> MarkedText:
    """``mark_answers`` of a conversation, by its skeleton where that fits. Raises RowRefused."""
    turns = conversation.turns
    if all(turn.content and not (turn.calls or turn.reasoning or turn.name) for turn in turns):
        skeleton = skeleton_of(conversation, template)
        found = None if skeleton is None else fit(conversation, skeleton, template)
        if found is not None:
            return found
    return mark_answers(turns, conversation.cut, template)


def skeleton_of(conversation: Conversation, template: ChatTemplate) -> Skeleton | None:
    """None when the template does not write all texts of such turns once and in order."""
    shape = Shape(tuple(turn.role for turn in conversation.turns), conversation.cut)
    known = template.skeletons
    if shape not in known:
        if len(known) >= SHAPES:
            known.clear()
        known[shape] = learn(shape, template)
    return known[shape]


def learn(shape: Shape, template: ChatTemplate) -> Skeleton | None:
    turns = tuple(Turn(role, FILLER) for role in shape.roles)
    try:
        full = template.whole(turns)
        marked = mark_answers(turns, shape.cut, template)
    except RowRefused:
        return None
    pieces = full.split(FILLER)
    if len(pieces) != len(turns) + 1:
        return None
    places = accumulate(map(len, pieces[:-1]), lambda at, piece: at + len(FILLER) + piece)
    answers = [at for at, role in zip(places, shape.roles, strict=True) if role == "assistant"]
    starts = [start - at for at, (start, _) in zip(answers, marked.spans, strict=True)]
    ends = [end - at - len(FILLER) for at, (_, end) in zip(answers, marked.spans, strict=True)]
    return Skeleton(pieces, starts, ends, len(full) - len(marked.text))


def fit(
    conversation: Conversation, skeleton: Skeleton, template: ChatTemplate
) -> MarkedText | None:
    """None unless the full render is the skeleton with this conversation's texts in it."""
    full = template.whole(conversation.turns)
    if not full.startswith(skeleton.pieces[0]):
        return None
    shifts = zip(skeleton.starts, skeleton.ends, strict=True)
    spans: list[Span] = []
    at = len(skeleton.pieces[0])
    for turn, after in zip(conversation.turns, skeleton.pieces[1:], strict=True):
        end = text_end(full, at, turn.content, after)
        if end is None:
            return None
        if turn.role == "assistant":
            before, behind = next(shifts)
            spans.append((at + before, end + behind))
        at = end + len(after)
    return MarkedText(full[: at - skeleton.beyond], spans) if at == len(full) else None


def text_end(full: str, at: int, text: str, after: str) -> int | None:
    """Where ``text`` ends that starts at ``at``, as it stands or trimmed, with ``after`` behind."""
    for written in (text, text.strip()):
        end = at + len(written)
        if full.startswith(written, at) and full.startswith(after, end):
            return end
    return None
