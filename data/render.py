"""A verifier's chat template: turns rendered to text, its markers, its special tokens, its hash."""

import hashlib
import json
import re
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from jinja2.exceptions import TemplateError
from transformers.tokenization_utils_base import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from conf.schema import ConfigError
from data.dialects import RowRefused
from data.records import Turn

Turns = tuple[Turn, ...]
Span = tuple[int, int]  # of characters: the first, and the one after the last
REFUSED = "refused by the chat template"
GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
# What a template can raise on turns it was not written for: its own refusal, or Python's errors.
TEMPLATE_ERRORS = (TemplateError, TypeError, ValueError, LookupError, AttributeError)


@dataclass(frozen=True)
class ChatTemplate:
    """A tokenizer's chat template together with the arguments it is rendered with.

    Raises ConfigError when the tokenizer has none; every render raises RowRefused when the
    template cannot take the turns.
    """

    tokenizer: PreTrainedTokenizerBase
    kwargs: dict[str, Any]

    @cached_property
    def text(self) -> str:
        try:
            return self.tokenizer.get_chat_template()
        except ValueError as error:
            raise ConfigError(
                f"verifier.path={self.tokenizer.name_or_path}: its tokenizer has no chat template; "
                "save one as chat_template.jinja in that folder"
            ) from error

    @property
    def has_markers(self) -> bool:
        return bool(GENERATION.search(self.text))

    def whole(self, turns: Turns) -> str:
        """``turns`` as a finished conversation."""
        return self._render(turns, add_generation_prompt=False)

    def prompt(self, turns: Turns) -> str:
        """``turns`` and the header after which the verifier answers."""
        return self._render(turns, add_generation_prompt=True)

    def _render(self, turns: Turns, add_generation_prompt: bool) -> str:
        text, names = self.text, self.names
        try:
            # What apply_chat_template calls; its own checks and listings cost as much again.
            rendered: Any = render_jinja_template(
                [messages(turns)],
                chat_template=text,
                add_generation_prompt=add_generation_prompt,
                **names,
            )
        except TEMPLATE_ERRORS as error:
            raise refused(error) from error
        return rendered[0][0]  # texts and markers, one a conversation

    @cached_property
    def names(self) -> dict[str, Any]:
        """What the template may use by name: the special tokens, and the arguments over them."""
        return {**self.tokenizer.special_tokens_map, **self.kwargs}

    def marked(self, turns: Turns) -> list[Span]:
        """The spans of ``whole(turns)`` between the template's generation markers."""
        text, names = self.text, self.names
        try:
            result: Any = render_jinja_template(
                [messages(turns)],
                chat_template=text,
                return_assistant_tokens_mask=True,
                **names,
            )
        except TEMPLATE_ERRORS as error:
            raise refused(error) from error
        _, spans = result  # texts and spans, one a conversation; the library declares a string
        return spans[0]

    @property
    def special(self) -> re.Pattern[str]:
        return special_tokens(self.tokenizer)

    @property
    def origin(self) -> str:
        """Where a person finds the template."""
        folder = Path(self.tokenizer.name_or_path)
        name = "chat_template.jinja"
        return str(folder / (name if (folder / name).is_file() else "tokenizer_config.json"))

    def fingerprint(self) -> str:
        """Digest of the template's text and arguments."""
        known = json.dumps([self.text, self.kwargs], sort_keys=True, default=str)
        return hashlib.sha256(known.encode()).hexdigest()[:16]


def messages(turns: Turns) -> list[dict[str, str]]:
    return [{"role": turn.role, "content": turn.content} for turn in turns]


def refused(error: Exception) -> RowRefused:
    words = " ".join(str(error).split()) or type(error).__name__
    return RowRefused(REFUSED, f"the chat template refuses rows: {words}")


@lru_cache(maxsize=8)
def special_tokens(tokenizer: PreTrainedTokenizerBase) -> re.Pattern[str]:
    """Matches any special token, longer ones first (the tokenizer needs a second to list them)."""
    added = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
    words = sorted(added | set(tokenizer.all_special_tokens), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, words)) or "(?!)")


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
