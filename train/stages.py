"""The stages of the job, in order; each is skipped when what it makes is there and still fits."""

import errno
import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

import torch

from conf.compose import load_saved, to_yaml
from conf.runtime import (
    RankInfo,
    cache_dir,
    fingerprint,
    log_to,
    plain,
    provenance,
    run_dir,
    say,
    write_atomically,
)
from conf.schema import ConfigError, JobError, RunConfig, Stage
from data.capture import capture
from data.capture_job import manifest_of
from data.distributed import barrier, pick_device, setup, shutdown
from data.prepare import find_prepared, prepare
from data.records import PreparedData
from data.sources import digest
from eval.main import evaluate
from models.export.card import DataFacts
from models.export.vllm import export_run
from models.verifier import load_facts
from train.loop import curve_fingerprint, fit

SHAPING = ("verifier", "draft", "data", "capture", "ttt", "loss", "optim", "engine")


def run_stages(cfg: RunConfig) -> None:
    """Run ``cfg.stages`` on all ranks. Raises ConfigError or JobError, each with its way out."""
    ranks = RankInfo.from_env()
    device = pick_device(cfg.run.device, ranks.local_rank)
    torch.set_num_threads(cfg.engine.threads or threads_a_rank())
    setup(device)
    folder = run_dir(cfg)
    lock = claim(folder, cfg) if ranks.is_main else None
    with full_disk_named(folder):
        run_in(folder, cfg, RankInfo.from_env())
    shutdown()
    if lock is not None:
        lock.close()


@contextmanager
def full_disk_named(folder: Path) -> Iterator[None]:
    """Nothing is lost on a full disk: files and checkpoints are whole or not there."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise JobError(
            f"{folder}: the disk became full; make room and run the same command again, which "
            "goes on from the last checkpoint"
        ) from error


def run_in(folder: Path, cfg: RunConfig, ranks: RankInfo) -> None:
    done = Stamps(folder)
    prepared = prepared_data(cfg, ranks)
    states = manifest_of(cfg, prepared, load_facts(cfg.verifier, cache_dir(cfg)))
    curve = curve_fingerprint(cfg, states.fingerprint)
    trained = done.has("train", curve, folder / "best")
    if Stage.capture in cfg.stages or (Stage.train in cfg.stages and not trained):
        cached = capture(cfg, prepared, ranks)
    if Stage.train in cfg.stages:
        if trained:
            say(f"train: {folder / 'best'} is there and fits; skipped")
        else:
            fit(cfg, prepared, cached, ranks)
            done.add("train", curve, ranks)
    if ranks.is_main:  # the others wait at the barrier
        head = fingerprint(curve, text_of(folder / "best" / "acceptance.json"))
        if Stage.eval in cfg.stages:
            evaluate_once(cfg, folder, head, ranks)
        if Stage.export in cfg.stages:
            export_once(cfg, folder, head, prepared, ranks)
    barrier()


def evaluate_once(cfg: RunConfig, folder: Path, head: str, ranks: RankInfo) -> None:
    """``head`` is the fingerprint of what lies in best/."""
    done = Stamps(folder)
    files = [digest(path).sha256 for path in map(Path, cfg.eval.prompts) if path.is_file()]
    mark = fingerprint(head, cfg.eval, files)
    if done.has("eval", mark, folder / "eval" / "report.json"):
        say(f"eval: {folder / 'eval' / 'report.md'} is there and fits; skipped")
    else:
        evaluate(cfg, folder / "best")
        done.add("eval", mark, ranks)


def export_once(
    cfg: RunConfig, folder: Path, head: str, prepared: PreparedData, ranks: RankInfo
) -> None:
    """The model card quotes the report, so another report is another export."""
    done = Stamps(folder)
    mark = fingerprint(head, cfg.export, text_of(folder / "eval" / "report.json"))
    folders = [folder / "export" / kind.value for kind in cfg.export.formats]
    if done.has("export", mark, *folders):
        say(f"export: {', '.join(map(str, folders))} is there and fits; skipped")
        return
    made_from = DataFacts(
        origin=", ".join(cfg.data.path),
        samples=sum(not sample.held_out for sample in prepared.samples),
        tokens=int(prepared.token_counts.sum()),
    )
    export_run(cfg, folder, made_from)
    done.add("export", mark, ranks)


def text_of(path: Path) -> str:
    return path.read_text() if path.is_file() else ""


def prepared_data(cfg: RunConfig, ranks: RankInfo) -> PreparedData:
    """Rank 0 prepares, the others read what it left."""
    if Stage.prepare in cfg.stages and ranks.is_main:
        prepare(cfg)
    barrier()
    return find_prepared(cfg)


def threads_a_rank() -> int:
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, len(os.sched_getaffinity(0)) // local)


def claim(folder: Path, cfg: RunConfig) -> TextIO:
    """Take the run folder for this process and write down what will run in it.

    Raises ConfigError when another process holds it, or when it belongs to other settings.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = (folder / ".lock").open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise ConfigError(
            f"run.name={cfg.run.name}: another process is writing to {folder}; wait for it, or "
            "choose another run.name"
        ) from error
    saved = folder / "config.yaml"
    if saved.is_file():
        refuse_other_settings(cfg, load_saved(saved))
    write_atomically(saved, to_yaml(cfg))
    write_atomically(folder / "provenance.json", json.dumps(provenance(), indent=2) + "\n")
    log_to(folder / "train.log")
    return lock


def refuse_other_settings(cfg: RunConfig, saved: RunConfig) -> None:
    """What shapes the head must be equal; stages, log, eval and export may change."""
    for section in SHAPING:
        ours, theirs = flat(plain(getattr(cfg, section))), flat(plain(getattr(saved, section)))
        for knob in sorted(ours.keys() | theirs.keys()):
            if ours.get(knob) != theirs.get(knob) and knob != "threads":
                raise ConfigError(
                    f"{section}.{knob}={ours.get(knob)}: run.name={cfg.run.name} was made with "
                    f"{section}.{knob}={theirs.get(knob)}; use that value or another run.name"
                )
    if cfg.run.seed != saved.run.seed:
        raise ConfigError(
            f"run.seed={cfg.run.seed}: run.name={cfg.run.name} was made with "
            f"run.seed={saved.run.seed}; use that value or another run.name"
        )


def flat(section: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in section.items():
        if isinstance(value, dict) and value:
            out |= flat(value, f"{prefix}{key}.")
        else:
            out[prefix + key] = value
    return out


class Stamps:
    """Which stages of a run are finished, and with which fingerprint."""

    def __init__(self, folder: Path):
        self.path = folder / "stages.json"

    def read(self) -> dict[str, str]:
        return json.loads(self.path.read_text()) if self.path.is_file() else {}

    def has(self, stage: str, mark: str, *made: Path) -> bool:
        return self.read().get(stage) == mark and all(path.exists() for path in made)

    def add(self, stage: str, mark: str, ranks: RankInfo) -> None:
        if ranks.is_main:
            write_atomically(self.path, json.dumps({**self.read(), stage: mark}, indent=2) + "\n")
