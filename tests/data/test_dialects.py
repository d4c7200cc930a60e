"""One row to a conversation: every dialect, every reason, every change."""

import copy
import json
import pickle
import random

import pytest

from data.dialects import Reading, RowRefused, read_row
from data.records import Tokenised, Turn

USER, ANSWER = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}


def talk(*turns: tuple[str, str]) -> dict:
    return {"id": "x", "conversations": [{"from": role, "value": text} for role, text in turns]}


def turns_of(row: dict) -> list[tuple[str, str]]:
    return [(turn.role, turn.content) for turn in read_row(row, "f:1").conversation.turns]


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [USER, ANSWER]},
        {"conversations": [USER, ANSWER]},
        {"messages": None, "conversations": [USER, ANSWER]},
        talk(("human", "q"), ("gpt", "a")),
        talk(("user", "q"), ("chatgpt", "a")),
        talk(("User", "q"), (" Assistant", "a")),
        talk(("human", "q"), ("bing", "a")),
        talk(("human", "q"), ("bard", "a")),
        talk(("human", "q"), ("bot", "a")),
        talk(("prompter", "q"), ("model", "a")),
        {"conversation": [USER, ANSWER]},
        {"instruction": "q", "output": "a"},
        {"instruction": "q", "input": "", "output": "a"},
        {"instruction": "", "input": "q", "output": "a", "system": "", "history": []},
        {"instruction": "q", "context": None, "response": "a"},
        {"prompt": "q", "response": "a"},
        {"prompt": "q", "response": None, "completion": "a"},
        {"prompt": [USER], "completion": [ANSWER]},
        {"prompt": [USER], "completion": "a"},
        {"question": "q", "answer": "a"},
        {"input": "q", "output": "a"},
        {"chat": "USER: q\n\n\nASSISTANT: a <|endoftext|>\n\n\n", "system": None},
        {"messages": [{"role": "user", "from": None, "content": "q", "value": None}, ANSWER]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "q"}]}, ANSWER]},
        {"messages": [{"role": "user", "content": [{"type": "text", "value": "q"}]}, ANSWER]},
        {"messages": [{"role": "user", "content": ["q"]}, ANSWER]},
        {"messages": [USER, ANSWER], "tools": "[]"},
    ],
)
def test_dialects_give_the_same_turns(row):
    assert turns_of(row) == [("user", "q"), ("assistant", "a")]


def test_text_parts_are_joined_by_line():
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    row = {"messages": [{"role": "user", "content": parts}, ANSWER]}
    assert turns_of(row)[0] == ("user", "one\ntwo")


def test_system_turns_stay():
    """B05: the system prompt, in the turns or beside them, is the first turn."""
    expected = [("system", "s"), ("user", "q"), ("assistant", "a")]
    assert turns_of(talk(("system", "s"), ("human", "q"), ("gpt", "a"))) == expected
    assert turns_of(talk(("developer", "s"), ("human", "q"), ("gpt", "a"))) == expected
    assert turns_of({**talk(("human", "q"), ("gpt", "a")), "system": "s"}) == expected
    parts = [{"type": "text", "text": "s"}]
    assert turns_of({"prompt": "q", "response": "a", "system": parts}) == expected
    assert turns_of({**talk(("system", "s"), ("human", "q"), ("gpt", "a")), "system": "t"}) == (
        expected
    )


def test_optional_keys():
    row = {
        "id": 7,
        "task": "sums",
        "greedy": True,
        "cut": True,
        "answer_ids": [5, 6],
        "messages": [USER, ANSWER],
    }
    found = read_row(row, "f:1").conversation
    assert (found.id, found.task, found.greedy, found.cut) == ("7", "sums", True, True)
    assert found.answer_ids == ((5, 6),)


@pytest.mark.parametrize("name", [None, "", ["x"]])
def test_row_without_an_id_is_named_by_its_place(name):
    assert read_row({"id": name, "messages": [USER, ANSWER]}, "f:3").conversation.id == "f:3"


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ([USER, ANSWER], "not a JSON object"),
        (None, "not a JSON object"),
        ({"id": "x"}, "no turns"),
        ({"messages": []}, "no turns"),
        ({"messages": "hello"}, "no turns"),
        ({"prompt": "q", "completion": None}, "no answer"),
        ({"prompt": 3, "completion": "a"}, "turn without text"),
        ({"prompt": "q", "completion": ["a"]}, "turn without a role"),
        ({"instruction": "q", "input": ["x"], "output": "a"}, "turn without text"),
        ({"prompt": "q", "response": "a", "system": {"a": 1}}, "turn without text"),
        ({"instruction": "q", "output": "a", "history": "q"}, "history is no list of pairs"),
        ({"instruction": "q", "output": "a", "history": [["q"]]}, "history is no list of pairs"),
        ({"chat": "hello USER: q"}, "no turns"),
        ({"messages": ["hello", "there"]}, "turn without a role"),
        ({"messages": [{"content": "q"}, ANSWER]}, "turn without a role"),
        ({"messages": [{"role": ["user"], "content": "q"}, ANSWER]}, "turn without a role"),
        ({"messages": [{"role": "user"}, ANSWER]}, "turn without text"),
        ({"messages": [{"role": "user", "content": 3}, ANSWER]}, "turn without text"),
        (talk(("human", "q"), ("gpt", " \n")), "empty turn"),
        (talk(("human", ""), ("gpt", "a")), "empty turn"),
        (talk(("human", "q")), "no answer"),
        (talk(("system", "s")), "no user turn"),
        (talk(("gpt", "a")), "no user turn"),
        (talk(("human", "q"), ("narrator", "n"), ("gpt", "a")), "unknown role"),
        (talk(("a", "q"), ("b", "a")), "unknown role"),
        (talk(("system", "s"), ("my-model", "a"), ("human", "q")), "unknown role"),
        ({"messages": [USER, ANSWER], "tools": "f(x)"}, "tools are no JSON list of objects"),
        ({"messages": [USER, ANSWER], "tools": [3]}, "tools are no JSON list of objects"),
        ({"messages": [USER, ANSWER], "tools": 3}, "tools are no JSON list of objects"),
        ({"messages": [USER, ANSWER], "answer_ids": ["5"]}, "answer_ids is no list of token ids"),
        ({"messages": [USER, ANSWER], "answer_ids": [-1]}, "answer_ids is no list of token ids"),
        (
            {"messages": [USER, ANSWER], "answer_ids": [[1], [2]]},
            "answer_ids for more answers than there are",
        ),
        (talk(("human", "a \ud83d b"), ("gpt", "a")), "broken characters in the text"),
        ({**talk(("human", "q"), ("gpt", "a")), "id": "\udc00"}, "broken characters in the text"),
        (talk(("human", "q"), ("gpt", "a\0b")), "NUL character in the text"),
    ],
)
def test_reasons(row, reason):
    with pytest.raises(RowRefused) as refused:
        read_row(row, "f:1")
    assert refused.value.reason == reason


def test_a_model_name_as_role_is_the_assistant():
    """B04: an unknown name in place of gpt is mapped by the rule, with one note."""
    found = read_row(
        talk(("human", "q"), ("my-model-7b", "a"), ("human", "r"), ("my-model-7b", "b")), "f"
    )
    assert [turn.role for turn in found.conversation.turns] == ["user", "assistant"] * 2
    assert found.changes == ["unknown role taken as the assistant's"]
    assert found.notes == ["the unknown role 'my-model-7b' is taken as the assistant's"]


def test_a_refused_role_leaves_a_note_with_its_name():
    with pytest.raises(RowRefused) as refused:
        read_row(talk(("human", "q"), ("gpt", "a"), ("x" * 99, "n")), "f")
    assert "x" * 39 + "…" in refused.value.note
    assert len(refused.value.note) < 100


def test_leading_answers_are_left_out():
    """B03: a row that starts with the assistant is read from the first user turn on."""
    found = read_row(talk(("gpt", "hi"), ("human", "q"), ("gpt", "a")), "f")
    assert found.conversation.turns == (Turn("user", "q"), Turn("assistant", "a"))
    assert found.changes == ["starts with the assistant: those turns left out"]
    kept = read_row(talk(("system", "s"), ("gpt", ""), ("human", "q"), ("gpt", "a")), "f")
    assert [turn.role for turn in kept.conversation.turns] == ["system", "user", "assistant"]


def test_what_follows_the_last_answer_is_left_out():
    found = read_row(talk(("human", "q"), ("gpt", "a"), ("human", ""), ("human", "r")), "f")
    assert found.conversation.turns == (Turn("user", "q"), Turn("assistant", "a"))
    assert found.changes == ["turns after the last answer left out"]


def test_neighbours_of_one_role_are_merged():
    """B01: roles that do not alternate are merged, and counted."""
    found = read_row(talk(("human", "q"), ("human", "r"), ("gpt", "a"), ("gpt", "b")), "f")
    assert found.conversation.turns == (Turn("user", "q\n\nr"), Turn("assistant", "a\n\nb"))
    assert found.changes == ["two turns of one role merged"]


def test_system_turn_without_text_is_left_out():
    found = read_row(talk(("system", ""), ("human", "q"), ("gpt", "a")), "f")
    assert found.conversation.turns == (Turn("user", "q"), Turn("assistant", "a"))
    assert found.changes == ["system turn without text left out"]


def test_prompts_need_no_answer_and_end_with_the_user():
    only = read_row({"messages": [USER]}, "f", prompts=True)
    assert only.conversation.turns == (Turn("user", "q"),)
    answered = read_row({"messages": [USER, ANSWER]}, "f", prompts=True)
    assert answered.conversation.turns == (Turn("user", "q"),)
    assert answered.changes == []
    made = {"messages": [USER, ANSWER], "answer_ids": [[5, 6]]}  # by data.regenerate
    assert read_row(made, "f", prompts=True).conversation == only.conversation
    longer = read_row({"messages": [USER, ANSWER, USER]}, "f", prompts=True)
    assert [turn.role for turn in longer.conversation.turns] == ["user", "assistant", "user"]
    with pytest.raises(RowRefused, match="no user turn"):
        read_row({"messages": [ANSWER]}, "f", prompts=True)


def test_alpaca_with_everything():
    row = {
        "instruction": "Translate.",
        "input": "Guten Tag",
        "output": "Good day",
        "system": "s",
        "history": [["q", "a"]],
        "reasoning": "so",
    }
    found = read_row(row, "f").conversation
    assert found.turns == (
        Turn("system", "s"),
        Turn("user", "q"),
        Turn("assistant", "a"),
        Turn("user", "Translate.\n\nGuten Tag"),
        Turn("assistant", "Good day", reasoning="so"),
    )


def test_a_pair_without_an_answer_is_a_prompt():
    found = read_row({"prompt": "q", "canonical_solution": "x"}, "f", prompts=True)
    assert found.conversation.turns == (Turn("user", "q"),)


TOOL = {"name": "f", "parameters": {"type": "object", "properties": {}}}
WRAPPED = {"type": "function", "function": TOOL}


@pytest.mark.parametrize(
    "given",
    [
        [TOOL],
        [WRAPPED],
        json.dumps([TOOL]),
        json.dumps([WRAPPED], indent=2),
        [json.dumps(TOOL)],
        TOOL,
    ],
)
def test_tools_reach_the_conversation_in_one_shape(given):
    """B06: top-level tools, as a list or as its text."""
    found = read_row({"messages": [USER, ANSWER], "tools": given}, "f").conversation
    assert found.tools == json.dumps([WRAPPED])
    functions = read_row({"messages": [USER, ANSWER], "functions": given}, "f").conversation
    assert functions.tools == found.tools


@pytest.mark.parametrize("given", [None, "", " ", "[]", "null", []])
def test_no_tools(given):
    assert read_row({"messages": [USER, ANSWER], "tools": given}, "f").conversation.tools == ""


GLAIVE_CHAT = """USER: Hi, 2+2?


ASSISTANT: One moment. <functioncall> {"name": "add", "arguments": '{"a": 2, "b": 2}'} <|endoftext|>


FUNCTION RESPONSE: {"sum": 4}


ASSISTANT: It is 4.

USER guides say more. <|endoftext|>


"""


def test_glaive_chat():
    row = {"system": "SYSTEM: You may call\n{}", "chat": GLAIVE_CHAT}
    turns = read_row(row, "f").conversation.turns
    assert [(t.role, t.content) for t in turns] == [
        ("system", "You may call\n{}"),
        ("user", "Hi, 2+2?"),
        ("assistant", "One moment."),
        ("tool", '{"sum": 4}'),
        ("assistant", "It is 4.\n\nUSER guides say more."),
    ]
    assert (turns[2].calls[0].name, turns[2].calls[0].arguments) == ("add", '{"a": 2, "b": 2}')
    assert turns[3].name == "add"


def ids_row(**keys: object) -> dict:
    return {"input_ids": [5, 6, 7], **keys}


@pytest.mark.parametrize(
    "row",
    [
        ids_row(loss_mask=[0, 1, 1]),
        ids_row(loss_mask=[False, True, True], labels=None),
        ids_row(labels=[-100, 6, 7]),
        ids_row(labels=[-100, 6, 7], attention_mask=[1, 1, 1], messages=[USER, ANSWER]),
    ],
)
def test_token_ids(row):
    found = read_row({"id": "x", "task": "t", **row}, "f")
    assert found.conversation.tokenised == Tokenised((5, 6, 7), (False, True, True))
    assert (found.conversation.turns, found.conversation.task) == ((), "t")
    assert found.changes == []


def test_padding_of_token_ids_is_left_out_and_counted():
    row = {
        "input_ids": [0, 5, 6, 0],
        "attention_mask": [0, 1, 1, 0],
        "labels": [-100, -100, 6, -100],
    }
    found = read_row(row, "f")
    assert found.conversation.tokenised == Tokenised((5, 6), (False, True))
    assert found.changes == ["padding left out"]


def test_token_ids_without_a_mask_are_left_to_the_turns():
    found = read_row(ids_row(messages=[USER, ANSWER]), "f").conversation
    assert (found.tokenised, len(found.turns)) == (None, 2)
    prompt = read_row(ids_row(loss_mask=[0, 1, 1], messages=[USER, ANSWER]), "f", prompts=True)
    assert prompt.conversation.turns == (Turn("user", "q"),)


NO_MASK = "input_ids without a loss_mask or labels of that length"


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (ids_row(), NO_MASK),
        (ids_row(loss_mask=[0, 1]), NO_MASK),
        (ids_row(labels=[-100, 6]), NO_MASK),
        (ids_row(labels=[6, 7, -100]), "labels that are neither -100 nor the input_ids"),
        (ids_row(loss_mask=[0, 2, 1]), "loss_mask holds more than 0 and 1"),
        (ids_row(loss_mask=[0, 0, 0]), "token ids of which none is supervised"),
        (ids_row(labels=[-100] * 3), "token ids of which none is supervised"),
        ({"input_ids": [], "loss_mask": []}, "token ids of which none is supervised"),
        ({"input_ids": [1, -1], "loss_mask": [0, 1]}, "input_ids is no list of token ids"),
        ({"input_ids": [1, 2.0], "loss_mask": [0, 1]}, "input_ids is no list of token ids"),
        ({"input_ids": [[1, 2]], "loss_mask": [[0, 1]]}, "input_ids is no list of token ids"),
        ({"input_ids": "1 2", "loss_mask": [0, 1]}, "input_ids is no list of token ids"),
    ],
)
def test_token_ids_that_do_not_fit(row, reason):
    with pytest.raises(RowRefused) as refused:
        read_row(row, "f")
    assert refused.value.reason == reason


def test_deep_nesting_is_a_reason():
    deep: object = "x"
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(RowRefused, match="nested too deeply"):
        read_row({"messages": [USER, ANSWER], "tools": [{"name": "f", "parameters": deep}]}, "f")


WHOLE = [
    {
        "id": "x",
        "system": "s",
        "tools": [TOOL],
        "answer_ids": [[1]],
        "messages": [
            USER,
            {
                "role": "assistant",
                "content": [{"type": "reasoning", "value": "r"}, {"type": "text", "text": "t"}],
                "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "{}"}}],
            },
            {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "4"}]},
            {"role": "assistant", "content": "a"},
        ],
    },
    {"instruction": "q", "input": "i", "output": "a", "history": [["q", "a"]], "thinking": "r"},
    {"prompt": [USER], "completion": [ANSWER], "tools": "[]"},
    {"chat": GLAIVE_CHAT, "system": "SYSTEM: s"},
    {"input_ids": [1, 2], "labels": [-100, 2], "attention_mask": [1, 1]},
    talk(("human", "q"), ("function_call", '{"name": "f"}'), ("observation", "4"), ("gpt", "a")),
]
JUNK = [
    None,
    "",
    " ",
    "x",
    "[",
    "{}",
    "[{}]",
    0,
    -1,
    1.5,
    True,
    [],
    {},
    [None],
    [[]],
    {"a": {}},
    [1],
]


def places_in(value: object) -> list:
    """(container, key) of every value inside."""
    pairs = list(value.items() if isinstance(value, dict) else enumerate(value))
    return [
        place
        for key, inner in pairs
        for place in [(value, key), *(places_in(inner) if isinstance(inner, dict | list) else [])]
    ]


def test_no_row_however_strange_does_more_than_be_refused():
    """Junk in every place of rows of every dialect: a reading or a reason, never another error."""
    dice = random.Random(0)
    refused = 0
    for n in range(6000):
        row = copy.deepcopy(WHOLE[n % len(WHOLE)])
        for _ in range(dice.choice([1, 1, 2, 4])):
            container, key = dice.choice(places_in(row) or [({}, "a")])
            if dice.random() < 0.2 and isinstance(container, dict) and key in container:
                del container[key]
            else:
                container[key] = copy.deepcopy(dice.choice(JUNK))
        for prompts in (False, True):
            try:
                found = read_row(row, "f", prompts)
            except RowRefused as refusal:
                refused += 1
                assert refusal.reason
                continue
            assert isinstance(found, Reading)
            assert pickle.loads(pickle.dumps(found)) == found
            assert all(isinstance(turn.content, str) for turn in found.conversation.turns)
    assert 2000 < refused < 12_000 - 1500
