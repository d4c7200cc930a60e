"""Where a row keeps its turns: in a list, in one text, or prompt and answer under two keys."""

import re

from data.turns import NO_TEXT, REASONING, RowRefused, first_of, text_only

TURN_LISTS = ("messages", "conversations", "conversation")
PAIRS = (
    *(("instruction", "output"), ("instruction", "response")),
    *(("prompt", "response"), ("prompt", "completion"), ("prompt", "answer")),
    *(("question", "answer"), ("question", "response"), ("input", "output")),
)
GLAIVE = re.compile(r"(?:\A|\n\n+)\s*(USER|ASSISTANT|FUNCTION RESPONSE):[ \n]*")
GLAIVE_ROLES = {"USER": "user", "ASSISTANT": "assistant", "FUNCTION RESPONSE": "tool"}


def text_of_key(value: dict, *keys: str) -> str:
    text = first_of(value, *keys)
    return text if isinstance(text, str) else ""


def raw_turns(value: dict) -> list:
    """The row's turns under the names the file uses. Raises RowRefused when it has none."""
    listed = first_of(value, *TURN_LISTS)
    if listed is None and isinstance(value.get("chat"), str):
        listed = glaive_turns(value["chat"], text_of_key(value, "system"))
    elif listed is None:
        listed = pair_turns(value)
    if not isinstance(listed, list) or not listed:
        raise RowRefused("no turns")
    return listed


def glaive_turns(text: str, system: str) -> list:
    """The turns of a glaive chat; text before the first marker makes it none."""
    before, *pieces = GLAIVE.split(text)
    opening = system.removeprefix("SYSTEM:").strip()  # it lists the tools, and stays as it is
    turns = [{"role": "system", "content": opening}] if opening else []
    for name, said in zip(pieces[::2], pieces[1::2], strict=True):
        content, _, call = said.replace("<|endoftext|>", "").strip().partition("<functioncall>")
        turns.append({"role": GLAIVE_ROLES[name], "content": content.strip()})
        if call:
            turns[-1]["function_call"] = call.strip()
    return turns if not before.strip() else []


def pair_turns(value: dict) -> list:
    """The turns of a row that keeps prompt and answer under keys of their own."""
    asked = [pair for pair in PAIRS if value.get(pair[0]) is not None]
    whole = [pair for pair in asked if value.get(pair[1]) is not None]
    if not asked:
        return []
    ask, answer = (whole or asked)[0]
    prompt = value[ask]
    if ask == "instruction" and isinstance(prompt, str):
        further = first_of(value, "input", "context") or ""
        prompt = "\n\n".join(text for text in (prompt, text_only(further, NO_TEXT)) if text)
    turns: list = []
    history = first_of(value, "history") or []
    if not isinstance(history, list) or any(not is_pair(pair) for pair in history):
        raise RowRefused("history is no list of pairs")
    for pair in history:
        turns += [{"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}]
    turns += prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
    said = value.get(answer)
    if isinstance(said, list):
        return turns + said
    thoughts = {key: value[key] for key in REASONING if value.get(key) is not None}
    return [*turns, {"role": "assistant", "content": said, **thoughts}] if whole else turns


def is_pair(value: object) -> bool:
    return isinstance(value, list) and len(value) == 2
