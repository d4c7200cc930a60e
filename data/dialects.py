"""One row of a conversation file, in any dialect we read, as a Conversation; or the reason why not.

A row is of the first dialect whose keys it holds. Null is the same as absent everywhere.

==============  =============================================================================
token ids       ``input_ids`` with ``loss_mask``, or with ``labels`` (-100: not supervised);
                places where ``attention_mask`` is 0 are left out. Ids are taken as they are.
turns           ``messages``, ``conversations``, ``conversation``: a list of turns of
                ``role``/``content`` or of ``from``/``value`` (ShareGPT)
glaive          ``chat``: text with ``USER:``, ``ASSISTANT:``, ``FUNCTION RESPONSE:`` at the
                start of paragraphs, and ``<functioncall>`` before a call
pairs           the first of layouts.PAIRS: ``instruction`` + ``output`` (Alpaca; ``input`` or
                ``context`` follows the instruction after a blank line), ``prompt`` +
                ``response``, ... Either side may be a list of turns. ``history``: earlier
                pairs. A reasoning key of the row is the answer's.
==============  =============================================================================

Beside them: id, ``system`` or ``system_prompt`` (unless a system turn opens the row), ``tools`` or
``functions`` (a list, or its JSON text; each schema is put under ``function`` where it is not), and
what data.regenerate writes: task, greedy, cut, answer_ids. Other keys are not read.

==============  =============================================================================
roles           ROLES, in any case. ``function_call`` and ``tool_call`` turns are the
                assistant's, their text the call; results are ``tool`` turns.
other roles     the assistant's (people put the model's name there) when it is the row's only
                unknown one, no other turn is the assistant's, and each of its turns follows
                another, not the system's; else the row is skipped. One note a name, either way
content         text, or a list of typed parts: text, reasoning, calls, results. Images and
                other media skip the row by their name. ``<think>`` inside text stays there.
reasoning       a part, or ``reasoning_content``, ``thinking`` or ``reasoning`` of a turn
calls           ``tool_calls`` (OpenAI), ``function_call``, a part. Arguments are an object or
                its JSON text. Call ids only serve to name the tool of a result, and to put
                the results of several calls in the order of the calls.
order           neighbours of one role are merged, with a blank line between, unless that
                moves thoughts or text past what was said before; tool results stay apart
start, end      what stands before the first user turn answers nothing and is left out, system
                turns apart; so are turns after the last answer, and system turns without text
skipped         rows without a user turn or an answer, with a turn without text (tool results
                and calls may have none), with a NUL or half a surrogate pair in any text
==============  =============================================================================
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import groupby
from operator import itemgetter

from data.layouts import TURN_LISTS, raw_turns, text_of_key
from data.records import Conversation, Tokenised, Turn
from data.turns import (
    RowRefused,
    first_of,
    in_call_order,
    joined,
    named,
    read_turn,
    refuse_broken,
    shown,
)

ROLES = {
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("user", "human", "prompter"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "bing", "bard", "bot", "model"), "assistant"),
    **dict.fromkeys(("tool", "function", "observation", "ipython"), "tool"),
    **dict.fromkeys(("tool_result", "tool_response", "function_response"), "tool"),
    **dict.fromkeys(("function_call", "tool_call"), "call"),
}
NO_ANSWER = "no answer"
NO_TOOLS = "tools are no JSON list of objects"
REORDERED = "tool results put in the order of their calls"
NO_MASK = "input_ids without a loss_mask or labels of that length"


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
    reading = Reading(Conversation(row_id(value, where), (), task=text_of_key(value, "task")))
    try:
        if holds_tokens(value) and not prompts:
            reading.conversation = replace(reading.conversation, tokenised=tokens(value, reading))
        else:
            read_turns(value, prompts, reading)
    except RecursionError as error:
        raise RowRefused("nested too deeply") from error
    for text in texts_of(reading.conversation):
        refuse_broken(text)
    return reading


def holds_tokens(value: dict) -> bool:
    """Whether the row is token ids; ids without a mask beside turns are left to the turns."""
    masked = first_of(value, "loss_mask", "labels") is not None
    return value.get("input_ids") is not None and (masked or first_of(value, *TURN_LISTS) is None)


def read_turns(value: dict, prompts: bool, reading: Reading) -> None:
    listed = with_system(raw_turns(value), value)
    names: dict[str, str] = {}
    turns: list[Turn] = []
    for role, run in groupby(zip(roles_of(listed, reading), listed, strict=True), itemgetter(0)):
        said = [turn for _, turn in run]
        told = in_call_order(said, names) if role == "tool" else said
        if told != said and REORDERED not in reading.changes:
            reading.changes.append(REORDERED)
        for turn in told:
            turns += read_turn(turn, role, names)
    turns = worth_reading(turns, "user" if prompts else "assistant", reading)
    together = named(joined(turns, "\n\n"))
    if len(together) < len(turns):
        reading.changes.append("two turns of one role merged")
    ids = () if prompts else answer_ids(value)
    if len(ids) > sum(turn.role == "assistant" for turn in together):
        raise RowRefused("answer_ids for more answers than there are")
    reading.conversation = replace(
        reading.conversation,
        turns=tuple(together),
        greedy=value.get("greedy") is True,
        cut=value.get("cut") is True,
        answer_ids=ids,
        tools=tools_of(value),
    )


def row_id(value: dict, where: str) -> str:
    name = value.get("id")
    return str(name) if isinstance(name, str | int) and str(name) else where


def texts_of(found: Conversation) -> Iterator[str]:
    yield from (found.id, found.task, found.tools)
    for turn in found.turns:
        yield from (turn.content, turn.reasoning, turn.name)
        for call in turn.calls:
            yield from (call.name, call.arguments)


def answer_ids(value: dict) -> tuple[tuple[int, ...], ...]:
    """The ids of each answer at the end of the row; a flat list is the last answer's."""
    listed = value.get("answer_ids")
    if listed is None or listed == []:
        return ()
    if isinstance(listed, list) and all(type(i) is int for i in listed):
        listed = [listed]
    if not isinstance(listed, list) or not all(is_ids(ids) and ids for ids in listed):
        raise RowRefused("answer_ids is no list of token ids")
    return tuple(tuple(ids) for ids in listed)


def is_ids(value: object) -> bool:
    return isinstance(value, list) and all(type(i) is int and i >= 0 for i in value)


def tokens(value: dict, reading: Reading) -> Tokenised:
    """A row of token ids. Raises RowRefused for lists that do not fit each other."""
    ids, mask, labels = (value.get(key) for key in ("input_ids", "loss_mask", "labels"))
    if not isinstance(ids, list) or not is_ids(ids):
        raise RowRefused("input_ids is no list of token ids")
    if mask is None and isinstance(labels, list) and len(labels) == len(ids):
        if any(label not in (-100, i) for label, i in zip(labels, ids, strict=True)):
            raise RowRefused("labels that are neither -100 nor the input_ids")
        mask = [label != -100 for label in labels]
    if not isinstance(mask, list) or len(mask) != len(ids):
        raise RowRefused(NO_MASK)
    if any(m not in (0, 1) for m in mask):
        raise RowRefused("loss_mask holds more than 0 and 1")
    seen = first_of(value, "attention_mask")
    if isinstance(seen, list) and len(seen) == len(ids) and not all(seen):
        reading.changes.append("padding left out")
        ids = [i for i, there in zip(ids, seen, strict=True) if there]
        mask = [m for m, there in zip(mask, seen, strict=True) if there]
    if not any(mask):
        raise RowRefused("token ids of which none is supervised")
    return Tokenised(tuple(ids), tuple(map(bool, mask)))


def tools_of(value: dict) -> str:
    """The schemas as JSON text, in the shape in which a server hands them to the template."""
    listed = first_of(value, "tools", "functions")
    try:
        if isinstance(listed, str):
            listed = json.loads(listed, strict=False) if listed.strip() else None
        listed = [listed] if isinstance(listed, dict) else listed or []
        if not isinstance(listed, list):
            raise RowRefused(NO_TOOLS)
        tools = [json.loads(t, strict=False) if isinstance(t, str) else t for t in listed]
    except RowRefused:
        raise
    except ValueError as error:
        raise RowRefused(NO_TOOLS) from error
    if not all(isinstance(tool, dict) for tool in tools):
        raise RowRefused(NO_TOOLS)
    return json.dumps([schema(tool) for tool in tools], ensure_ascii=False) if tools else ""


def schema(tool: dict) -> dict:
    bare = "name" in tool and "function" not in tool
    return {"type": "function", "function": tool} if bare else tool


def with_system(listed: list, value: dict) -> list:
    system = first_of(value, "system", "system_prompt")
    if system in (None, "", []) or role_name(listed[0]) == "system":
        return listed
    return [{"role": "system", "content": system}, *listed]


def role_name(turn: object) -> str:
    """One of the roles, "call", or "" for an unknown name. Raises RowRefused without a name."""
    role = first_of(turn, "role", "from") if isinstance(turn, dict) else None
    if not isinstance(role, str):
        raise RowRefused("turn without a role")
    return ROLES.get(role.strip().lower(), "")


def roles_of(listed: list, reading: Reading) -> list[str]:
    """The role of every turn. Raises RowRefused for unknown ones that the rule does not cover."""
    names = [role_name(turn) for turn in listed]
    unknown = {
        first_of(turn, "role", "from") for turn, name in zip(listed, names, strict=True) if not name
    }
    if unknown:
        before = ["system", *names]
        answers = all(before[i] != "system" for i, name in enumerate(names) if not name)
        name = shown(min(map(str, unknown)))
        if len(unknown) > 1 or "assistant" in names or not answers:
            raise RowRefused("unknown role", f"rows with the unknown role {name} are skipped")
        reading.changes.append("unknown role taken as the assistant's")
        reading.notes.append(f"the unknown role {name} is taken as the assistant's")
    return [name or "assistant" for name in names]


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
    if any(not (turn.content.strip() or turn.calls or turn.role == "tool") for turn in kept):
        raise RowRefused("empty turn")
    return kept
