"""What a sweep does: which knobs take several values, what holds for every point."""

from dataclasses import dataclass
from pathlib import Path

from conf.schema import Stage

SHARED = [Stage.prepare, Stage.capture]  # run once before all points, which find what it made


@dataclass(frozen=True)
class SweepPlan:
    """What is swept and what holds for every point."""

    name: str  # folder below root
    root: Path
    fixed: list[str]  # overrides of every point
    swept: list[str]  # knobs that take several values
    stages: list[Stage]  # of every point
    words: list[str]  # all overrides, as Hydra gets them
    processes: int  # ranks of one job

    @property
    def folder(self) -> Path:
        return self.root / self.name


def stages_word(stages: list[Stage]) -> str:
    """The override that runs ``stages``."""
    return f"stages=[{','.join(stage.value for stage in stages)}]"
