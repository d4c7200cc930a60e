"""How a file of evaluation prompts is named: as a path, or as a benchmark's file."""

import re
from dataclasses import dataclass
from pathlib import Path

from conf.choices import Benchmark
from conf.schema import ConfigError

NAMED = re.compile(r"(\w+):(.+)")


@dataclass(frozen=True)
class PromptFile:
    """``benchmark:path`` or ``path``."""

    path: Path
    benchmark: Benchmark | None = None  # None: the file is in Eyrie's own format

    @property
    def knob(self) -> str:
        """As the person wrote it, for messages."""
        prefix = f"{self.benchmark.value}:" if self.benchmark else ""
        return f"eval.prompts={prefix}{self.path}"


def parse_prompt_file(text: str) -> PromptFile:
    """Raises ConfigError for a name before the colon that is no benchmark's, and no file's."""
    path = Path(text).expanduser()
    found = NAMED.fullmatch(text)
    if not found or path.is_file():
        return PromptFile(path)
    name, rest = found.groups()
    known = [one.value for one in Benchmark]
    if name not in known:
        raise ConfigError(
            f"eval.prompts={text}: {name} is no known prompt set; take one of {', '.join(known)}, "
            "or leave the name out for a file of your own"
        )
    return PromptFile(Path(rest).expanduser(), Benchmark(name))
