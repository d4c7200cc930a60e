"""An OpenAI-compatible server (vLLM, SGLang) asked over HTTP: tries, waits, and when to give up.

What a request comes to: an answer; RowRefused, the server does not take this prompt; GaveUp, it
failed however often it was tried; JobError, no request can go well.
"""

import asyncio
import os
import random
from collections.abc import Callable
from typing import Any, TypeVar

import httpx

from conf.schema import ConfigError, JobError, RunConfig
from data.chat_reply import (
    MALFORMED,
    Failed,
    Reply,
    body_of,
    models_of,
    one_line,
    reply_of,
    retry_after,
    told,
)
from data.dialects import RowRefused
from data.records import Turn
from data.render import messages
from models.sampling import Sampling

Result = TypeVar("Result")
BACKOFF, LONGEST = 0.5, 30.0  # seconds before the second try, doubled each time, and at most
CONNECT = 10.0  # seconds until a connection must stand
REFUSALS = {400, 413, 422}  # this prompt, not the server
TRANSIENT = {408, 425, 429}  # besides 5xx
LARGEST = 64 << 20  # bytes of a reply; 128K tokens with text and ids come to some 2 MiB


class GaveUp(Exception):
    """A request failed at every try; says how the last one did."""


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
            # Packed, a small reply could be a large one.
            headers={"Accept-Encoding": "identity"}
            | ({"Authorization": f"Bearer {key}"} if key else {}),
            timeout=httpx.Timeout(None, connect=CONNECT),  # the whole request has a limit below
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
                return await self._try(method, path, body, read)
            except Failed as error:
                failure = str(error)
                wait = max(wait, min(error.wait, self.section.timeout))
        raise GaveUp(failure)

    async def _try(
        self, method: str, path: str, body: dict[str, Any] | None, read: Callable[[Any], Result]
    ) -> Result:
        """Raises Failed where another try may go well, else RowRefused or JobError."""
        limit = self.section.timeout
        try:
            # httpx would count from byte to byte, and a reply that drips would never be late.
            async with asyncio.timeout(limit):
                response = await self._fetch(method, path, body)
            if response.is_success:
                return read(body_of(response))
        except RowRefused:
            raise
        except TimeoutError as error:
            raise Failed(f"no whole reply within regenerate.timeout={limit:g} seconds") from error
        except httpx.RequestError as error:  # no connection, cut off
            raise Failed(one_line(f"{type(error).__name__} {error}")) from error
        except MALFORMED as error:
            what = one_line(repr(error))
            raise Failed(f"the reply is not what the protocol says ({what})") from error
        self._judge(response, path)
        raise Failed(told(response), retry_after(response))

    async def _fetch(self, method: str, path: str, body: dict[str, Any] | None) -> httpx.Response:
        """The reply with all of its body. Raises RowRefused for one too large to be an answer."""
        content = bytearray()
        async with self.http.stream(method, path, json=body) as response:
            packed = response.headers.get("content-encoding", "identity")
            if packed != "identity":
                raise ValueError(f"content-encoding {packed} was not asked for")
            async for part in response.aiter_raw():
                content += part
                if len(content) > LARGEST:
                    raise RowRefused(f"a reply of more than {LARGEST >> 20} MiB")
        return httpx.Response(
            response.status_code,
            headers=response.headers,
            content=bytes(content),
            extensions=response.extensions,
        )

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
