"""A conversation as token ids, and a mask of the tokens that the verifier would have written.

The mask covers each answer and its end-of-turn token; not the header before it and nothing after.
Where an answer lies comes from the chat template alone:

- from its ``{% generation %}`` markers where it has them;
- else from two renders. ``full`` is the conversation; the probe is the same with every answer
  replaced by a mark (the last one keeps its text before the mark). What stands between the marks
  is what the template writes whatever the answers are, so ``full`` must be those pieces with the
  answers between them, and is checked to. The answer starts where the generation prompt ends,
  when that prompt is a prefix of ``full``: what follows it is what the verifier has to write.

Users' text is the same in both renders, so a header written in it cannot open an answer. The text
is tokenised once, ends with the last answer, and gets no special token added: the template writes
its own BOS, as it does when the verifier is served.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from operator import itemgetter
from typing import Any

from tokenizers import Encoding
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from conf.runtime import say
from data.dialects import NO_ANSWER, RowRefused
from data.records import Conversation, Turn
from data.render import REFUSED, ChatTemplate, Span, Turns, fast_core

MARK = "\ue0a7"  # private-use character that stands for an answer in a probe
TAIL = 32  # characters at the end of an answer that its marked span must contain
UNSTABLE = "the template writes other text around other answers"
LEFT_OUT = "the template leaves out an answer"
NOTHING = "no supervised token"
FOREIGN = "answer_ids do not spell the answer"
TEMPLATE_REASONS = {UNSTABLE, LEFT_OUT, NOTHING, REFUSED}


@dataclass(frozen=True)
class Encoded:
    input_ids: list[int]
    loss_mask: list[bool]  # equally many


@dataclass(frozen=True)
class MarkedText:
    text: str  # ends with the last answer
    spans: list[Span]  # of the supervised answers, in order


def encode_all(
    conversations: Sequence[Conversation], template: ChatTemplate, last_turn_only: bool = False
) -> list[Encoded | RowRefused]:
    """Token ids and mask of each conversation, or the reason why it has none; in their order.

    A batch is tokenised in one call. A conversation must end with an answer, or bring token ids.
    """
    marked = [mark_or_encode(talk, template, last_turn_only) for talk in conversations]
    texts = [result.text for result in marked if isinstance(result, MarkedText)]
    found = iter(plain_core(template.tokenizer).encode_batch(texts, add_special_tokens=False))
    return [
        masked(next(found), result.spans) if isinstance(result, MarkedText) else result
        for result in marked
    ]


def encode(
    conversation: Conversation, template: ChatTemplate, last_turn_only: bool = False
) -> Encoded:
    """``encode_all`` of one conversation. Raises RowRefused, with the reason."""
    result = encode_all([conversation], template, last_turn_only)[0]
    if isinstance(result, RowRefused):
        raise result
    return result


def mark_or_encode(
    conversation: Conversation, template: ChatTemplate, last_turn_only: bool
) -> MarkedText | Encoded | RowRefused:
    """One row's refusal is its result: it does not stop the others."""
    turns, tokenised = conversation.turns, conversation.tokenised
    if tokenised is not None:
        return Encoded(list(tokenised.input_ids), list(tokenised.loss_mask))
    try:
        if not turns or turns[-1].role != "assistant":
            raise RowRefused(NO_ANSWER)
        if conversation.answer_ids:
            ids, mask = encode_generated(conversation, template.tokenizer, template.kwargs)
            return Encoded(ids, mask)
        text, spans = mark_answers(turns, conversation.cut, template)
    except RowRefused as refusal:
        return refusal
    return MarkedText(text, spans[-1:] if last_turn_only else spans)


def plain_core(tokenizer: PreTrainedTokenizerBase) -> Any:
    """The library's Rust tokenizer, set to neither pad nor cut nor split special tokens.

    Called directly, as wrapping its result costs a quarter of the tokenising. Raises ConfigError
    for a tokenizer that has none.
    """
    core = fast_core(tokenizer)
    core.no_padding()
    core.no_truncation()
    core.encode_special_tokens = False
    return core


def masked(encoding: Encoding, spans: list[Span]) -> Encoded | RowRefused:
    """The ids of a text, and a mask of the tokens that lie in ``spans`` of its characters."""
    mask = [False] * len(encoding)
    for start, end in spans:
        first, beyond = tokens_of(encoding, start, end)
        mask[first:beyond] = [True] * (beyond - first)
    if True not in mask:
        return RowRefused(NOTHING)
    return Encoded(encoding.ids, mask)


def tokens_of(encoding: Encoding, start: int, end: int) -> Span:
    """The tokens that overlap the characters [start, end) at all: the first, the one after.

    Asks for single tokens: listing all their places costs a sixth of the tokenising.
    """
    first = encoding.char_to_token(start)
    last = encoding.char_to_token(end - 1)
    if first is None or last is None:  # characters that the tokenizer drops
        places = encoding.offsets
        first = bisect_right(places, start, key=itemgetter(1))
        return first, max(first, bisect_left(places, end, key=itemgetter(0)))
    beyond = last + 1
    # Several tokens can share a character (the bytes of an emoji).
    while beyond < len(encoding) and (place := encoding.token_to_chars(beyond)) and place[0] < end:
        beyond += 1
    return first, beyond


def encode_generated(
    conversation: Conversation, tokenizer: PreTrainedTokenizerBase, template_kwargs: dict[str, Any]
) -> tuple[list[int], list[bool]]:
    """The prompt's ids, then ``answer_ids``: token for token what the verifier read and wrote.

    The answer alone is supervised; those before it in the prompt are not known to be the
    verifier's. The ids are checked to spell the row's text, so that another verifier's are found.
    """
    answer = list(conversation.answer_ids[-1])
    if max(answer) >= len(tokenizer):
        raise RowRefused(FOREIGN)
    spelt = tokenizer.decode(answer, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    if str(spelt).strip() != conversation.turns[-1].content.strip():
        raise RowRefused(FOREIGN)
    prompt = encode_prompt(conversation.turns[:-1], tokenizer, template_kwargs)
    return prompt + answer, [False] * len(prompt) + [True] * len(answer)


def encode_prompt(
    turns: Turns | list[Turn], tokenizer: PreTrainedTokenizerBase, template_kwargs: dict[str, Any]
) -> list[int]:
    """Token ids of ``turns`` and the header after which the verifier answers, as when it is served.

    Raises RowRefused when the template cannot take the turns.
    """
    text = ChatTemplate(tokenizer, template_kwargs).prompt(tuple(turns))
    return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]


def mark_answers(turns: Turns, cut: bool, template: ChatTemplate) -> tuple[str, list[Span]]:
    """The text up to the end of the last answer, and the span of every answer, in order.

    Each span includes its end of turn, the last one only if it was not ``cut``.
    """
    full = template.whole(turns)
    pieces = probe(turns, template)
    closing = pieces[-1]
    if not full.endswith(closing):
        raise RowRefused(UNSTABLE)
    first = template.special.search(closing)
    end_of_turn = closing[: first.end()] if first else closing.rstrip()
    spans = spans_from_markers(full, turns, end_of_turn, template)
    if spans is None:
        spans = spans_from_pieces(full, turns, pieces, template)
    stretched = [(start, turn_end(full, end, end_of_turn, template)) for start, end in spans[:-1]]
    end = len(full) - len(closing) + (0 if cut else len(end_of_turn))
    return full[:end], [*stretched, (spans[-1][0], end)]


def turn_end(full: str, end: int, end_of_turn: str, template: ChatTemplate) -> int:
    """Where the turn ends whose answer ends at ``end``: after what ends the last answer too, or
    after another special token (some templates close the last turn with one of its own)."""
    if end_of_turn and full.startswith(end_of_turn, end):
        return end + len(end_of_turn)
    other = template.special.match(full, end)
    return other.end() if other and end_of_turn else end


def probe(turns: Turns, template: ChatTemplate) -> list[str]:
    """What the template writes around the answers; the last piece is what closes the last one."""
    mark = MARK
    while any(mark in turn.content for turn in turns):
        mark += MARK
    marked = [Turn(t.role, mark) if t.role == "assistant" else t for t in turns[:-1]]
    marked.append(Turn("assistant", turns[-1].content.rstrip() + mark))
    pieces = template.whole(tuple(marked)).split(mark)
    if len(pieces) != 1 + sum(turn.role == "assistant" for turn in turns):
        raise RowRefused(LEFT_OUT)
    return pieces


def spans_from_pieces(
    full: str, turns: Turns, pieces: list[str], template: ChatTemplate
) -> list[Span]:
    """Walk through ``full`` piece by piece: an answer lies between two of them."""
    answers = [i for i, turn in enumerate(turns) if turn.role == "assistant"]
    spans: list[Span] = []
    at = 0
    for i, (before, after) in zip(answers, pairwise(pieces), strict=True):
        if not full.startswith(before, at):
            raise RowRefused(UNSTABLE)
        floor, at = at, at + len(before)
        start = at
        if i == answers[-1]:  # its text is the end of the piece before it
            start -= written_length(before, turns[i].content)
        else:
            at = find_end(full, at, turns[i].content, after)
        prompt = template.prompt(turns[:i])
        if full.startswith(prompt) and floor <= len(prompt) <= at:
            start = len(prompt)
        if start >= at:
            raise RowRefused(UNSTABLE)
        spans.append((start, at))
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
    for i, (start, end) in zip(answers, marked, strict=False):
        content = turns[i].content
        tail = content.rstrip()[-TAIL:]
        at = full.rfind(tail, start, end) + len(tail)
        rest = full[at:end].strip()
        closed = rest in ("", end_of_turn.strip()) or template.special.fullmatch(rest)
        if at < start + len(tail) or not closed:
            break
        blanks = content[len(content.rstrip()) :]
        prompt = template.prompt(turns[:i])  # some mark their header, which the verifier is given
        if full.startswith(prompt) and start < len(prompt) <= at:
            start = len(prompt)
        spans.append((start, at + len(blanks) if full.startswith(blanks, at) else at))
    if len(spans) == len(marked) == len(answers):
        return spans
    note_once(f"{template.origin}: its generation markers miss the answers, renders are compared")
    return None


@cache
def note_once(text: str) -> None:
    say(f"note: {text}")
