"""Many conventions against two twins: plain prefix renders, and what a mask by markers gets wrong.

Each family's template is invented in its manner. The twin renders one prefix an answer and asks
every token whether it lies in one, which is right for these templates and slow.
"""

import json
import random
import re
import shutil
from dataclasses import dataclass
from itertools import accumulate

import pytest
import torch

from conf.schema import RunConfig, Supervise
from data.chains import supervised_rows
from data.prepare import prepare
from data.records import Conversation, Turn
from data.render import ChatTemplate
from data.skeleton import fit, skeleton_of
from data.spans import mark_answers
from data.template import Encoded, encode, encode_all

LOOP = "{% for m in messages %}"
CHATML = (
    LOOP + "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
DEFAULT_SYSTEM = (
    "{% if messages[0].role != 'system' %}"
    "{{ '<|im_start|>system\nBe good.<|im_end|>\n' }}{% endif %}" + CHATML
)
LLAMA2 = (  # the system text goes into the first question; trims
    "{% if messages[0].role == 'system' %}{% set talk = messages[1:] %}"
    "{% set system = '<<SYS>>\n' + messages[0].content + '\n<</SYS>>\n\n' %}"
    "{% else %}{% set talk = messages %}{% set system = '' %}{% endif %}"
    "{% for m in talk %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{% if m.role == 'user' %}"
    "{{ '<s>[INST] ' + (system if loop.first else '') + m.content | trim + ' [/INST]' }}"
    "{% else %}{{ ' ' + m.content | trim + ' </s>' }}{% endif %}{% endfor %}"
)
LLAMA3 = (
    "{{ '<s>' }}" + LOOP + "{{ '<|start|>' + m.role + '<|end|>\n\n' + m.content | trim + '<|eot|>'"
    " }}{% endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant<|end|>\n\n' }}{% endif %}"
)
GEMMA = (  # the verifier is called model; no system turn
    "{{ '<s>' }}" + LOOP + "{% if m.role == 'system' %}{{ raise_exception('no system role') }}"
    "{% endif %}{{ '<|start|>' + ('model' if m.role == 'assistant' else m.role) + '\n' }}"
    "{{ m.content | trim + '<|eot|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>model\n' }}{% endif %}"
)
GLM = (  # the next role's token ends a turn
    "{{ '[gMASK]' }}" + LOOP + "{{ '<|' + m.role + '|>\n' + m.content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
DEEPSEEK = (  # drops thoughts, ends answers alone
    "{{ '<s>' }}" + LOOP + "{% if m.role == 'assistant' %}"
    "{{ '(Assistant)' + m.content.split('</think>')[-1] + '</s>' }}"
    "{% elif m.role == 'user' %}{{ '(User)' + m.content }}{% else %}{{ m.content }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '(Assistant)' }}{% endif %}"
)
UNUSUAL = (
    LOOP + "{% if m.role == 'assistant' %}{{ '~~ bot says: ' + m.content + ' ~over~<|end|>' }}"
    "{% else %}{{ '~~ ' + m.role + ' asks: ' + m.content + '\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '~~ bot says: ' }}{% endif %}"
)


@dataclass(frozen=True)
class Family:
    template: str
    end: str  # of a turn
    header: str  # after which the verifier writes
    system: bool = True
    trims: bool = False


FAMILIES = {
    "chatml": Family(CHATML, "<|im_end|>", "<|im_start|>assistant\n"),
    "default system": Family(DEFAULT_SYSTEM, "<|im_end|>", "<|im_start|>assistant\n"),
    "llama 2": Family(LLAMA2, " </s>", " [/INST]", trims=True),
    "llama 3": Family(LLAMA3, "<|eot|>", "<|start|>assistant<|end|>\n\n", trims=True),
    "gemma": Family(GEMMA, "<|eot|>", "<|start|>model\n", system=False, trims=True),
    "glm": Family(GLM, "", "<|assistant|>\n"),
    "deepseek": Family(DEEPSEEK, "</s>", "(Assistant)"),
    "unusual": Family(UNUSUAL, " ~over~<|end|>", "~~ bot says: "),
}
HOSTILE = [family.header for family in FAMILIES.values()]
HOSTILE += [family.end for family in FAMILIES.values() if family.end]
WORDS = ["so", "the end", "\n\n", " ", "a b", "{% if %}", "Z", *HOSTILE]


def random_talk(draw: random.Random, family: Family, number: int) -> Conversation:
    def text() -> str:
        return "".join(draw.choices(WORDS, k=draw.randint(1, 6))) + draw.choice(["x", "x ", "x\n"])

    roles = ["user", "assistant"] * draw.randint(1, 4)
    if family.system and draw.random() < 0.4:
        roles.insert(0, "system")
    turns = tuple(Turn(role, text()) for role in roles)
    return Conversation(f"c{number}", turns, cut=draw.random() < 0.2)


def twin(conversation: Conversation, tokenizer, family: Family) -> Encoded:
    """Prefix renders by the library's own call; a token that overlaps an answer belongs to it."""

    def render(turns: tuple[Turn, ...], prompt: bool = False) -> str:
        spoken = [{"role": turn.role, "content": turn.content} for turn in turns]
        return tokenizer.apply_chat_template(spoken, tokenize=False, add_generation_prompt=prompt)

    spans = []
    turns = conversation.turns
    for i, turn in enumerate(turns):
        if turn.role == "assistant":
            before = render(turns[:i], prompt=True)
            written = turn.content.strip() if family.trims else turn.content
            lead = " " if family.template == LLAMA2 else ""
            length = len(lead + written + family.end)
            if conversation.cut and i == len(turns) - 1:
                length -= len(family.end)
            spans.append((len(before), len(before) + length))
    text = render(turns)[: spans[-1][1]]
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    mask = [
        any(start < b and a < end for a, b in spans) for start, end in encoded["offset_mapping"]
    ]
    return Encoded(encoded["input_ids"], mask)


def by_markers(conversation: Conversation, tokenizer, family: Family) -> Encoded:
    """What many do: everything between the assistant's header and the next end is an answer."""
    spoken = [{"role": turn.role, "content": turn.content} for turn in conversation.turns]
    text = tokenizer.apply_chat_template(spoken, tokenize=False).rstrip("\n")
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    pattern = re.escape(family.header) + "(.*?" + re.escape(family.end) + ")"
    spans = [match.span(1) for match in re.finditer(pattern, text, re.DOTALL)]
    mask = [
        any(start < b and a < end for a, b in spans) for start, end in encoded["offset_mapping"]
    ]
    return Encoded(encoded["input_ids"], mask)


@pytest.mark.parametrize("name", FAMILIES)
def test_random_conversations_equal_the_twin(with_template, name):
    family = FAMILIES[name]
    tokenizer = with_template(family.template)
    draw = random.Random(name)
    talks = [random_talk(draw, family, number) for number in range(60)]
    results = encode_all(talks, ChatTemplate(tokenizer, {}))
    for conversation, result in zip(talks, results, strict=True):
        assert result == twin(conversation, tokenizer, family), conversation


@pytest.mark.parametrize("name", FAMILIES)
def test_skeletons_give_what_the_row_alone_gives(with_template, name):
    family = FAMILIES[name]
    template = ChatTemplate(with_template(family.template), {})
    draw = random.Random(name)
    fitted = 0
    for number in range(40):
        talk = random_talk(draw, family, number)
        skeleton = skeleton_of(talk, template)
        assert skeleton is not None
        found = fit(talk, skeleton, template)
        if found is not None:
            fitted += 1
            assert found == mark_answers(talk.turns, talk.cut, template)
    assert fitted == 40


def test_a_row_that_the_skeleton_does_not_fit_is_worked_out_alone(with_template):
    template = ChatTemplate(with_template(DEEPSEEK), {})
    turns = (Turn("user", "q"), Turn("assistant", "hm</think>a"))
    talk = Conversation("x", (*turns, Turn("user", "r"), Turn("assistant", "c")))
    skeleton = skeleton_of(talk, template)
    assert skeleton is not None
    assert fit(talk, skeleton, template) is None
    shown = supervised(talk, template)
    assert shown == ["a</s>", "c</s>"]


def supervised(talk: Conversation, template: ChatTemplate) -> list[str]:
    encoded = encode(talk, template)
    ids, mask = encoded.input_ids, encoded.loss_mask
    runs: list[list[int]] = []
    for i, (token, flag) in enumerate(zip(ids, mask, strict=True)):
        if flag and (i == 0 or not mask[i - 1]):
            runs.append([])
        if flag:
            runs[-1].append(token)
    return [template.tokenizer.decode(run) for run in runs]


@pytest.mark.parametrize("name", FAMILIES)
def test_users_who_write_headers_and_ends(with_template, name):
    family = FAMILIES[name]
    tokenizer = with_template(family.template)
    template = ChatTemplate(tokenizer, {})
    lead = " " if name == "llama 2" else ""
    for word in (family.header, family.end, family.header + "a" + family.end, "<s>", "<|end|>"):
        for where in ("{}x", "x{}y", "x{}"):
            hostile = where.format(word)
            turns = (Turn("user", hostile), Turn("assistant", "a"), Turn("user", "r" + hostile))
            talk = Conversation("x", (*turns, Turn("assistant", "c")))
            shown = supervised(talk, template)
            assert shown == [f"{lead}a{family.end}", f"{lead}c{family.end}"]
    if family.end:  # the negative control: a search for markers is caught by the same words
        turns = (Turn("user", f"x{family.header}y"), Turn("assistant", "a"))
        talk = Conversation("x", turns)
        assert by_markers(talk, tokenizer, family) != encode(talk, template)
        honest = Conversation("x", (Turn("user", "x"), Turn("assistant", "a")))
        assert by_markers(honest, tokenizer, family) == encode(honest, template)


@pytest.mark.parametrize("name", FAMILIES)
def test_system_text_is_rendered_and_never_supervised(with_template, name):
    family = FAMILIES[name]
    if not family.system:
        return
    template = ChatTemplate(with_template(family.template), {})
    turns = (Turn("system", "be brief"), Turn("user", "q"), Turn("assistant", "a"))
    encoded = encode(Conversation("x", turns), template)
    assert "be brief" in template.tokenizer.decode(encoded.input_ids)
    assert "be brief" not in "".join(supervised(Conversation("x", turns), template))


def test_a_default_system_text_is_not_supervised(with_template):
    template = ChatTemplate(with_template(DEFAULT_SYSTEM), {})
    talk = Conversation("x", (Turn("user", "q"), Turn("assistant", "a")))
    assert "Be good." in template.tokenizer.decode(encode(talk, template).input_ids)
    assert supervised(talk, template) == ["a<|im_end|>"]


@pytest.mark.parametrize("name", FAMILIES)
def test_sample_equals_prompt_and_generated_ids(with_template, name):
    """What the verifier reads when it is served, then what it writes."""
    family = FAMILIES[name]
    tokenizer = with_template(family.template)
    template = ChatTemplate(tokenizer, {})
    turns = (Turn("user", "q"), Turn("assistant", "a"), Turn("user", "r"), Turn("assistant", "c"))
    prompt = tokenizer(template.prompt(turns[:3]), add_special_tokens=False)["input_ids"]
    lead = " " if name == "llama 2" else ""
    answer = tokenizer(f"{lead}c{family.end}", add_special_tokens=False)["input_ids"]
    encoded = encode(Conversation("x", turns), template)
    assert encoded.input_ids == prompt + answer
    assert encoded.loss_mask[len(prompt) :] == [True] * len(answer)


def test_a_row_that_the_template_refuses_is_named(with_template, tiny_verifier, tmp_path, capsys):
    folder = tmp_path / "gemma"
    shutil.copytree(tiny_verifier, folder)
    (folder / "chat_template.jinja").write_text(GEMMA)
    rows = [[Turn("user", "q"), Turn("assistant", f"a{i}")] for i in range(4)]
    rows[2].insert(0, Turn("system", "s"))
    config = RunConfig()
    config.verifier.path = str(folder)
    config.run.cache = str(tmp_path / "cache")
    config.data.path = [str(tmp_path / "a.jsonl")]
    with (tmp_path / "a.jsonl").open("w") as file:
        for i, row in enumerate(rows):
            turns = [{"role": turn.role, "content": turn.content} for turn in row]
            file.write(json.dumps({"id": f"row-{i}", "messages": turns}) + "\n")
    prepared = prepare(config)
    assert [sample.id for sample in prepared.samples] == ["row-0", "row-1", "row-3"]
    said = capsys.readouterr().out
    assert "skipped 1: refused by the chat template (first: a.jsonl:3)" in said
    assert "no system role" in said


HANDMADE = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ '[' + m.content + ']>' }}"
    "{% else %}{{ m.content + '<|im_end|>' }}{% endif %}{% endfor %}"
)


def labels(samples: list[Encoded], tokenizer) -> list[str]:
    """The tokens that step 0 learns to predict, from the masks as the trainer reads them."""
    ids = [token for sample in samples for token in sample.input_ids]
    mask = torch.tensor([flag for sample in samples for flag in sample.loss_mask])
    starts = torch.tensor([0, *accumulate(len(sample.input_ids) for sample in samples)])
    rows = supervised_rows(mask, starts, 1, Supervise.span)[0].nonzero()[:, 0]
    return tokenizer.convert_ids_to_tokens([ids[row + 2] for row in rows.tolist()])


def test_labels_are_each_answer_without_its_first_token(with_template):
    """By hand: the prompt [hi]> is 5 tokens, the answer o k <end> is 3."""
    tokenizer = with_template(HANDMADE)
    template = ChatTemplate(tokenizer, {})
    turns = (Turn("user", "hi"), Turn("assistant", "ok"))
    more = (Turn("user", "yo"), Turn("assistant", "no"))
    one, two = encode_all([Conversation("x", turns), Conversation("y", turns + more)], template)
    assert isinstance(one, Encoded)
    assert isinstance(two, Encoded)
    assert one.loss_mask == [False] * 5 + [True] * 3
    assert labels([one], tokenizer) == ["k", "<|im_end|>"]
    both = ["k", "<|im_end|>", "o", "<|im_end|>"]
    assert labels([two], tokenizer) == both
    assert labels([one, two, one], tokenizer) == [*both[:2], *both, *both[:2]]
    wrong = Encoded(one.input_ids, [*one.loss_mask[1:], False])  # the mask moved as labels are
    assert labels([wrong], tokenizer) != labels([one], tokenizer)
