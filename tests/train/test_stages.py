"""The stages before the training, on ranks of which one alone may look at the sources."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from conf.runtime import RankInfo
from conf.schema import RunConfig, Stage
from train import stages


@pytest.mark.parametrize("asked", [[Stage.prepare, Stage.train], [Stage.train]])
def test_rank_0_alone_finds_the_prepared_data(monkeypatch: pytest.MonkeyPatch, asked: list[Stage]):
    """B59: a source that changes between two looks at it must not divide the ranks."""
    called: list[str] = []
    sent: list[Path] = []

    def looked(name: str) -> SimpleNamespace:
        called.append(name)
        return SimpleNamespace(folder=Path(f"prepare-{len(called)}"))  # the source has changed

    def broadcast(value: Path | None) -> Path:
        sent.extend([] if value is None else [value])
        return sent[0]

    monkeypatch.setattr(stages, "prepare", lambda _: looked("prepare"))
    monkeypatch.setattr(stages, "find_prepared", lambda _: looked("find"))
    monkeypatch.setattr(stages, "broadcast_object", broadcast)
    monkeypatch.setattr(stages, "load_prepared", lambda folder: folder)
    cfg = RunConfig(stages=asked)
    folders = [stages.prepared_data(cfg, RankInfo(rank, 2, rank)) for rank in (0, 1)]
    assert folders == [Path("prepare-1")] * 2
    assert called == ["prepare" if Stage.prepare in asked else "find"]
