"""The head that a proof is about: found, loaded with its verifier, and given prompts."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from conf.compose import load_saved
from conf.runtime import cache_dir, note_once
from conf.schema import ConfigError, RunConfig, VerifierSection
from data.dialects import RowRefused
from data.distributed import pick_device
from data.eval_prompts import EvalPrompt, read_prompts, take
from data.records import Turn
from data.template import encode_prompt
from eval.decode import DecodeSettings
from eval.proof.greedy_proof import Exam
from models.draft_file import CONFIG
from models.drafts import aux_layers_of as states_read
from models.export.layout import CONFIG as PUBLISHED
from models.generate import end_ids
from models.heads import config_of, is_own, load_head
from models.token_strings import refuse_other_tokens
from models.verifier import Verifier, load_facts


@dataclass(frozen=True)
class Request:
    """What the command line asks for."""

    head: Path  # a best/ folder, or one that an export or others wrote
    verifier: str | None  # None: that of the run
    prompts: list[str]  # files; empty: those of the run
    count: int
    new_tokens: int
    shapes: list[str]
    dtype: str | None = None  # None: float32, and bfloat16 unless it must be quick
    quick: bool = False


def newest_head(root: Path) -> Path:
    """The best/ folder written last under ``root``. Raises ConfigError when there is none."""
    heads = [path.parent for path in root.rglob(f"best/{CONFIG}")]
    if not heads:
        raise ConfigError(
            f"{root}: no run with a best/ head in it; train one with bash launch/demo.sh or give "
            "a HEAD_DIR"
        )
    return max(heads, key=lambda head: (head / CONFIG).stat().st_mtime)


def best_of(folder: Path) -> Path:
    """The best/ of a run, or the folder itself."""
    return folder / "best" if (folder / "best" / CONFIG).is_file() else folder


def examine(request: Request, dtype: torch.dtype) -> Exam:
    """Load head and verifier in ``dtype``. Raises ConfigError for what cannot be had."""
    cfg = settings_of(request)
    files = request.prompts or cfg.eval.prompts
    if not files:
        raise ConfigError(f"{request.head}: its run names no prompts; give some with --prompts")
    prompts = take(read_prompts(files).prompts, request.count)
    device = pick_device(cfg.run.device, 0)
    verifier = Verifier.load(cfg.verifier, cache_dir(cfg), device, dtype)
    draft = load_head(request.head, verifier.facts, verifier.ends)
    refuse_other_tokens(request.head, verifier.tokenizer)
    ids = encode_first(verifier, prompts, cfg)
    if not ids:
        raise ConfigError(
            "eval.prompts: the chat template refuses every prompt; give others with --prompts"
        )
    settings = DecodeSettings(request.new_tokens, end_ids(verifier))
    return Exam(verifier, draft, ids, settings, len(prompts) - len(ids))


def settings_of(request: Request) -> RunConfig:
    """The run's own, where the head lies in one; ``--verifier`` replaces its verifier."""
    head = request.head
    if not is_own(head) and not (head / PUBLISHED).is_file():
        raise ConfigError(
            f"{head}: holds no head, neither {CONFIG} nor a published {PUBLISHED}; give a best/ "
            "folder of a run, or one that launch.export or others wrote"
        )
    saved = next(
        (
            up / "config.yaml"
            for up in list(head.absolute().parents)[:2]
            if (up / "config.yaml").is_file()
        ),
        None,
    )
    if saved is not None:
        cfg = settings_in(saved, request.verifier is not None)
    elif request.verifier is None:
        raise ConfigError(
            f"{head}: lies in no run, so its verifier is unknown; give it with --verifier"
        )
    else:
        cfg = RunConfig()
    if request.verifier is not None:
        layers = aux_layers_of(head, request.verifier, cache_dir(cfg))
        cfg = replace(cfg, verifier=VerifierSection(path=request.verifier, aux_layers=layers))
    return cfg


def settings_in(saved: Path, dispensable: bool) -> RunConfig:
    """A run's; ``dispensable``: those of another version are named and done without."""
    try:
        return load_saved(saved)
    except ConfigError as error:
        if not dispensable:
            raise ConfigError(
                f"{saved}: not of this version ({error}); give --verifier and --prompts, which do "
                "without it"
            ) from error
        note_once(f"{saved} is not of this version and not used ({error})")
        return RunConfig()


def aux_layers_of(head: Path, verifier: str, cache: Path) -> list[int]:
    """The verifier layers whose states the head reads; a default where its files name none, and
    the first where it reads none."""
    any_layer = VerifierSection(path=verifier, aux_layers=[1])  # few layers have no default ids
    return states_read(config_of(head, load_facts(any_layer, cache))) or [1]


def encode_first(
    verifier: Verifier, prompts: Sequence[EvalPrompt], cfg: RunConfig
) -> list[list[int]]:
    """Token ids of each prompt's first question; those the template refuses are left out."""
    found: list[list[int]] = []
    for prompt in prompts:
        try:
            turns = first_question(prompt.turns)
            found.append(encode_prompt(turns, verifier.tokenizer, cfg.data.template_kwargs))
        except RowRefused as refusal:
            note_once(refusal.note)
    return found


def first_question(turns: Sequence[Turn]) -> list[Turn]:
    """A system turn, if any, and the first user turn."""
    end = next(i for i, turn in enumerate(turns) if turn.role == "user") + 1
    return list(turns[:end])
