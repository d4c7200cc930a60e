"""What a template writes around turns, learnt once a sequence of roles and applied to many rows.

Most conversations differ in their texts alone, and most templates write the same around any text.
So the answers' places are worked out on turns that hold a single character each; a row whose full
render is those pieces with its own texts between them has its answers at the same places. Any
other row (trimmed in part, thoughts taken out, a date) is worked out by itself. That saves the
probe and a prompt an answer, four renders of five in a conversation of four turns.
"""

from itertools import accumulate, chain

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
    texts = [turn.content for turn in conversation.turns]
    for written in (texts, [text.strip() for text in texts]):  # as it stands, or trimmed
        between = chain.from_iterable(zip(skeleton.pieces, written, strict=False))
        if "".join([*between, skeleton.pieces[-1]]) == full:
            spans = place(conversation, written, skeleton)
            return MarkedText(full[: len(full) - skeleton.beyond], spans)
    return None


def place(conversation: Conversation, written: list[str], skeleton: Skeleton) -> list[Span]:
    spans: list[Span] = []
    shifts = zip(skeleton.starts, skeleton.ends, strict=True)
    at = 0
    for turn, piece, text in zip(conversation.turns, skeleton.pieces, written, strict=False):
        at += len(piece)
        if turn.role == "assistant":
            before, after = next(shifts)
            spans.append((at + before, at + len(text) + after))
        at += len(text)
    return spans
