"""The tokens of a head's vocabulary as text, by id: a head serves one tokenizer only."""

import json
from pathlib import Path

from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from conf.runtime import say, write_atomically
from conf.schema import ConfigError

FILE = "tokens.json"


def token_strings(tokenizer: PreTrainedTokenizerBase) -> list[str | None]:
    """The token of each id, None where there is none: an embedding may have rows to spare."""
    by_id = {index: token for token, index in tokenizer.get_vocab().items()}
    return [by_id.get(index) for index in range(max(by_id, default=-1) + 1)]


def save_tokens(folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Write them beside a head, about 2 MB for 150,000 tokens."""
    text = json.dumps(token_strings(tokenizer), ensure_ascii=False)
    write_atomically(folder / FILE, text + "\n")


def refuse_other_tokens(folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise ConfigError naming the first id that is another token for the head in ``folder``.

    Sizes may differ: an id that only one side has is a spare row, or a token that the head has
    never met.
    """
    if not (folder / FILE).is_file():
        say(f"{folder}: holds no {FILE}, so its tokens were not compared with the verifier's")
        return
    ours, theirs = json.loads((folder / FILE).read_text("utf-8")), token_strings(tokenizer)
    for index, (mine, other) in enumerate(zip(ours, theirs, strict=False)):
        if mine != other and None not in (mine, other):
            raise ConfigError(
                f"verifier.path={tokenizer.name_or_path}: token {index} is {other!r}, and the head "
                f"in {folder} was trained with {mine!r} there; give the verifier it was trained on"
            )
