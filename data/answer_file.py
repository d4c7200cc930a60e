"""The file of regenerated answers: its lines, and how an interrupted run goes on.

Three files: ``X.jsonl`` is the result, written whole at the end; ``X.jsonl.partial.jsonl`` grows by
one synced write a batch; ``X.jsonl.meta.json`` says with what settings they are made. A hidden
fourth, ``.X.jsonl.lock``, keeps a second run out.
"""

import fcntl
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from conf.runtime import fingerprint, sync_folder, write_atomically
from conf.schema import ConfigError
from data.records import Turn
from data.sources import DataFile, Source


@dataclass(frozen=True)
class AnswerRow:
    """One line: a conversation whose answers are all the verifier's own."""

    id: str  # "<prompt id>#<number of the answer>", 0 is the greedy one
    task: str
    conversations: list[Turn]
    answer_ids: list[list[int]]  # of the last answers, end tokens included unless cut
    greedy: bool
    cut: bool  # the last answer reached the length limit
    temperature: float
    seed: int

    def to_line(self) -> str:
        """Answer ids are a list an answer, or the ids alone where there is only one answer."""
        answers = sum(turn.role == "assistant" for turn in self.conversations)
        row = asdict(self) | {"conversations": [plain_turn(turn) for turn in self.conversations]}
        if answers == 1:
            row["answer_ids"] = [token for ids in self.answer_ids for token in ids]
        return json.dumps(row, ensure_ascii=False) + "\n"


def plain_turn(turn: Turn) -> dict[str, str]:
    """Role and text; thoughts beside them where a server keeps them apart."""
    thoughts = {"reasoning_content": turn.reasoning} if turn.reasoning else {}
    return {"role": turn.role, "content": turn.content, **thoughts}


def setting_of(path: Path, key: str) -> Any:
    """A setting that the finished file ``path`` was made with; None where nothing says so."""
    meta = path.with_name(path.name + ".meta.json")
    if path.exists():
        with suppress(OSError, json.JSONDecodeError, KeyError, TypeError):
            return json.loads(meta.read_text())["settings"][key]
    return None


def refuse_other_arguments(files: Sequence[Source], template_kwargs: dict[str, Any]) -> None:
    """Training must render what the verifier read. Raises ConfigError for answers made otherwise.

    Known of a file as long as its .meta.json lies beside it.
    """
    for file in files:
        if not isinstance(file, DataFile):
            continue
        made_with = setting_of(file.path, "data.template_kwargs")
        if made_with is not None and made_with != template_kwargs:
            raise ConfigError(
                f"data.template_kwargs={json.dumps(template_kwargs)}: the answers in {file} were "
                f"made with {json.dumps(made_with)}; set data.template_kwargs to that"
            )


class AnswerFile:
    """``path`` and its two companions. Opening refuses files made with other settings."""

    def __init__(self, path: Path, settings: dict[str, Any]):
        """``settings``: JSON values that decide the answers. Raises ConfigError on a conflict."""
        self.path = path
        self.settings = settings
        self.partial = path.with_name(path.name + ".partial.jsonl")
        self.meta = path.with_name(path.name + ".meta.json")
        self._refuse_others()

    @property
    def finished(self) -> bool:
        return self.path.exists()

    def _refuse_others(self) -> None:
        found = [file for file in (self.path, self.partial) if file.exists()]
        if not found:
            return  # settings alone bind nobody
        names = " and ".join(file.name for file in found)
        way_out = f"take another regenerate.output, or delete {names} to start anew"
        if not self.meta.exists():
            raise ConfigError(
                f"regenerate.output={self.path}: {self.meta.name} is missing, so nothing says how "
                f"its answers were made; {way_out}"
            )
        try:
            made_with = json.loads(self.meta.read_text())["settings"]
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ConfigError(
                f"regenerate.output={self.path}: {self.meta.name} is damaged ({error}); {way_out}"
            ) from error
        for key in sorted({*made_with, *self.settings}):
            before, now = made_with.get(key), self.settings.get(key)
            if before != now:
                raise ConfigError(
                    f"regenerate.output={self.path}: was made with {key}={before}, and now "
                    f"{key}={now}; {way_out}"
                )

    @contextmanager
    def sole_writer(self) -> Iterator[None]:
        """Keep another run out of these files. The system frees the lock however this one ends.

        Raises ConfigError when one is in, or was and used other settings.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.with_name(f".{self.path.name}.lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConfigError(
                    f"regenerate.output={self.path}: another process is writing to it; wait for "
                    "its end, or choose another regenerate.output"
                ) from None
            self._refuse_others()
            yield

    def start(self) -> set[str]:
        """Note the settings; ids of the answers an earlier run has left. A torn line is dropped."""
        self._note()
        if not self.partial.exists():
            return set()
        with self.partial.open("r+b") as file:
            whole = file.read().rfind(b"\n") + 1
            file.truncate(whole)
            os.fsync(file.fileno())
        return set(self._lines())

    def append(self, rows: list[AnswerRow]) -> None:
        """Add rows durably: when this returns, a power cut does not lose them."""
        if not rows:
            return
        new = not self.partial.exists()
        with self.partial.open("ab") as file:
            file.write("".join(row.to_line() for row in rows).encode())
            file.flush()
            os.fsync(file.fileno())
        if new:
            sync_folder(self.partial.parent)

    def _lines(self) -> dict[str, str]:
        """Line by id; of an id written twice (a batch done again) the last one counts."""
        if not self.partial.exists():
            return {}
        with self.partial.open(encoding="utf-8", newline="\n") as file:
            return {json.loads(line)["id"]: line for line in file}

    def finish(self, order: list[str], left_out: dict[str, int], changed: dict[str, int]) -> None:
        """Write the result, answers in ``order``, and remove the partial file.

        Kept with the settings: ``left_out``, how many prompts and answers are missing, by reason,
        and ``changed``, how many prompts and answers of this run are not as asked for.
        """
        lines = self._lines()
        self._note({"left_out": left_out, "changed": changed})
        write_atomically(self.path, "".join(lines[name] for name in order))
        self.partial.unlink(missing_ok=True)

    def _note(self, more: dict[str, Any] | None = None) -> None:
        content = {"fingerprint": fingerprint(self.settings), "settings": self.settings}
        text = json.dumps(content | (more or {}), indent=2, ensure_ascii=False)
        write_atomically(self.meta, text + "\n")
