"""The n-gram family for vLLM: no weights, only what its command line is to be told."""

import json
import shlex
from pathlib import Path

from conf.runtime import say, write_atomically
from conf.schema import ConfigError, ExportFormat, Phrases
from models.phrases import PhraseConfig

FILE = "speculative_config.json"


def speculative_config(config: PhraseConfig, n_draft: int) -> str:
    """What ``vllm serve --speculative-config`` takes. Raises ConfigError for a table."""
    if config.source != Phrases.context.value:
        raise ConfigError(
            f"draft.phrases={config.source}: vLLM looks phrases up in the context alone and reads "
            "no table; train with draft.phrases=context"
        )
    told = {
        "method": "ngram",
        "num_speculative_tokens": n_draft,
        "prompt_lookup_max": config.longest,
        "prompt_lookup_min": 1,
    }
    return json.dumps(told)


def export_phrases(config: PhraseConfig, folder: Path, kind: ExportFormat, n_draft: int) -> Path:
    """Write the argument as a file, and say it.

    Raises ConfigError for another engine or a table.
    """
    if kind is not ExportFormat.vllm:
        raise ConfigError(
            f"--to {kind.value}: the n-gram family is described for vLLM alone; take --to vllm"
        )
    text = speculative_config(config, n_draft)
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / FILE, text + "\n")
    say(
        f"{folder / FILE}: there are no weights to export; pass vLLM "
        f"--speculative-config {shlex.quote(text)}"
    )
    return folder
