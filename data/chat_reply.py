"""What a server's reply says, or what is wrong with it, read without trust in its shape."""

import json
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

import httpx

from data.dialects import RowRefused
from data.turns import refuse_broken

BROKEN_OFF = {None, "abort", "error"}  # finish reasons of answers that the server did not finish
SHOWN = 300  # characters of what a server says
MOST = 2**31 - 1  # tokens that a server may count
# What reading a reply of another shape comes to; deeply nested JSON is a RecursionError.
MALFORMED = (KeyError, IndexError, TypeError, ValueError, RecursionError)


class Failed(Exception):
    """One try failed; says how, and for how many seconds the server asks to be left alone."""

    def __init__(self, how: str, wait: float = 0.0):
        super().__init__(how)
        self.wait = wait


@dataclass(frozen=True)
class Reply:
    """An answer as the server tells it; what it does not tell is empty, or 0."""

    content: str
    reasoning: str  # thoughts that the server keeps apart
    cut: bool
    ids: list[int]
    prompt_ids: list[int]
    tokens: int
    prompt_tokens: int


def models_of(body: Any) -> list[str]:
    return [text_of(str(model["id"])) for model in body["data"]]


def body_of(response: httpx.Response) -> Any:
    """Raises Failed with the server's words for an error that it sends as a success."""
    body = json.loads(response.content)
    if isinstance(body, dict) and body.get("error"):
        raise Failed(told(response))
    return body


def reply_of(body: Any) -> Reply:
    """Read a chat completion. Raises RowRefused for a tool call, an answer held back and one of
    broken characters, and KeyError, IndexError, TypeError or ValueError for what is no
    finished answer."""
    choice = table(body["choices"][0])
    message = table(choice["message"])
    finish = choice["finish_reason"]
    if finish in BROKEN_OFF:
        raise ValueError(f"finish_reason {finish}")
    if finish == "tool_calls" or message.get("tool_calls"):
        raise RowRefused("a tool call in place of an answer")
    if finish not in ("stop", "length"):
        raise RowRefused(f"answer ended by the server: finish_reason {one_line(str(finish))}")
    usage = table(body.get("usage") or {})
    ids = integers(choice.get("token_ids"))
    return Reply(
        content=text_of(message.get("content")),
        reasoning=text_of(message.get("reasoning") or message.get("reasoning_content")),
        cut=finish == "length",
        ids=ids,
        prompt_ids=integers(body.get("prompt_token_ids")),
        tokens=count_of(usage.get("completion_tokens")) or len(ids),
        prompt_tokens=count_of(usage.get("prompt_tokens")),
    )


def text_of(value: object) -> str:
    if value is None:
        return ""
    if not isinstance(value, str):
        raise TypeError("content is no text")
    refuse_broken(value)
    return value


def table(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TypeError(f"{type(value).__name__} in place of an object")
    return value


def integers(value: Any) -> list[int]:
    """Token ids as the server tells them; whether the tokenizer has them is not known here."""
    listed = [] if value is None else value
    if not isinstance(listed, list) or any(type(item) is not int for item in listed):
        raise TypeError("token ids are no list of integers")
    return listed


def count_of(value: Any) -> int:
    if value is None:
        return 0
    if type(value) is not int or not 0 <= value <= MOST:
        raise ValueError("usage counts no tokens")
    return value


def told(response: httpx.Response) -> str:
    """Status and the server's own words, on one line."""
    try:
        body = json.loads(response.content)
        error = body.get("error", body)
        words = str(error.get("message", error) if isinstance(error, dict) else error)
    except (ValueError, AttributeError, RecursionError):
        words = response.content.decode(errors="replace")
    return f"{response.status_code} {response.reason_phrase}: {one_line(words)}".rstrip(": ")


def one_line(words: str) -> str:
    """Their beginning, without what could break a line, a terminal or a file."""
    beginning = words[: 10 * SHOWN]
    return " ".join("".join(c if c.isprintable() else " " for c in beginning).split())[:SHOWN]


def retry_after(response: httpx.Response) -> float:
    """Seconds that the server asks to wait: its header holds them, or a date."""
    value = response.headers.get("retry-after", "")
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        return max(0.0, (parsedate_to_datetime(value) - datetime.now(UTC)).total_seconds())
    except (ValueError, TypeError, IndexError, OverflowError):
        return 0.0
