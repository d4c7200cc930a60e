"""An OpenAI-compatible server (vLLM, SGLang) asked over HTTP: tries, waits, and when to give up.

What a request comes to: an answer; RowRefused, the server does not take this prompt; GaveUp, it
failed however often it was tried; JobError, no request can go well.
"""

import asyncio
import os
import random
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, TypeVar

import httpx

from conf.schema import ConfigError, JobError, RunConfig
from data.dialects import RowRefused
from data.records import Turn
from data.render import messages
from data.turns import refuse_broken
from models.sampling import Sampling

Result = TypeVar("Result")
BACKOFF, LONGEST = 0.5, 30.0  # seconds before the second try, doubled each time, and at most
CONNECT = 10.0  # seconds until a connection must stand
REFUSALS = {400, 413, 422}  # this prompt, not the server
TRANSIENT = {408, 425, 429}  # besides 5xx
BROKEN_OFF = {None, "abort", "error"}  # finish reasons of answers that the server did not finish
SHOWN = 300  # characters of what a server says


class GaveUp(Exception):
    """A request failed at every try; says how the last one did."""


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


class ChatClient:
    """One server and one model on it. Use inside ``async with``."""

    def __init__(self, cfg: RunConfig, model: str | None = None):
        self.section = cfg.regenerate
        self.template_kwargs = dict(cfg.data.template_kwargs)
        self.model = model
        self.in_a_row = 0  # requests that failed since the last answer
        self.refused = 0  # before the first answer
        self.answers = 0
        key = os.environ[self.section.api_key_env] if self.section.api_key_env else ""
        self.http = httpx.AsyncClient(
            base_url=address_of(self.section.base_url or ""),
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=httpx.Timeout(self.section.timeout, connect=CONNECT),
            limits=httpx.Limits(max_connections=self.section.concurrency),
        )

    async def __aenter__(self) -> "ChatClient":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.http.aclose()

    async def served(self) -> list[str]:
        """The models the server names. Raises JobError where it does not answer."""
        try:
            return await self._ask("GET", "models", None, models_of)
        except (GaveUp, RowRefused) as error:
            raise self._job_error(str(error), "see that the server runs there") from error

    async def chat(self, turns: list[Turn], sampling: Sampling, seed: int) -> Reply:
        """The model's answer to ``turns``. Raises as the module says."""
        body = {
            "model": self.model,
            "messages": [wire(message) for message in messages(tuple(turns))],
            "max_tokens": self.section.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            # Servers take what is left out from the model's generation_config.json.
            "top_k": -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "stream": False,
            "return_token_ids": True,  # vLLM's; others leave it unread
        }
        if not sampling.greedy:
            body["seed"] = seed
        if self.template_kwargs:
            body["chat_template_kwargs"] = self.template_kwargs
        try:
            reply = await self._ask("POST", "chat/completions", body, reply_of)
        except GaveUp as error:
            self.in_a_row += 1
            if self.in_a_row >= self.section.breaker:
                tried = f"failed, each {self.section.retries + 1} times"
                raise self._stopped(self.in_a_row, tried, str(error)) from error
            raise
        except RowRefused as refusal:
            # Long prompts are refused before others are answered; but when so many are and none
            # is answered, it is not the prompts that the server dislikes.
            self.refused += not self.answers
            if self.refused >= self.section.breaker + 2 * self.section.concurrency:
                last = refusal.note or refusal.reason
                raise self._stopped(self.refused, "were refused", last) from refusal
            raise
        self.in_a_row = 0
        self.answers += 1
        return reply

    def _stopped(self, count: int, what: str, last: str) -> JobError:
        return self._job_error(
            f"{count} requests one after the other {what} (the last: {last})",
            "see to the server and run the same command again, what is finished is kept",
        )

    async def _ask(
        self, method: str, path: str, body: dict[str, Any] | None, read: Callable[[Any], Result]
    ) -> Result:
        failure = ""
        wait = 0.0
        for attempt in range(self.section.retries + 1):
            await asyncio.sleep(wait)
            wait = min(LONGEST, BACKOFF * 2**attempt) * random.uniform(0.5, 1.5)
            try:
                response = await self.http.request(method, path, json=body)
                if response.is_success:
                    return read(response.json())
            except RowRefused:
                raise
            except httpx.RequestError as error:  # no connection, cut off, timed out
                failure = f"{type(error).__name__} {error}".strip()
            except (KeyError, IndexError, TypeError, ValueError) as error:
                failure = f"the reply is not what the protocol says ({error!r})"
            else:
                failure = told(response)
                self._judge(response, path)
                wait = max(wait, min(retry_after(response), self.section.timeout))
        raise GaveUp(failure)

    def _judge(self, response: httpx.Response, path: str) -> None:
        """Raise unless another try may go well."""
        status = response.status_code
        if status in REFUSALS:
            raise RowRefused(f"refused by the server with status {status}", told(response))
        if status < 500 and status not in TRANSIENT:
            raise self._job_error(
                f"answers {told(response)} to {path}",
                "see to the address, regenerate.model and regenerate.api_key_env",
            )

    def _job_error(self, what: str, way_out: str) -> JobError:
        return JobError(f"regenerate.base_url={self.section.base_url}: {what}; {way_out}")


def address_of(text: str) -> httpx.URL:
    """Raises ConfigError for what begins as an address and is none."""
    try:
        return httpx.URL(text.rstrip("/") + "/")
    except httpx.InvalidURL as error:
        raise ConfigError(
            f"regenerate.base_url={text}: is no address ({error}); write it as http://HOST:PORT/v1"
        ) from error


def wire(message: dict[str, Any]) -> dict[str, Any]:
    """vLLM reads thoughts under a name of its own."""
    thoughts = message.get("reasoning_content")
    return {**message, "reasoning": thoughts} if thoughts else message


def models_of(body: Any) -> list[str]:
    return [str(model["id"]) for model in body["data"]]


def reply_of(body: Any) -> Reply:
    """Read a chat completion. Raises RowRefused for a tool call, an answer held back and one of
    broken characters, and KeyError, IndexError, TypeError or ValueError for what is no
    finished answer."""
    choice = body["choices"][0]
    message = choice["message"]
    finish = choice["finish_reason"]
    if finish in BROKEN_OFF:
        raise ValueError(f"finish_reason {finish}")
    if finish == "tool_calls" or message.get("tool_calls"):
        raise RowRefused("a tool call in place of an answer")
    if finish not in ("stop", "length"):
        raise RowRefused(f"answer ended by the server: finish_reason {finish}")
    usage = body.get("usage") or {}
    ids = integers(choice.get("token_ids"))
    return Reply(
        content=text_of(message.get("content")),
        reasoning=text_of(message.get("reasoning") or message.get("reasoning_content")),
        cut=finish == "length",
        ids=ids,
        prompt_ids=integers(body.get("prompt_token_ids")),
        tokens=int(usage.get("completion_tokens") or len(ids)),
        prompt_tokens=int(usage.get("prompt_tokens") or 0),
    )


def text_of(value: object) -> str:
    if value is None:
        return ""
    if not isinstance(value, str):
        raise TypeError("content is no text")
    refuse_broken(value)
    return value


def integers(value: Any) -> list[int]:
    return [int(item) for item in value or []]


def told(response: httpx.Response) -> str:
    """Status and the server's own words, on one line."""
    try:
        body = response.json()
        error = body.get("error", body)
        words = error.get("message", error) if isinstance(error, dict) else error
    except (ValueError, AttributeError):
        words = response.text
    line = " ".join(str(words).split())
    return f"{response.status_code} {response.reason_phrase}: {line[:SHOWN]}".rstrip(": ")


def retry_after(response: httpx.Response) -> float:
    """Seconds that the server asks to wait: its header holds them, or a date."""
    value = response.headers.get("retry-after", "")
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        return max(0.0, (parsedate_to_datetime(value) - datetime.now(UTC)).total_seconds())
    except (ValueError, TypeError):
        return 0.0
