"""The stages of the job, in order; each is skipped when what it makes is there and still fits."""

import fcntl
import gc
import json
from pathlib import Path
from typing import TextIO

from conf.compose import to_yaml
from conf.prompt_files import parse_prompt_file
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
from conf.schema import CaptureMode, ConfigError, DraftFamily, LayerInit, RunConfig, Stage
from conf.settings import refuse_other_settings
from data.capture import capture
from data.capture_job import manifest_of
from data.corpus import load_prepared
from data.distributed import barrier, broadcast_object, pick_device, setup, shutdown, use_threads
from data.online import OnlineStates
from data.origin import agreement_of, data_facts, require_agreement
from data.prepare import find_prepared, prepare
from data.reader import ShardReader
from data.records import PreparedData
from data.sources import DataFile, digest
from data.staging import Staging
from data.watch import Watch
from eval.chosen import choose_prompts
from eval.main import evaluate, head_to_measure
from models.draft_file import CONFIG
from models.eagle3 import DraftConfig
from models.export.write import export_run
from models.last_layer import refuse_other_layer
from models.model_folder import refuse_other_model
from models.start import config_to_train
from models.token_strings import refuse_other_tokens, save_tokens
from models.verifier import load_facts, load_tokenizer
from train.loop import curve_fingerprint, fit
from train.phrases import count_phrases
from train.stop import StopRequest


def run_stages(cfg: RunConfig) -> None:
    """Run ``cfg.stages`` on all ranks. Raises ConfigError or JobError, each with its way out."""
    ranks = RankInfo.from_env()
    device = pick_device(cfg.run.device, ranks.local_rank)
    use_threads(cfg.engine.threads)
    with Watch(ranks, cfg.engine.timeout_minutes):
        setup(device)
        folder = run_dir(cfg)
        lock = claim(folder, cfg) if ranks.is_main else None
        run_in(folder, cfg, RankInfo.from_env())
    shutdown()
    if lock is not None:
        lock.close()


def run_in(folder: Path, cfg: RunConfig, ranks: RankInfo) -> None:
    if Stage.eval in cfg.stages:
        choose_prompts(cfg)  # unusable prompts are said now, not after the training
    if Stage.train in cfg.stages:
        refuse_unfit_start(cfg)
    done = Stamps(folder)
    prepared = prepared_data(cfg, ranks)
    states = manifest_of(cfg, prepared, load_facts(cfg.verifier, cache_dir(cfg)))
    curve = curve_fingerprint(cfg, states.fingerprint)
    trained = done.has("train", curve, folder / "best" / CONFIG)
    cached = captured_once(cfg, prepared, ranks, needed=Stage.train in cfg.stages and not trained)
    if Stage.train in cfg.stages:
        if trained:
            say(f"train: {folder / 'best'} is there and fits; skipped")
        else:
            if train_on(cfg, prepared, cached, ranks) is None:
                return  # asked to stop: what comes next would be measured on half a training
            done.add("train", curve, ranks)
            gc.collect()  # an online verifier's hooks refer back to it; eval loads its own
    if ranks.is_main:  # the others wait at the barrier
        head = fingerprint(curve, text_of(folder / "best" / "acceptance.json"))
        if Stage.eval in cfg.stages:
            evaluate_once(cfg, folder, head, ranks)
        if Stage.export in cfg.stages:
            export_once(cfg, folder, head, prepared, ranks)
    barrier()


def refuse_unfit_start(cfg: RunConfig) -> None:
    """Raise ConfigError now, not after the capture, when the draft cannot start from what is
    named: draft.init, or the verifier's last layer."""
    cache = cache_dir(cfg)
    draft = config_to_train(cfg.draft, load_facts(cfg.verifier, cache), cfg.ttt.depth)
    if cfg.draft.layer_init is LayerInit.verifier and isinstance(draft, DraftConfig):
        refuse_other_layer(cfg.verifier, cache, draft)
    if cfg.draft.init is not None:
        tokenizer = load_tokenizer(cfg.verifier, cache)
        if cfg.draft.family is DraftFamily.model:
            refuse_other_model(Path(cfg.draft.init), tokenizer)
        refuse_other_tokens(Path(cfg.draft.init), tokenizer)


def captured_once(
    cfg: RunConfig, prepared: PreparedData, ranks: RankInfo, needed: bool
) -> Path | None:
    """The folder with the states. None when nothing asks for them, with capture.mode=online, and
    for a family that reads none."""
    asked = Stage.capture in cfg.stages
    if cfg.draft.family is DraftFamily.ngram:
        if asked:
            say("capture: skipped, draft.family=ngram reads no states")
        return None
    if cfg.capture.mode is CaptureMode.online:
        if asked:
            say("capture: skipped, capture.mode=online computes the states when a step needs them")
        return None
    return capture(cfg, prepared, ranks) if asked or needed else None


def train_on(
    cfg: RunConfig, prepared: PreparedData, cached: Path | None, ranks: RankInfo
) -> Path | None:
    """Train on the states in ``cached``, or with None on those that the verifier computes."""
    cache = cache_dir(cfg)
    if cfg.draft.family is DraftFamily.ngram:
        own_tokens(cfg, ranks)
        return count_phrases(cfg, prepared, ranks)
    if cached is None:
        source = OnlineStates.load(cfg, prepared, ranks)
        agreement = source.agreement()
        say(f"training data: {agreement} (of the first samples)")
    else:
        wanted = manifest_of(cfg, prepared, load_facts(cfg.verifier, cache))
        source = ShardReader(cached, wanted, Staging.of(cfg, cached))
        agreement = agreement_of(source.manifest)  # which capture has said
    require_agreement(cfg, agreement)
    own_tokens(cfg, ranks)
    with StopRequest() as request:
        return fit(cfg, prepared, source, ranks, request)


def own_tokens(cfg: RunConfig, ranks: RankInfo) -> None:
    """Note the tokens beside the head to come. Not before nothing more can be refused: best/ makes
    the run folder that of these settings."""
    if ranks.is_main:
        tokenizer = load_tokenizer(cfg.verifier, cache_dir(cfg))
        save_tokens(run_dir(cfg) / "best", tokenizer)
        if cfg.draft.family is DraftFamily.model:
            tokenizer.save_pretrained(run_dir(cfg) / "best")  # a model's folder is whole by itself


def evaluate_once(cfg: RunConfig, folder: Path, head: str, ranks: RankInfo) -> None:
    """``head`` is the fingerprint of what lies in best/."""
    done = Stamps(folder)
    named = [parse_prompt_file(text).path for text in cfg.eval.prompts]
    files = [digest(DataFile.alone(path)).sha256 for path in named if path.is_file()]
    mark = fingerprint(head, cfg.eval, files)
    report = folder / "eval" / "report.json"
    if done.has("eval", mark, report) and measured_with(report) == plain(cfg.eval):
        say(f"eval: {folder / 'eval' / 'report.md'} is there and fits; skipped")
    else:
        evaluate(cfg, head_to_measure(cfg))
        done.add("eval", mark, ranks)


def measured_with(report: Path) -> object:
    """The eval section behind a report; eval.main alone may have written another."""
    return json.loads(report.read_text())["settings"]["eval"]


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
    export_run(cfg, folder, data_facts(cfg, prepared))
    done.add("export", mark, ranks)


def text_of(path: Path) -> str:
    return path.read_text() if path.is_file() else ""


def prepared_data(cfg: RunConfig, ranks: RankInfo) -> PreparedData:
    """Rank 0 prepares, or finds it done, and the others read what is there: the sources are hashed
    once, and a hub data set that changes meanwhile cannot divide the ranks."""
    folder: Path | None = None
    if ranks.is_main:
        make = prepare if Stage.prepare in cfg.stages else find_prepared
        folder = make(cfg).folder
    folder = broadcast_object(folder)
    assert folder is not None
    return load_prepared(folder)


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
    refuse_other_settings(cfg)
    write_atomically(folder / "config.yaml", to_yaml(cfg))
    record_start(folder / "provenance.json")
    log_to(folder / "train.log")
    return lock


def record_start(path: Path) -> None:
    """One entry a start: what trained the head is not lost when a later start only evaluates."""
    starts = json.loads(path.read_text()) if path.is_file() else []
    write_atomically(path, json.dumps([*starts, provenance()], indent=2) + "\n")


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
