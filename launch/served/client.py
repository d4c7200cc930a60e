"""One vLLM server over HTTP: what it serves, its counters, and one greedy answer after another."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar
from urllib.parse import urlsplit

import httpx

from conf.schema import ConfigError, JobError
from data.chat_reply import MALFORMED, Failed, body_of, integers, one_line, table, text_of, told
from launch.served.counters import Snapshot, read_metrics

Result = TypeVar("Result")
Reader = Callable[[httpx.Response], Result]
LOCAL = ("127.0.0.1", "localhost", "::1")
CONNECT = 10.0  # seconds until a connection must stand
SETTLE, PAUSE = 10.0, 0.05  # seconds that counters may lag behind an answer; between two looks
TOKEN = "token_id:"  # what vLLM calls a token by its id
TOP = 5  # tokens whose logprobs are told, which every server allows
# Servers take what is left out from the model's generation_config.json.
GREEDY = {"temperature": 0.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}


@dataclass(frozen=True)
class ServedModel:
    name: str
    root: str | None  # folder or hub name of its weights, where the server tells it
    max_len: int | None  # positions


@dataclass(frozen=True)
class Ends:
    """What ends an answer."""

    tokens: int
    stop_ids: list[int] = field(default_factory=list)
    stop: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Replied:
    prompt_ids: list[int]  # as the server read the prompt
    ids: list[int]  # of the answer, its end token too
    seconds: float


class ServedClient:
    """Raises JobError where the server fails to answer, ConfigError where it cannot be used."""

    def __init__(self, url: str, timeout: float, key: str = ""):
        self.url = url
        self.http = httpx.Client(
            base_url=url,
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=httpx.Timeout(timeout, connect=CONNECT),
            trust_env=urlsplit(url).hostname not in LOCAL,  # no proxy leads back to this machine
        )
        self.model = ServedModel("", None, None)

    def __enter__(self) -> "ServedClient":
        self.model = self.served_model()
        return self

    def __exit__(self, *_: object) -> None:
        self.http.close()

    def served_model(self) -> ServedModel:
        """The server's first model: the one it was started with, adapters come after it."""
        try:
            return self._try("GET", "/v1/models", None, model_of)
        except Failed as error:
            raise ConfigError(
                f"{self.url}: no vLLM server answers there ({error}); give the address of one that "
                "runs, as http://HOST:PORT"
            ) from error

    def counters(self) -> Snapshot:
        return self._ask("GET", "/metrics", None, lambda reply: read_metrics(reply.text))

    def settled(self, before: Snapshot, tokens: int) -> Snapshot:
        """The counters once they hold ``tokens`` more: they follow an answer by a moment."""
        until = time.monotonic() + SETTLE
        while (now := self.counters()).generated - before.generated < tokens:
            if time.monotonic() > until:
                raise JobError(
                    f"{self.url}: its counters hold {now.generated - before.generated} of the "
                    f"{tokens} tokens just answered; give the address of one server, not of "
                    "several behind a balancer"
                )
            time.sleep(PAUSE)
        return now

    def rendered(
        self, messages: list[dict[str, Any]], arguments: dict[str, Any]
    ) -> list[int] | None:
        """The ids that the server's own template makes; None where it does not tell them."""
        body = {"model": self.model.name, "messages": messages, "add_generation_prompt": True}
        if arguments:
            body["chat_template_kwargs"] = arguments
        try:
            return self._try("POST", "/tokenize", body, ids_of)
        except Failed:
            return None

    def complete(self, prompt_ids: list[int], ends: Ends) -> Replied:
        """The greedy answer to a prompt of token ids, which no template touches."""
        body = {"prompt": prompt_ids, **self._limits(ends)}
        return self._timed("/v1/completions", body)

    def chat(self, messages: list[dict[str, Any]], ends: Ends) -> Replied:
        """The greedy answer to messages, rendered as the server does for everybody."""
        return self._timed("/v1/chat/completions", {"messages": messages, **self._limits(ends)})

    def gap(self, prompt_ids: list[int], one: int, other: int) -> float:
        """Nats between two tokens after a prompt; infinite when one of them is far down."""
        body = {"prompt": prompt_ids, **self._limits(Ends(1))}
        body |= {"logprobs": TOP, "return_tokens_as_token_ids": True}
        logprobs = self._ask("POST", "/v1/completions", body, first_logprobs)
        far = -math.inf
        gap = abs(logprobs.get(one, far) - logprobs.get(other, far))
        return math.inf if math.isnan(gap) else gap

    def _limits(self, ends: Ends) -> dict[str, Any]:
        limits = {
            "model": self.model.name,
            "max_tokens": ends.tokens,
            "stop_token_ids": ends.stop_ids,
            "return_token_ids": True,
            **GREEDY,
        }
        if ends.stop:
            limits |= {"stop": ends.stop, "include_stop_str_in_output": True}
        return limits

    def _timed(self, path: str, body: dict[str, Any]) -> Replied:
        begin = time.monotonic()
        reply = self._ask("POST", path, body, answer_of)
        return replace(reply, seconds=time.monotonic() - begin)

    def _ask(
        self, method: str, path: str, body: dict[str, Any] | None, read: Reader[Result]
    ) -> Result:
        try:
            return self._try(method, path, body, read)
        except Failed as error:
            raise JobError(
                f"{self.url}{path}: {error}; see to the server and run the same command again"
            ) from error

    def _try(
        self, method: str, path: str, body: dict[str, Any] | None, read: Reader[Result]
    ) -> Result:
        """Raises Failed, with the server's own words where it has some."""
        try:
            response = self.http.request(method, path, json=body)
            if not response.is_success:
                raise Failed(told(response))
            return read(response)
        except ConfigError:
            raise
        except httpx.HTTPError as error:  # no connection, cut off, too late
            raise Failed(one_line(f"{type(error).__name__} {error}")) from error
        except MALFORMED as error:
            raise Failed(f"the reply is not what vLLM's are ({one_line(repr(error))})") from error


def address_of(text: str, option: str) -> str:
    """http://HOST:PORT of what a person typed. Raises ConfigError for another thing."""
    found = text.rstrip("/").removesuffix("/v1")
    try:
        parts = httpx.URL(found)
    except httpx.InvalidURL as error:
        raise ConfigError(f"{option}={text}: is no address ({error})") from error
    if parts.scheme not in ("http", "https") or not parts.host:
        raise ConfigError(f"{option}={text}: is no address; write it as http://HOST:PORT")
    return found


def model_of(reply: httpx.Response) -> ServedModel:
    first = table(body_of(reply)["data"][0])
    root, longest = first.get("root"), first.get("max_model_len")
    return ServedModel(
        name=text_of(first["id"]),
        root=root if isinstance(root, str) else None,
        max_len=longest if type(longest) is int else None,
    )


def ids_of(reply: httpx.Response) -> list[int]:
    return integers(body_of(reply)["tokens"])


def answer_of(reply: httpx.Response) -> Replied:
    """A completion of text or of chat; vLLM tells the prompt's ids in one place or the other."""
    body = body_of(reply)
    choice = table(body["choices"][0])
    prompt = choice.get("prompt_token_ids") or body.get("prompt_token_ids")
    ids = integers(choice.get("token_ids"))
    if not ids or not prompt:
        raise ValueError("no token ids in it, which vLLM tells from version 0.10.2 on")
    return Replied(integers(prompt), ids, 0.0)


def first_logprobs(reply: httpx.Response) -> dict[int, float]:
    """Token id -> logprob of the likeliest first tokens of an answer."""
    told_here = body_of(reply)["choices"][0]["logprobs"]["top_logprobs"][0]
    named = {name: value for name, value in table(told_here).items() if name.startswith(TOKEN)}
    return {int(name.removeprefix(TOKEN)): float(value) for name, value in named.items()}
