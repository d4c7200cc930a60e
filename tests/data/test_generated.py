"""Answers as ids: what was read and written is kept, and nothing else gets into a sample."""

from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from conf.schema import VerifierSection
from data.dialects import RowRefused
from data.generated import is_rewritten
from data.records import Conversation, Turn
from data.render import ChatTemplate
from data.template import encode, encode_prompt
from models.verifier import load_tokenizer

PLAIN = (
    "{% for m in messages %}{{ '<' + m['role'] + '>' + m['content'] }}"
    "{% if m['role'] == 'assistant' %}{{ '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)
FORGETFUL = (  # as Qwen3: thoughts before the last question are not shown again
    "{% for m in messages %}{{ '<' + m['role'] + '>' }}{% if m['role'] == 'assistant' %}"
    "{{ m['content'].split('</think>')[-1] + '<|im_end|>' }}{% else %}{{ m['content'] }}"
    "{% endif %}{{ '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)
CLOSED_THOUGHT = PLAIN.replace(  # as Qwen3 with thinking off: the prompt holds what history lacks
    "{{ '<assistant>' }}",
    "{{ '<assistant>' + ('' if thinking else '<think></think>') }}",
)


def ids_and_mask(conversation, tokenizer, kwargs, last=False) -> tuple[list[int], list[bool]]:
    found = encode(conversation, ChatTemplate(tokenizer, kwargs), last)
    return found.input_ids, found.loss_mask


@pytest.fixture
def with_template(tiny_verifier: Path, tmp_path: Path) -> Callable[..., PreTrainedTokenizerFast]:
    def make(template: str):
        tokenizer = load_tokenizer(VerifierSection(path=str(tiny_verifier)), tmp_path)
        tokenizer.add_tokens([AddedToken("<|eot|>", special=True)])
        tokenizer.chat_template = template
        return tokenizer

    return make


def talk(tokenizer, *contents: str, known: int = 9, end: str = "<|im_end|>") -> Conversation:
    """User and assistant in turn; the last ``known`` answers as the verifier would write them."""
    roles = ("user", "assistant")
    turns = tuple(Turn(roles[i % 2], content) for i, content in enumerate(contents))
    ids = [tuple(tokenizer(text + end)["input_ids"]) for text in contents[1::2]]
    return Conversation("x", turns, answer_ids=tuple(ids[-known:]))


def supervised(tokenizer, conversation: Conversation, last=False, **kwargs) -> list[str]:
    """Every supervised run as text; and proves that each was written at that place.

    The proof: a run is the ids of an answer, and all before it are the ids of its own prompt.
    """
    ids, mask = ids_and_mask(conversation, tokenizer, kwargs, last)
    answers = [i for i, turn in enumerate(conversation.turns) if turn.role == "assistant"]
    prompts = [encode_prompt(conversation.turns[:i], tokenizer, kwargs) for i in answers]
    known = list(
        zip(prompts[-len(conversation.answer_ids) :], conversation.answer_ids, strict=True)
    )
    runs: list[str] = []
    covered = 0
    for prompt, answer in known:
        whole = [*prompt, *answer]
        if ids[: len(whole)] == whole and any(mask[len(prompt) : len(whole)]):
            assert all(mask[len(prompt) : len(whole)])
            runs.append(tokenizer.decode(list(answer)))
            covered += len(answer)
    assert covered == sum(mask)
    assert ids == [*prompts[-1], *conversation.answer_ids[-1]]
    return runs


def test_all_answers_in_one_sample_where_prompts_continue_each_other(with_template):
    tokenizer = with_template(PLAIN)
    three = talk(tokenizer, "q", "one", "r", "two", "s", "three")
    assert supervised(tokenizer, three) == ["one<|im_end|>", "two<|im_end|>", "three<|im_end|>"]
    assert supervised(tokenizer, three, last=True) == ["three<|im_end|>"]
    ids, mask = ids_and_mask(three, tokenizer, {})
    assert not is_rewritten(three, mask)
    plain = Conversation("x", three.turns)  # the same conversation as text: same ids, same mask
    assert ids_and_mask(plain, tokenizer, {}) == (ids, mask)


def test_answers_without_ids_are_read_and_not_supervised(with_template):
    tokenizer = with_template(PLAIN)
    two = talk(tokenizer, "q", "one", "r", "two", "s", "three", known=2)
    assert supervised(tokenizer, two) == ["two<|im_end|>", "three<|im_end|>"]
    text = tokenizer.decode(ids_and_mask(two, tokenizer, {})[0])
    assert text.startswith("<user>q\n<assistant>one<|im_end|>\n<user>r")


def test_a_template_that_drops_thoughts_starts_anew(with_template):
    tokenizer = with_template(FORGETFUL)
    thinks = talk(tokenizer, "q", "<think>why</think>one", "r", "<think>how</think>two")
    assert supervised(tokenizer, thinks) == ["<think>how</think>two<|im_end|>"]
    ids, mask = ids_and_mask(thinks, tokenizer, {})
    assert is_rewritten(thinks, mask)
    assert "why" not in tokenizer.decode(ids)  # the verifier did not see it, so it is not there
    # A first answer with thoughts, then two without: the break lies after the first.
    mixed = talk(tokenizer, "q", "<think>why</think>one", "r", "two", "s", "three")
    assert supervised(tokenizer, mixed) == ["two<|im_end|>", "three<|im_end|>"]


def test_an_empty_thought_in_the_prompt_alone(with_template):
    tokenizer = with_template(CLOSED_THOUGHT)
    two = talk(tokenizer, "q", "one", "r", "two")
    assert supervised(tokenizer, two, thinking=True) == ["one<|im_end|>", "two<|im_end|>"]
    assert supervised(tokenizer, two, thinking=False) == ["two<|im_end|>"]
    ids, _ = ids_and_mask(two, tokenizer, {"thinking": False})
    shown = "<user>q\n<assistant>one<|im_end|>\n<user>r\n<assistant><think></think>two<|im_end|>"
    assert tokenizer.decode(ids) == shown


def test_another_end_of_turn_than_the_templates(with_template):
    tokenizer = with_template(PLAIN)
    two = talk(tokenizer, "q", "one", "r", "two", end="<|eot|>")
    assert supervised(tokenizer, two) == ["two<|eot|>"]


def two_spellings() -> PreTrainedTokenizerFast:
    """Characters, and the word "ab" as a token of its own, which encoding always prefers."""
    words = ["<|unk|>", "<|im_end|>", "ab", *"abqr<>userasistant\n"]
    core = Tokenizer(WordLevel({w: i for i, w in enumerate(dict.fromkeys(words))}, "<|unk|>"))
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split("ab", "isolated"), pre_tokenizers.Split("", "isolated")]
    )
    core.decoder = decoders.Fuse()
    core.add_special_tokens(["<|im_end|>"])
    core.add_tokens(["ab"])
    return PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<|im_end|>", chat_template=PLAIN
    )


def test_the_same_text_in_other_tokens_is_not_what_was_written():
    tokenizer = two_spellings()
    a, b, end, ab = tokenizer.convert_tokens_to_ids(["a", "b", "<|im_end|>", "ab"])
    assert tokenizer("ab")["input_ids"] == [ab]
    turns = (Turn("user", "q"), Turn("assistant", "ab"), Turn("user", "r"), Turn("assistant", "ab"))
    usual = Conversation("x", turns, answer_ids=((ab, end), (a, b, end)))
    assert supervised(tokenizer, usual) == ["ab<|im_end|>"] * 2
    ids, _ = ids_and_mask(usual, tokenizer, {})
    assert ids[-3:] == [a, b, end] and ab in ids[:-3]
    odd = Conversation("x", turns, answer_ids=((a, b, end), (a, b, end)))
    assert supervised(tokenizer, odd) == ["ab<|im_end|>"]  # the second prompt reads the one token
    ids, mask = ids_and_mask(odd, tokenizer, {})
    assert is_rewritten(odd, mask)
    assert ids.count(b) == 1 and ids.count(ab) == 1  # spelt out in the last answer alone


def test_a_cut_answer_gets_no_end_of_turn_label(with_template):
    tokenizer = with_template(PLAIN)
    whole = talk(tokenizer, "q", "one", "r", "two")
    first, last = whole.answer_ids
    cut = Conversation("x", whole.turns, cut=True, answer_ids=(first, last[:-1]))
    assert supervised(tokenizer, cut) == ["one<|im_end|>", "two"]


def test_ids_that_do_not_belong_are_refused(with_template):
    tokenizer = with_template(PLAIN)
    two = talk(tokenizer, "q", "one", "r", "two")
    first, last = two.answer_ids
    for ids in ((last, last), (first, first), ((999,), last)):
        with pytest.raises(RowRefused, match="do not spell the answer"):
            ids_and_mask(Conversation("x", two.turns, answer_ids=ids), tokenizer, {})
    # an earlier answer's ids are of no interest where only the last turn is supervised
    ids_and_mask(Conversation("x", two.turns, answer_ids=(last, last)), tokenizer, {}, True)


def test_thoughts_kept_apart_are_part_of_the_answer(with_template):
    tokenizer = with_template(PLAIN)
    ids = tuple(tokenizer("<think>\nwhy\n</think>\n\none<|im_end|>")["input_ids"])
    for reasoning, fine in (("why", True), ("how", False), ("one", False)):
        turns = (Turn("user", "q"), Turn("assistant", "one", reasoning=reasoning))
        row = Conversation("x", turns, answer_ids=(ids,))
        if fine:
            assert ids_and_mask(row, tokenizer, {})[0][-len(ids) :] == list(ids)
        else:
            with pytest.raises(RowRefused, match="do not spell"):
                ids_and_mask(row, tokenizer, {})
