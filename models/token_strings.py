"""The tokens of a head's vocabulary as text, by id: a head serves one tokenizer only."""

import json
from pathlib import Path

from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from conf.runtime import say, write_atomically
from conf.schema import ConfigError

FILE, TOKENIZER = "tokens.json", "tokenizer.json"


def token_strings(tokenizer: PreTrainedTokenizerBase) -> list[str | None]:
    """The token of each id, None where there is none: an embedding may have rows to spare."""
    return by_id(tokenizer.get_vocab())


def by_id(vocabulary: dict[str, int]) -> list[str | None]:
    tokens = {index: token for token, index in vocabulary.items()}
    return [tokens.get(index) for index in range(max(tokens, default=-1) + 1)]


def tokens_in(folder: Path) -> list[str | None] | None:
    """The tokens that a folder of a head or a verifier names, by id; None where it names none."""
    own, library = folder / FILE, folder / TOKENIZER
    path = own if own.is_file() else library
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_text("utf-8"))
        return list(content) if path == own else by_id(vocabulary_in(content))
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path}: holds no tokens ({error}); put the file back") from error


def vocabulary_in(content: dict) -> dict[str, int]:
    """Token -> id of a tokenizer.json: its model's, as an object or in order, and those added."""
    known = content["model"]["vocab"]
    if isinstance(known, list):  # Unigram: [token, score]
        known = {token: index for index, (token, _) in enumerate(known)}
    return known | {token["content"]: token["id"] for token in content.get("added_tokens", [])}


def first_other(ours: list[str | None], theirs: list[str | None]) -> int | None:
    """The first id that is another token on the other side.

    Sizes may differ: an id that only one side has is a spare row, or a token that the head has
    never met.
    """
    for index, (mine, other) in enumerate(zip(ours, theirs, strict=False)):
        if mine != other and None not in (mine, other):
            return index
    return None


def save_tokens(folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Write them beside a head, about 2 MB for 150,000 tokens."""
    text = json.dumps(token_strings(tokenizer), ensure_ascii=False)
    write_atomically(folder / FILE, text + "\n")


def refuse_other_tokens(folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise ConfigError naming the first id that is another token for the head in ``folder``."""
    ours, theirs = tokens_in(folder), token_strings(tokenizer)
    if ours is None:
        say(f"{folder}: holds no {FILE}, so its tokens were not compared with the verifier's")
        return
    index = first_other(ours, theirs)
    if index is not None:
        raise ConfigError(
            f"verifier.path={tokenizer.name_or_path}: token {index} is {theirs[index]!r}, and the "
            f"head in {folder} was trained with {ours[index]!r} there; give the verifier it was "
            "trained on"
        )
