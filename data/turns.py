"""One turn as a row holds it: text, typed parts, thoughts, tool calls and results -> Turn.

A turn may hold its parts in an order that one ``Turn`` cannot show (thoughts, then text, then
calls); it then becomes several of the same role, and nothing is moved past anything else.
"""

import json
import re
from dataclasses import replace

from data.records import ToolCall, Turn

REASONING = ("reasoning_content", "thinking", "reasoning")
CALLS = ("tool_calls", "function_call")
PART_KINDS = {
    **dict.fromkeys(("text", "input_text", "output_text"), "text"),
    **dict.fromkeys(("reasoning", "thinking"), "reasoning"),
    **dict.fromkeys(("tool_call", "tool_use", "function_call"), "call"),
    **dict.fromkeys(("tool_result", "function_result", "tool_response"), "result"),
    **dict.fromkeys(("image", "image_url", "input_image", "audio", "input_audio"), "media"),
    **dict.fromkeys(("video", "video_url", "file", "document"), "media"),
}
NO_TEXT = "turn without text"
FOREIGN_PART = "tool call or reasoning outside an assistant turn"
NO_CALL = "tool call that is no JSON object with a name"
NO_ARGUMENTS = "tool call whose arguments are no JSON object"
# {"name": "f", "arguments": '{"x": 1}'}: glaive's data quotes the arguments like this.
QUOTED = re.compile(
    r"""\s*\{\s*"name"\s*:\s*("[^"]*")\s*,\s*"arguments"\s*:\s*'(.*)'\s*\}\s*""", re.S
)


class RowRefused(ValueError):
    """A row that cannot become a sample: the reason to count it under, and a note to print once."""

    def __init__(self, reason: str, note: str = ""):
        super().__init__(reason)
        self.reason = reason
        self.note = note


def first_of(value: dict, *keys: str) -> object:
    """The first of ``keys`` that is there and not null (tables hold every key in every row)."""
    for key in keys:  # a generator would take twice the time, and every row needs many
        found = value.get(key)
        if found is not None:
            return found
    return None


def shown(name: object) -> str:
    text = name if isinstance(name, str) else str(name)
    return repr(text if len(text) <= 40 else text[:39] + "…")


def read_turn(turn: dict, role: str, names: dict[str, str]) -> list[Turn]:
    """The turn of a known role ("call": the assistant's, whose text is calls), as one or more.

    ``names`` collects the tools' names by the ids of the calls, so that a result finds its own.
    Raises RowRefused with the reason.
    """
    content = first_of(turn, "content", "value")
    if role == "call":
        return [Turn("assistant", "", calls=read_calls(content, names))]
    if role == "tool":
        if first_of(turn, *REASONING, *CALLS) not in (None, [], ""):
            raise RowRefused(FOREIGN_PART)
        return [tool_turn(turn, content, names)]
    pieces: list[Turn] = []
    thoughts = first_of(turn, *REASONING)
    if thoughts is not None:
        pieces.append(Turn(role, "", reasoning=text_only(thoughts, "reasoning that is not text")))
    if isinstance(content, list):
        pieces += [read_part(part, role, names) for part in content]
    elif content is not None:
        pieces.append(Turn(role, text_only(content, NO_TEXT)))
    calls = first_of(turn, *CALLS)
    if calls not in (None, [], ""):
        pieces.append(Turn(role, "", calls=read_calls(calls, names)))
    if content is None and not any(piece.calls or piece.reasoning for piece in pieces):
        raise RowRefused(NO_TEXT)
    if role != "assistant" and any(piece.calls or piece.reasoning for piece in pieces):
        raise RowRefused(FOREIGN_PART)
    return joined(pieces or [Turn(role, "")], "\n")


def joined(turns: list[Turn], gap: str) -> list[Turn]:
    """Join neighbours of one role, texts with ``gap`` between; tool results stay apart."""
    out: list[Turn] = []
    for turn in turns:
        if out and out[-1].role == turn.role != "tool" and in_order(out[-1], turn):
            last = out[-1]
            out[-1] = replace(
                last,
                content=gap.join(filter(None, (last.content, turn.content))),
                reasoning=gap.join(filter(None, (last.reasoning, turn.reasoning))),
                calls=last.calls + turn.calls,
            )
        else:
            out.append(turn)
    return out


def named(turns: list[Turn]) -> list[Turn]:
    """Give results without a name the names of the calls before them, in their order."""
    out: list[Turn] = []
    waiting: list[str] = []
    for turn in turns:
        if turn.role == "tool":
            name = turn.name or (waiting[0] if waiting else "")
            if name in waiting:
                waiting.remove(name)
            turn = replace(turn, name=name)
        elif turn.calls:
            waiting = [call.name for call in turn.calls]
        out.append(turn)
    return out


def in_order(first: Turn, second: Turn) -> bool:
    """Whether one turn can hold both: thoughts come first, calls last."""
    latest = 2 if first.calls else 1 if first.content.strip() else 0
    earliest = 0 if second.reasoning else 1 if second.content.strip() else 2
    return earliest >= latest


def text_only(value: object, reason: str) -> str:
    if not isinstance(value, str):
        raise RowRefused(reason)
    return value


def read_part(part: object, role: str, names: dict[str, str]) -> Turn:
    """A string or a typed part, ``{"type": "text", "text": ...}`` (or ``value``), as a piece."""
    if isinstance(part, str):
        return Turn(role, part)
    if not isinstance(part, dict):
        raise RowRefused("content part that is neither text nor an object")
    name = first_of(part, "type") or "text"
    kind = PART_KINDS.get(name) if isinstance(name, str) else None
    if kind is None:
        note = f"rows with the unknown content part {shown(name)} are skipped"
        raise RowRefused("content part of an unknown type", note)
    if kind == "media":
        raise RowRefused(f"content part that is not text: {name}")
    if kind == "result":
        return tool_turn(part, first_of(part, "content", "value", "text", "output"), names)
    if kind == "call":
        held = first_of(part, "value", "function", "tool_call", "function_call", "text")
        return Turn(role, "", calls=read_calls(part if held is None else held, names, part))
    if kind == "reasoning":
        thoughts = first_of(part, "value", "text", "content", *REASONING)
        return Turn(role, "", reasoning=text_only(thoughts, "reasoning that is not text"))
    return Turn(role, text_only(first_of(part, "text", "value", "content"), NO_TEXT))


def tool_turn(turn: dict, content: object, names: dict[str, str]) -> Turn:
    """A tool's result. What is no text becomes the JSON text that the tool would have written."""
    name = first_of(turn, "name")
    if not isinstance(name, str):
        name = names.get(answered_call(turn), "")
    if isinstance(content, list) and all(is_part(part) for part in content):
        pieces = [read_part(part, "tool", names) for part in content]
        if any(piece.calls or piece.reasoning for piece in pieces):
            raise RowRefused(FOREIGN_PART)
        content = "\n".join(piece.content for piece in pieces)
        name = name or next((piece.name for piece in pieces if piece.name), "")
    if isinstance(content, dict | list):
        content = json.dumps(content, ensure_ascii=False)
    return Turn("tool", text_only(content, NO_TEXT), name=name)


def answered_call(turn: dict) -> str:
    """The id of the call whose result this is; empty where it does not say."""
    known = first_of(turn, "tool_call_id", "tool_use_id", "call_id")
    return known if isinstance(known, str) else ""


def in_call_order(results: list[dict], names: dict[str, str]) -> list[dict]:
    """Neighbouring results in the order of their calls, if each says which call it answers."""
    places = {known: place for place, known in enumerate(names)}
    if any(answered_call(turn) not in places for turn in results):
        return results
    return sorted(results, key=lambda turn: places[answered_call(turn)])


def is_part(part: object) -> bool:
    return isinstance(part, str) or (isinstance(part, dict) and isinstance(part.get("type"), str))


def read_calls(
    value: object, names: dict[str, str], part: dict | None = None
) -> tuple[ToolCall, ...]:
    """The calls of a list, one object, or the JSON text of either; ``part`` may hold the id."""
    if isinstance(value, str):
        value = parsed_call(value)
    listed = value if isinstance(value, list) else [value]
    if not listed:
        raise RowRefused(NO_CALL)
    return tuple(read_call(one, names, part or {}) for one in listed)


def parsed_call(text: str) -> object:
    quoted = QUOTED.fullmatch(text)
    try:
        if quoted:
            return {"name": json.loads(quoted[1]), "arguments": quoted[2]}
        return json.loads(text, strict=False)
    except ValueError as error:
        raise RowRefused(NO_CALL) from error


def read_call(one: object, names: dict[str, str], part: dict) -> ToolCall:
    if isinstance(one, str):
        one = parsed_call(one)
    if not isinstance(one, dict):
        raise RowRefused(NO_CALL)
    inner = one.get("function")
    call = inner if isinstance(inner, dict) else one
    name = call.get("name")
    if not isinstance(name, str) or not name:
        raise RowRefused(NO_CALL)
    known = first_of({**part, **one}, "id", "tool_call_id", "call_id")
    if isinstance(known, str):
        names.pop(known, None)  # some count anew in every turn: the last one's place counts
        names[known] = name
    return ToolCall(name, arguments_of(first_of(call, "arguments", "parameters", "input")))


def arguments_of(value: object) -> str:
    """JSON text of an object; text that is one already stays as the row spells it."""
    if value is None or value == "":
        return "{}"
    text = value if isinstance(value, str) else ""
    try:
        if text:
            value = json.loads(text, strict=False)
            json.loads(text)
    except ValueError:
        if value is text:  # no JSON at all; else raw tabs or newlines inside strings
            raise RowRefused(NO_ARGUMENTS) from None
        text = ""
    if not isinstance(value, dict):
        raise RowRefused(NO_ARGUMENTS)
    if "\\u" in text:  # an escape may hide half a surrogate pair
        refuse_broken(json.dumps(value, ensure_ascii=False))
    return text or json.dumps(value, ensure_ascii=False)


def refuse_broken(text: str) -> None:
    """Refuse text that no tokenizer takes as it stands: it could be neither kept nor dropped."""
    if "\0" in text:
        raise RowRefused("NUL character in the text")
    try:
        text.encode()
    except UnicodeEncodeError as error:  # half a surrogate pair
        raise RowRefused("broken characters in the text") from error
