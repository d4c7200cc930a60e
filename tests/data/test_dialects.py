"""One row to a conversation: every dialect, every reason, every change."""

import pytest

from data.dialects import RowRefused, read_row
from data.records import Turn

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
    expected = [("system", "s"), ("user", "q"), ("assistant", "a")]
    assert turns_of(talk(("system", "s"), ("human", "q"), ("gpt", "a"))) == expected
    assert turns_of(talk(("developer", "s"), ("human", "q"), ("gpt", "a"))) == expected
    assert turns_of({**talk(("human", "q"), ("gpt", "a")), "system": "s"}) == expected
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
        (talk(("human", "q"), ("function_call", "{}")), "tool call or tool result"),
        (
            {"messages": [USER, {**ANSWER, "tool_calls": [{"id": 1}]}]},
            "tool call or tool result",
        ),
        ({"messages": [USER, {**ANSWER, "reasoning": "so"}]}, "reasoning apart from the text"),
        (
            {"messages": [USER, {"role": "assistant", "content": [{"type": "image"}]}]},
            "content part that is not text",
        ),
        ({"messages": [USER, ANSWER], "tools": [{"name": "f"}]}, "tools"),
        ({"messages": [USER, ANSWER], "answer_ids": ["5"]}, "answer_ids is no list of token ids"),
        ({"messages": [USER, ANSWER], "answer_ids": [-1]}, "answer_ids is no list of token ids"),
        (talk(("human", "a \ud83d b"), ("gpt", "a")), "broken characters in the text"),
    ],
)
def test_reasons(row, reason):
    with pytest.raises(RowRefused) as refused:
        read_row(row, "f:1")
    assert refused.value.reason == reason


def test_a_model_name_as_role_is_the_assistant():
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
    longer = read_row({"messages": [USER, ANSWER, USER]}, "f", prompts=True)
    assert [turn.role for turn in longer.conversation.turns] == ["user", "assistant", "user"]
    with pytest.raises(RowRefused, match="no user turn"):
        read_row({"messages": [ANSWER]}, "f", prompts=True)
