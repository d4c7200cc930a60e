"""A conversation as token ids, and a mask of the tokens that the verifier would have written.

The mask covers each answer and its end-of-turn token; not the header before it and nothing after.
data/spans.py finds the answers in the text. The text is tokenised once, ends with the last answer,
and gets no special token added: the template writes its own BOS, as it does when the verifier is
served.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from tokenizers import Encoding
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from data.dialects import NO_ANSWER, RowRefused
from data.records import Conversation, Turn
from data.render import ChatTemplate, Span, Turns, fast_core
from data.skeleton import mark_conversation
from data.spans import NOTHING, MarkedText

FOREIGN = "answer_ids do not spell the answer"


@dataclass(frozen=True)
class Encoded:
    input_ids: list[int]
    loss_mask: list[bool]  # equally many


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
        marked = mark_conversation(conversation, template.given(conversation.tools))
    except RowRefused as refusal:
        return refusal
    return MarkedText(marked.text, marked.spans[-1:]) if last_turn_only else marked


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
    turns: Turns | list[Turn],
    tokenizer: PreTrainedTokenizerBase,
    template_kwargs: dict[str, Any],
    tools: str = "",
) -> list[int]:
    """Token ids of ``turns`` and the header after which the verifier answers, as when it is served.

    Raises RowRefused when the template cannot take the turns.
    """
    text = ChatTemplate(tokenizer, template_kwargs, tools).prompt(tuple(turns))
    return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
