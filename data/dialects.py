"""One row of a conversation file, in any dialect we read, as a Conversation; or the reason why not.

Dialects: ``messages`` or ``conversations`` holding turns of role/content (text, or a list of text
parts) or of from/value (ShareGPT). Keys read beside it: id, system, task, greedy, cut, answer_ids.
Rules for what people hand in:

- a role name outside ROLES is the assistant's (people put the model's name there) when it is the
  row's only unknown one, no other turn is the assistant's, and each of its turns follows a user
  turn; any other unknown name skips the row. A note is printed once a name, either way.
- assistant turns before the first user turn answer nothing and are left out; so are turns after
  the last answer, and system turns without text.
- two turns of one role in a row are merged, with a blank line between.
- tool calls, tool results, reasoning parts and images skip the row: dropping them would change
  what the answer answers.
"""

from dataclasses import dataclass, field, replace

from data.records import Conversation, Turn

ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "bot": "assistant",
}
TOOL_ROLES = {"tool", "function", "function_call", "tool_call", "observation", "ipython"}
NO_ANSWER = "no answer"


class RowRefused(ValueError):
    """A row that cannot become a sample: the reason to count it under, and a note to print once."""

    def __init__(self, reason: str, note: str = ""):
        super().__init__(reason)
        self.reason = reason
        self.note = note


@dataclass
class Reading:
    """A conversation, what was changed on the way, and what a person should be told once."""

    conversation: Conversation
    changes: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def read_row(value: object, where: str, prompts: bool = False) -> Reading:
    """Turn one decoded record into a conversation. Raises RowRefused with the reason.

    ``where`` names the row when it has no id. With ``prompts`` it needs no answer and is cut
    after its last user turn.
    """
    if not isinstance(value, dict):
        raise RowRefused("not a JSON object")
    reading = Reading(Conversation(row_id(value, where), ()))
    turns = known_turns(raw_turns(value), reading)
    turns = worth_reading(turns, "user" if prompts else "assistant", reading)
    turns = merged(turns, reading)
    reading.conversation = replace(
        reading.conversation,
        turns=tuple(turns),
        task=text_of_key(value, "task"),
        greedy=value.get("greedy") is True,
        cut=value.get("cut") is True,
        answer_ids=answer_ids(value),
    )
    return reading


def row_id(value: dict, where: str) -> str:
    name = value.get("id")
    return str(name) if isinstance(name, str | int) and str(name) else where


def text_of_key(value: dict, key: str) -> str:
    text = value.get(key)
    return text if isinstance(text, str) else ""


def answer_ids(value: dict) -> tuple[tuple[int, ...], ...]:
    """The ids of each answer at the end of the row; a flat list is the last answer's."""
    listed = value.get("answer_ids")
    if listed is None or listed == []:
        return ()
    if isinstance(listed, list) and all(type(i) is int for i in listed):
        listed = [listed]
    whole = isinstance(listed, list) and all(
        isinstance(ids, list) and ids and all(type(i) is int and i >= 0 for i in ids)
        for ids in listed
    )
    if not whole:
        raise RowRefused("answer_ids is no list of token ids")
    return tuple(tuple(ids) for ids in listed)


def raw_turns(value: dict) -> list[Turn]:
    """The turns under the names the file uses, contents as text."""
    listed = first_of(value, "messages", "conversations")
    if not isinstance(listed, list) or not listed:
        raise RowRefused("no turns")
    if value.get("tools") not in (None, "", "[]", []):
        raise RowRefused("tools")
    turns = [raw_turn(turn) for turn in listed]
    system = text_of_key(value, "system")
    if system and turns[0].role not in ("system", "developer"):
        turns.insert(0, Turn("system", system))
    return turns


def raw_turn(turn: object) -> Turn:
    role = first_of(turn, "role", "from") if isinstance(turn, dict) else None
    if not isinstance(turn, dict) or not isinstance(role, str):
        raise RowRefused("turn without a role")
    if first_of(turn, "tool_calls", "function_call") or role.strip().lower() in TOOL_ROLES:
        raise RowRefused("tool call or tool result")
    if first_of(turn, "reasoning_content", "thinking", "reasoning"):
        raise RowRefused("reasoning apart from the text")
    content = first_of(turn, "content", "value")
    if isinstance(content, list):
        content = "\n".join(part_text(part) for part in content)
    if not isinstance(content, str):
        raise RowRefused("turn without text")
    if not content.isascii() and any("\ud800" <= letter <= "\udfff" for letter in content):
        raise RowRefused("broken characters in the text")  # half a surrogate pair, or no UTF-8
    return Turn(role, content)


def first_of(value: dict, *keys: str) -> object:
    """The first of ``keys`` that is there and not null (tables hold every key in every row)."""
    return next((value[key] for key in keys if value.get(key) is not None), None)


def part_text(part: object) -> str:
    """The text of a string or of a typed part, ``{"type": "text", "text": ...}`` (or ``value``)."""
    if isinstance(part, str):
        return part
    if isinstance(part, dict) and part.get("type", "text") == "text":
        text = part.get("text", part.get("value"))
        if isinstance(text, str):
            return text
    raise RowRefused("content part that is not text")


def known_turns(turns: list[Turn], reading: Reading) -> list[Turn]:
    """Give every turn one of the three roles."""
    names = [ROLES.get(turn.role.strip().lower(), "") for turn in turns]
    unknown = {turn.role for turn, name in zip(turns, names, strict=True) if not name}
    if unknown:
        answers = all(i > 0 and names[i - 1] == "user" for i, name in enumerate(names) if not name)
        name = shown(min(unknown))
        if len(unknown) > 1 or "assistant" in names or not answers:
            raise RowRefused("unknown role", f"rows with the unknown role {name} are skipped")
        reading.changes.append("unknown role taken as the assistant's")
        reading.notes.append(f"the unknown role {name} is taken as the assistant's")
    return [Turn(name or "assistant", t.content) for name, t in zip(names, turns, strict=True)]


def shown(name: str) -> str:
    return repr(name if len(name) <= 40 else name[:39] + "…")


def worth_reading(turns: list[Turn], last: str, reading: Reading) -> list[Turn]:
    """Leave out what answers nothing at the start and what is not answered at the end."""
    kept = [turn for turn in turns if turn.role != "system" or turn.content.strip()]
    if len(kept) < len(turns):
        reading.changes.append("system turn without text left out")
    first = next((i for i, turn in enumerate(kept) if turn.role == "user"), None)
    if first is None:
        raise RowRefused("no user turn")
    opening = [turn for turn in kept[:first] if turn.role == "system"]
    if len(opening) < first:
        reading.changes.append("starts with the assistant: those turns left out")
    end = max((i for i, turn in enumerate(kept) if turn.role == last), default=-1)
    if end < first:
        raise RowRefused(NO_ANSWER)
    if end + 1 < len(kept) and last == "assistant":
        reading.changes.append("turns after the last answer left out")
    kept = opening + kept[first : end + 1]
    if any(not turn.content.strip() for turn in kept):
        raise RowRefused("empty turn")
    return kept


def merged(turns: list[Turn], reading: Reading) -> list[Turn]:
    """Join neighbours of one role with a blank line."""
    out: list[Turn] = []
    for turn in turns:
        if out and out[-1].role == turn.role:
            out[-1] = Turn(turn.role, f"{out[-1].content}\n\n{turn.content}")
        else:
            out.append(turn)
    if len(out) < len(turns):
        reading.changes.append("two turns of one role merged")
    return out
