"""Turns as the messages that chat templates read."""

import json
from copy import deepcopy
from typing import Any

from data.records import ToolCall, Turn


def messages(turns: tuple[Turn, ...]) -> list[dict[str, Any]]:
    """The turns as chat templates expect them, arguments of calls as objects.

    Calls get ids of nine characters, which some templates insist on, in the order of the calls;
    results take them in the same order. A call without a result keeps its own.
    """
    listed: list[dict[str, Any]] = []
    made = answered = 0
    for turn in turns:
        message: dict[str, Any] = {"role": turn.role, "content": turn.content}
        if turn.reasoning:
            message["reasoning_content"] = turn.reasoning
        if turn.name:
            message["name"] = turn.name
        if turn.calls:
            answered = made
            message["tool_calls"] = [
                tool_call(call, made + number) for number, call in enumerate(turn.calls)
            ]
            made += len(turn.calls)
        if turn.role == "tool":
            message["tool_call_id"] = call_id(answered)
            answered += 1
        listed.append(message)
    return listed


def tool_call(call: ToolCall, number: int) -> dict[str, Any]:
    try:
        arguments = json.loads(call.arguments)
    except ValueError:  # what a verifier wrote may be broken JSON
        arguments = call.arguments
    function = {"name": call.name, "arguments": arguments}
    return {"type": "function", "id": call_id(number), "function": function}


def call_id(number: int) -> str:
    return f"call{number:05}"


def calls_of(spoken: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [call["function"] for message in spoken for call in message.get("tool_calls", ())]


def shows_python(texts: list[str], spoken: list[dict[str, Any]]) -> bool:
    """Whether arguments stand in the text as ``{'key': ...}``, which no verifier was taught."""
    shown = (call["arguments"] for call in calls_of(spoken) if isinstance(call["arguments"], dict))
    return any(arguments and str(arguments) in texts[0] for arguments in shown)


def with_text_arguments(spoken: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same messages, the arguments of every call as JSON text."""
    copied = deepcopy(spoken)
    for call in calls_of(copied):
        if not isinstance(call["arguments"], str):
            call["arguments"] = json.dumps(call["arguments"], ensure_ascii=False)
    return copied
