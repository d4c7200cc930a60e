"""A verifier's chat template: turns rendered to text, its markers, its special tokens, its hash."""

import hashlib
import json
import re
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from jinja2.exceptions import TemplateError
from transformers.tokenization_utils_base import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from conf.schema import ConfigError
from data.dialects import NO_TOOLS, RowRefused
from data.messages import calls_of, messages, shows_python, with_text_arguments
from data.records import Turn

Turns = tuple[Turn, ...]
Span = tuple[int, int]  # of characters: the first, and the one after the last
REFUSED = "refused by the chat template"
MANY = 64  # lists of tools whose renders are kept at hand
GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
# What a template can raise on turns it was not written for: its own refusal, or Python's errors.
TEMPLATE_ERRORS = (TemplateError, TypeError, ValueError, LookupError, AttributeError)


@dataclass(frozen=True)
class Skeleton:
    """What a template writes around turns of certain roles, and where an answer lies in that."""

    pieces: list[str]  # one before each turn's text, and the closing one
    starts: list[int]  # an answer: from the first character of its text
    ends: list[int]  # an answer: from the one after the last character of its text
    beyond: int  # characters that follow the last answer


@dataclass(frozen=True)
class Shape:
    roles: tuple[str, ...]
    cut: bool


@dataclass(frozen=True)
class ChatTemplate:
    """A tokenizer's chat template together with the arguments it is rendered with.

    Raises ConfigError when the tokenizer has none; every render raises RowRefused when the
    template cannot take the turns.
    """

    tokenizer: PreTrainedTokenizerBase
    kwargs: dict[str, Any]
    tools: str = ""  # JSON list of the tools' schemas
    skeletons: dict[Shape, Skeleton | None] = field(default_factory=dict, compare=False, repr=False)

    @cached_property
    def text(self) -> str:
        tools = self.schemas  # some tokenizers keep a second template, for conversations with tools
        try:
            return self.tokenizer.get_chat_template(tools=tools)
        except ValueError as error:
            raise ConfigError(
                f"verifier.path={self.tokenizer.name_or_path}: its tokenizer has no chat template; "
                "save one as chat_template.jinja in that folder"
            ) from error

    @cached_property
    def schemas(self) -> list[dict[str, Any]] | None:
        """The tools as the template takes them. Raises RowRefused when they are no list of them."""
        try:
            listed = json.loads(self.tools or "null")
        except ValueError as error:
            raise RowRefused(NO_TOOLS) from error
        if listed is None or (
            isinstance(listed, list) and all(isinstance(t, dict) for t in listed)
        ):
            return listed or None
        raise RowRefused(NO_TOOLS)

    def given(self, tools: str) -> "ChatTemplate":
        """The same template with these tools to choose from."""
        if tools == self.tools:
            return self
        if tools not in self.relatives:
            if len(self.relatives) >= MANY:  # every row may bring its own
                self.relatives.clear()
            self.relatives[tools] = ChatTemplate(self.tokenizer, self.kwargs, tools)
        return self.relatives[tools]

    @cached_property
    def relatives(self) -> dict[str, "ChatTemplate"]:
        return {}

    @property
    def has_markers(self) -> bool:
        return bool(GENERATION.search(self.text))

    def whole(self, turns: Turns) -> str:
        """``turns`` as a finished conversation."""
        return self._render(turns)[0][0]

    def prompt(self, turns: Turns) -> str:
        """``turns`` and the header after which the verifier answers."""
        return self._render(turns, prompt=True)[0][0]

    def marked(self, turns: Turns) -> list[Span]:
        """The spans of ``whole(turns)`` between the template's generation markers."""
        return self._render(turns, markers=True)[1][0]

    def _render(self, turns: Turns, prompt: bool = False, markers: bool = False) -> Any:
        """Texts and markers, one a conversation.

        Templates take the arguments of a tool call as an object or as JSON text: the object is
        tried first, and text where that fails or shows as Python writes it.
        """
        template = self.text
        arguments = {**self.names, "tools": self.schemas} if self.schemas else self.names
        spoken = messages(turns)
        forms = [spoken, with_text_arguments(spoken)] if calls_of(spoken) else [spoken]
        failure: Exception | None = None
        for form in forms:
            try:
                # What apply_chat_template calls; its own checks cost half as much again.
                rendered: Any = render_jinja_template(
                    [form],
                    chat_template=template,
                    add_generation_prompt=prompt,
                    return_assistant_tokens_mask=markers,
                    **arguments,
                )
            except TEMPLATE_ERRORS as error:
                failure = failure or error
                continue
            if not shows_python(rendered[0], form):
                return rendered
        raise refused(failure or ValueError("it writes the arguments of tool calls as Python does"))

    @cached_property
    def names(self) -> dict[str, Any]:
        """What the template may use by name: the special tokens, and the arguments over them."""
        return {**self.tokenizer.special_tokens_map, **self.kwargs}

    @property
    def special(self) -> re.Pattern[str]:
        return special_tokens(self.tokenizer)

    def last_special(self, text: str) -> str:
        """The special token that ``text`` ends with, or nothing."""
        words = special_words(self.tokenizer)
        return next((word for word in words if text.endswith(word)), "")

    @property
    def location(self) -> str:
        """Where a person finds the template."""
        folder = Path(self.tokenizer.name_or_path)
        name = "chat_template.jinja"
        return str(folder / (name if (folder / name).is_file() else "tokenizer_config.json"))

    def fingerprint(self) -> str:
        """Digest of the template's text and arguments."""
        several = self.tokenizer.chat_template  # by name, where there is one for tools
        text = several if isinstance(several, dict) else self.text
        known = json.dumps([text, self.kwargs], sort_keys=True, default=str)
        return hashlib.sha256(known.encode()).hexdigest()[:16]


def refused(error: Exception) -> RowRefused:
    words = " ".join(str(error).split()) or type(error).__name__
    refusal = RowRefused(REFUSED, f"the chat template refuses rows: {words}")
    refusal.__cause__ = error
    return refusal


@lru_cache(maxsize=8)
def special_words(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """The special tokens, longer ones first (the tokenizer needs a second to list them)."""
    added = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
    return sorted(added | set(tokenizer.all_special_tokens), key=len, reverse=True)


@lru_cache(maxsize=8)
def special_tokens(tokenizer: PreTrainedTokenizerBase) -> re.Pattern[str]:
    """Matches any special token."""
    return re.compile("|".join(map(re.escape, special_words(tokenizer))) or "(?!)")


def fast_core(tokenizer: PreTrainedTokenizerBase) -> Any:
    """The Rust tokenizer inside, which knows where tokens lie. Raises ConfigError without one."""
    core = getattr(tokenizer, "backend_tokenizer", None)
    if core is None:
        raise ConfigError(
            f"verifier.path={tokenizer.name_or_path}: its tokenizer cannot say where in the text "
            "a token lies; save a fast one (tokenizer.json) in that folder"
        )
    return core


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Digest of everything that decides which ids a text becomes."""
    special = json.dumps(tokenizer.special_tokens_map, sort_keys=True, default=str)
    known = fast_core(tokenizer).to_str() + special
    return hashlib.sha256(known.encode()).hexdigest()[:16]
