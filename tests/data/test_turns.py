"""One turn in every spelling: parts, thoughts, calls and results, and nothing moved or dropped."""

import json

import pytest

from data.dialects import read_row
from data.records import ToolCall, Turn
from data.turns import RowRefused, joined, named, read_turn

USER, ANSWER = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
CALL = ToolCall("f", '{"x": 1}')


def turns_of(*turns: dict) -> tuple[Turn, ...]:
    return read_row({"messages": [USER, *turns, ANSWER]}, "f").conversation.turns[1:-1]


def talk(*turns: tuple[str, str]) -> dict:
    return {"conversations": [{"from": role, "value": text} for role, text in turns]}


@pytest.mark.parametrize(
    "call",
    [
        {
            "tool_calls": [
                {"id": "c", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
            ]
        },
        {"tool_calls": [{"function": {"name": "f", "arguments": '{"x": 1}'}}], "content": None},
        {"tool_calls": [{"name": "f", "arguments": {"x": 1}}], "content": ""},
        {"tool_calls": '[{"name": "f", "arguments": {"x": 1}}]'},
        {"tool_calls": ['{"name": "f", "parameters": {"x": 1}}'], "function_call": None},
        {"function_call": {"name": "f", "arguments": '{"x": 1}'}, "tool_calls": None},
        {"content": [{"type": "tool_call", "value": '{"name": "f", "arguments": {"x": 1}}'}]},
        {"content": [{"type": "tool_call", "name": "f", "arguments": {"x": 1}, "value": None}]},
        {"content": [{"type": "tool_use", "id": "c", "name": "f", "input": {"x": 1}}]},
    ],
)
def test_calls_and_results(call):
    """B06: user, assistant with calls, tool, assistant: four turns in every spelling."""
    result = {"role": "tool", "content": "4"}
    row = {"messages": [USER, {"role": "assistant", **call}, result, ANSWER]}
    assert read_row(row, "f").conversation.turns == (
        Turn("user", "q"),
        Turn("assistant", "", calls=(CALL,)),
        Turn("tool", "4", name="f"),
        Turn("assistant", "a"),
    )


def test_sharegpt_calls_and_observations():
    """B06 in ShareGPT's roles."""
    asked = '{"name": "f", "arguments": {"x": 1}}'
    row = talk(("human", "q"), ("function_call", asked), ("observation", "4"), ("gpt", "a"))
    found = read_row(row, "f")
    roles = [turn.role for turn in found.conversation.turns]
    assert roles == ["user", "assistant", "tool", "assistant"]
    assert found.conversation.turns[1].calls == (CALL,)
    assert found.changes == []
    several = read_row(talk(("human", "q"), ("function_call", f"[{asked}, {asked}]")), "f")
    assert several.conversation.turns[1].calls == (CALL, CALL)
    single = read_row(
        talk(("human", "q"), ("function_call", """{"name": "f", "arguments": '{"x": 1}'}""")), "f"
    )
    assert single.conversation.turns[1].calls == (CALL,)


@pytest.mark.parametrize(
    ("given", "stored"),
    [
        (None, "{}"),
        ("", "{}"),
        ({}, "{}"),
        ('{"x":1}', '{"x":1}'),  # the row's own spelling
        ('{\n "x": 1\n}', '{\n "x": 1\n}'),
        ('{"x": "\\ud83d\\ude00"}', '{"x": "\\ud83d\\ude00"}'),
        ('{"x": "a\tb"}', '{"x": "a\\tb"}'),  # no strict JSON, and readers of ours are strict
        ({"x": "é", "y": None}, '{"x": "é", "y": null}'),
    ],
)
def test_arguments_are_the_text_of_an_object(given, stored):
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": given}}]}
    (turn,) = turns_of(call, {"role": "tool", "content": ""})[:1]
    assert turn.calls == (ToolCall("f", stored),)
    assert isinstance(json.loads(turn.calls[0].arguments), dict)


def test_results_find_their_calls():
    """By id where there is one, else in the order of the calls."""
    calls = [{"id": c, "function": {"name": c.upper(), "arguments": {}}} for c in "abc"]
    asked = {"role": "assistant", "tool_calls": calls}
    results = [
        {"role": "tool", "tool_call_id": "c", "content": "3"},
        {"role": "tool", "content": {"sum": 1}},
        {"role": "tool", "name": "own", "content": [{"sum": 2}]},
        {"role": "tool", "content": [{"type": "text", "text": "x"}, "y"]},
    ]
    assert turns_of(asked, *results)[1:] == (
        Turn("tool", "3", name="C"),
        Turn("tool", '{"sum": 1}', name="A"),
        Turn("tool", '[{"sum": 2}]', name="own"),
        Turn("tool", "x\ny", name="B"),
    )


def test_results_are_put_in_the_order_of_the_calls():
    """Ids do not travel, so a template can tell the results apart by their order alone."""
    turns: list[dict] = []
    for calls, results in (("ab", "ba"), ("ba", "ab"), ("ab", "ab")):  # the ids are used again
        asked = [{"id": c, "function": {"name": c, "arguments": {}}} for c in calls]
        turns.append({"role": "assistant", "tool_calls": asked})
        turns += [{"role": "tool", "tool_call_id": r, "content": r} for r in results]
    found = read_row({"messages": [USER, *turns, ANSWER]}, "f")
    said = [turn.content for turn in found.conversation.turns if turn.role == "tool"]
    assert said == ["a", "b", "b", "a", "a", "b"]
    assert found.changes == ["tool results put in the order of their calls"]
    del turns[1]["tool_call_id"]
    unsaid = read_row({"messages": [USER, *turns[:3], ANSWER]}, "f")
    assert [turn.content for turn in unsaid.conversation.turns[2:4]] == ["b", "a"]
    assert unsaid.changes == []


def test_results_inside_a_user_turn_are_tool_turns():
    asked = {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f"}]}
    result = {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "4"}]}
    answered = {"role": "user", "content": [result, {"type": "text", "text": "go on"}]}
    assert turns_of(asked, answered) == (
        Turn("assistant", "", calls=(ToolCall("f", "{}"),)),
        Turn("tool", "4", name="f"),
        Turn("user", "go on"),
    )


@pytest.mark.parametrize(
    "turn",
    [
        {"reasoning_content": "so"},
        {"thinking": "so", "reasoning": None},
        {"reasoning": "so"},
        {"content": [{"type": "reasoning", "value": "so"}, {"type": "text", "value": "t"}]},
        {"content": [{"type": "thinking", "thinking": "so", "text": None}, "t"]},
        {"content": [{"type": "reasoning", "text": "so"}, {"type": "output_text", "text": "t"}]},
    ],
)
def test_reasoning_is_kept_apart(turn):
    row = {"messages": [USER, {"role": "assistant", "content": "t", **turn}]}
    assert read_row(row, "f").conversation.turns[1] == Turn("assistant", "t", reasoning="so")


def test_thoughts_inside_the_text_stay_there():
    said = "<think>so</think>t"
    assert turns_of({"role": "assistant", "content": said}, USER)[0] == Turn("assistant", said)


def test_nothing_is_moved_past_anything_else():
    """Thoughts, text, calls fit one turn; what comes in another order becomes several."""
    call = {"type": "tool_call", "name": "f", "arguments": {"x": 1}}
    parts = [
        {"type": "reasoning", "text": "r1"},
        {"type": "reasoning", "text": "r2"},
        "t1",
        "t2",
        call,
        call,
        "t3",
        {"type": "reasoning", "text": "r3"},
        call,
    ]
    found = read_row({"messages": [USER, {"role": "assistant", "content": parts}]}, "f")
    assert found.conversation.turns[1:] == (
        Turn("assistant", "t1\nt2", reasoning="r1\nr2", calls=(CALL, CALL)),
        Turn("assistant", "t3"),
        Turn("assistant", "", reasoning="r3", calls=(CALL,)),
    )
    assert found.changes == []


def test_merging_keeps_the_order_too():
    """B01 with calls: text and then a call merge, a call and then text do not."""
    asked = {"role": "assistant", "tool_calls": [{"name": "f", "arguments": {"x": 1}}]}
    row = {"messages": [USER, ANSWER, asked, asked, ANSWER]}
    found = read_row(row, "f")
    assert found.conversation.turns[1:] == (
        Turn("assistant", "a", calls=(CALL, CALL)),
        Turn("assistant", "a"),
    )
    assert found.changes == ["two turns of one role merged"]
    results = [Turn("tool", "1"), Turn("tool", "2")]
    assert joined(results, "\n\n") == results


def test_names_do_not_reach_over_other_calls():
    turns = [
        Turn("assistant", "", calls=(CALL, ToolCall("g", "{}"))),
        Turn("tool", "1"),
        Turn("assistant", "", calls=(ToolCall("h", "{}"),)),
        Turn("tool", "2"),
        Turn("tool", "3"),
    ]
    assert [turn.name for turn in named(turns)] == ["", "f", "", "h", ""]


@pytest.mark.parametrize(
    ("turn", "reason"),
    [
        ({"content": None}, "turn without text"),
        ({"content": []}, None),
        ({"content": {"a": 1}}, "turn without text"),
        ({"content": [{"type": "text"}]}, "turn without text"),
        ({"content": [{"image_url": "x"}]}, "turn without text"),
        ({"content": [3]}, "content part that is neither text nor an object"),
        ({"content": [{"type": "image"}]}, "content part that is not text: image"),
        ({"content": [{"type": "image_url"}]}, "content part that is not text: image_url"),
        ({"content": [{"type": "input_audio"}]}, "content part that is not text: input_audio"),
        ({"content": [{"type": "odd"}]}, "content part of an unknown type"),
        ({"content": [{"type": ["odd"]}]}, "content part of an unknown type"),
        ({"tool_calls": [{"id": 1}]}, "tool call that is no JSON object with a name"),
        ({"tool_calls": "f(x)"}, "tool call that is no JSON object with a name"),
        ({"tool_calls": [3]}, "tool call that is no JSON object with a name"),
        (
            {"tool_calls": [{"name": "f", "arguments": "x=1"}]},
            "tool call whose arguments are no JSON object",
        ),
        (
            {"tool_calls": [{"name": "f", "arguments": "[1]"}]},
            "tool call whose arguments are no JSON object",
        ),
        (
            {"tool_calls": [{"name": "f", "arguments": 3}]},
            "tool call whose arguments are no JSON object",
        ),
        ({"reasoning": {"text": "so"}}, "reasoning that is not text"),
        (
            {"tool_calls": [{"name": "f", "arguments": '{"x": "\\ud83d"}'}]},
            "broken characters in the text",
        ),
    ],
)
def test_reasons(turn, reason):
    if reason is None:
        assert read_turn(turn, "assistant", {}) == [Turn("assistant", "")]
        return
    with pytest.raises(RowRefused) as refused:
        read_turn(turn, "assistant", {})
    assert refused.value.reason == reason


@pytest.mark.parametrize(
    "extra",
    [
        {"tool_calls": [{"name": "f"}]},
        {"reasoning": "so"},
        {"content": [{"type": "thinking", "text": "x"}]},
    ],
)
def test_calls_and_thoughts_are_the_assistants(extra):
    with pytest.raises(RowRefused, match="outside an assistant turn"):
        read_turn({**USER, **extra}, "user", {})
    with pytest.raises(RowRefused, match="outside an assistant turn"):
        read_turn({"role": "tool", "content": "4", **extra}, "tool", {})


def test_an_unknown_part_leaves_a_note_with_its_name():
    with pytest.raises(RowRefused) as refused:
        read_turn({"content": [{"type": "x" * 99}]}, "user", {})
    assert "x" * 39 + "…" in refused.value.note


def test_thoughts_alone_are_an_empty_turn():
    with pytest.raises(RowRefused, match="empty turn"):
        read_row({"messages": [USER, {"role": "assistant", "reasoning": "so"}]}, "f")
