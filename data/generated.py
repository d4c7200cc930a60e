"""Answers that come as token ids: the sample holds what the verifier read and wrote, id for id.

Each answer follows the prompt that was sent for it then, the template's render of the turns before
it, tokenised anew as a server does. Often that prompt begins with the one before it and the answer
to it, and one sample holds them all. It does not where the template shows history in another way
(Qwen3 drops the thoughts of earlier turns) or where the text of an answer tokenises otherwise than
it was generated. From there on the verifier did not see its earlier answer as it wrote it, so the
sample starts anew: it is the last prompt and answer, and of the answers inside that prompt those
are supervised whose prompt and ids it still begins with. No token is in it that was not read or
written at that place.
"""

from collections.abc import Callable, Sequence

from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from data.dialects import RowRefused
from data.records import Conversation, Turn

FOREIGN = "answer_ids do not spell the answer"
REWRITTEN = "history rewritten by the template: only the answers after it are supervised"


def encode_generated(
    conversation: Conversation,
    tokenizer: PreTrainedTokenizerBase,
    prompt_of: Callable[[tuple[Turn, ...]], list[int]],
    last_turn_only: bool = False,
) -> tuple[list[int], list[bool]]:
    """The last prompt and answer, and the mask of the answers in it whose ids are known.

    ``prompt_of``: the ids with which a verifier is asked to go on after some turns. Answers without
    ids are not supervised, they are not known to be the verifier's; data.dialects sees to
    it that there are no ids without an answer. Raises RowRefused for ids that do not spell the
    row's text, as another verifier's would not.
    """
    turns = conversation.turns
    known = conversation.answer_ids[-1:] if last_turn_only else conversation.answer_ids
    places = [i for i, turn in enumerate(turns) if turn.role == "assistant"]
    ids: list[int] = []
    mask: list[bool] = []
    for place, answer in zip(places[-len(known) :], known, strict=True):
        if not spells(answer, turns[place], tokenizer):
            raise RowRefused(FOREIGN)
        prompt = prompt_of(turns[:place])
        if prompt[: len(ids)] != ids:
            mask = []  # the answers so far are not in this prompt as they were written
        mask += [False] * (len(prompt) - len(mask)) + [True] * len(answer)
        ids = [*prompt, *answer]
    return ids, mask


def spells(answer: Sequence[int], turn: Turn, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the ids are the turn's: its text, and what ended it if it was not cut."""
    return max(answer) < len(tokenizer) and (
        is_text(answer[:-1], turn, tokenizer) or is_text(answer, turn, tokenizer)
    )


def is_text(ids: Sequence[int], turn: Turn, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the ids decode to the turn's text; thoughts kept apart come before it."""
    spelt = str(
        tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
    ).strip()
    content = turn.content.strip()
    if turn.reasoning:
        thoughts = spelt[: len(spelt) - len(content)]
        return spelt.endswith(content) and turn.reasoning.strip() in thoughts
    return spelt == content


def is_rewritten(conversation: Conversation, mask: Sequence[bool]) -> bool:
    """Whether a sample of all known answers had to leave some of them out."""
    return sum(mask) < sum(map(len, conversation.answer_ids))
