"""What can be found out about a served head: its folder, its verifier, how its chats are rendered.

Gathered whether or not acceptance differs; launch/served/cause.py draws the conclusions.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from conf.runtime import cache_dir
from conf.schema import ConfigError, RunConfig
from data.messages import messages
from eval.proof.examined import first_question
from launch.served.client import ServedClient
from launch.served.run import Asking, Question
from models.bundled import resolve
from models.draft_file import CONFIG as DRAFT
from models.draft_file import WEIGHTS as DRAFT_WEIGHTS
from models.draft_file import read_config as read_draft_config
from models.eagle3 import DraftConfig
from models.export.check import check
from models.export.dialect import read_config
from models.export.layout import CONFIG, WEIGHTS
from models.verifier import weights_fingerprint

AUX = "eagle_aux_hidden_state_layer_ids"
ASKED = 4  # conversations whose rendering is compared
# What templates of thinking models call the switch, in both positions.
SWITCHES = [{name: on} for name in ("enable_thinking", "thinking") for on in (False, True)]
TELLING = ("fc.weight", "lm_head.weight", "norm.weight")  # training moves them, every layout names


@dataclass(frozen=True)
class HeadSide:
    """The folder that the server reads the head from, beside the run's own head."""

    folder: Path
    draft: DraftConfig  # the run's
    findings: list[str]
    aux_layers: list[int] | None  # as vLLM reads the folder; None: its default
    foreign: list[str]  # tensors that are not the run's
    window: int | None  # positions that a layer of it looks back


@dataclass(frozen=True)
class ServerSide:
    dtype: str | None  # None: not known
    quantisation: str | None  # that its log tells
    other_verifier: str | None  # how its verifier is not the run's


@dataclass(frozen=True)
class TemplateSide:
    compared: int = 0  # conversations; 0: the server does not tell
    example: str | None = None  # of one that it renders otherwise, in words
    different: int = 0
    mended_by: dict[str, Any] = field(default_factory=dict)  # template arguments that make all ours


def head_side(folder: Path, run: Path) -> HeadSide:
    """Raises ConfigError when there is no head in one of them."""
    best = run / "best"
    if not (best / DRAFT).is_file():
        raise ConfigError(f"{best}: holds no {DRAFT}; give the folder of a run that was trained")
    if not (folder / CONFIG).is_file():
        raise ConfigError(
            f"{folder}: holds no exported head; write it with python -m launch.export {best} "
            "--to vllm, or name its folder by --head"
        )
    draft = read_draft_config(best)
    if not isinstance(draft, DraftConfig):
        raise ConfigError(
            f"{best}: is no EAGLE-3 head, and serving is compared for those alone; give the folder "
            "of such a run"
        )
    source = read_config(folder)
    inner = source.layer
    listed = source.top.get(AUX) or source.eagle.get(AUX)
    return HeadSide(
        folder=folder,
        draft=draft,
        findings=check(folder),
        aux_layers=listed,
        foreign=foreign_tensors(folder / WEIGHTS, best / DRAFT_WEIGHTS),
        window=inner.get("sliding_window") if inner.get("use_sliding_window", True) else None,
    )


def foreign_tensors(exported: Path, own: Path) -> list[str]:
    """Those of TELLING that are not the run's, rounded to the exported precision."""
    try:
        with safe_open(exported, "pt") as theirs, safe_open(own, "pt") as ours:
            shared = set(theirs.keys()) & set(ours.keys())
            return [
                name
                for name in TELLING
                if name in shared and not same(theirs.get_tensor(name), ours.get_tensor(name))
            ]
    except (SafetensorError, OSError):
        return []  # the check of the folder says so


def same(exported: torch.Tensor, own: torch.Tensor) -> bool:
    return exported.shape == own.shape and torch.equal(exported, own.to(exported.dtype))


def other_verifier(cfg: RunConfig, root: str | None) -> str | None:
    """How the weights at ``root`` are not those of ``verifier.path``; None: alike, or not known."""
    name = cfg.verifier.path
    if root is None or root == name:
        return None
    theirs = Path(root)
    if not theirs.is_dir():  # a hub name, or a folder of another machine
        hubs = name.count("/") == root.count("/") == 1 and not Path(name).exists()
        return f"it serves {root}, and the head was trained on {name}" if hubs else None
    ours = resolve(name, cache_dir(cfg))
    if theirs.resolve() == ours.resolve():
        return None
    quantised = quantisation_of(theirs)
    if quantised and not quantisation_of(ours):
        return f"{root} is quantised ({quantised}), and verifier.path={name} is not"
    prints = weights_fingerprint(theirs), weights_fingerprint(ours)
    if prints[0] == prints[1]:
        return None
    return (
        f"{root} has other weights or settings (fingerprint {prints[0]}) than "
        f"verifier.path={name} ({prints[1]})"
    )


def quantisation_of(folder: Path) -> str | None:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    found = config.get("quantization_config")
    return str(found.get("quant_method", "yes")) if isinstance(found, dict) else None


def template_side(
    client: ServedClient, questions: Sequence[Question], asking: Asking
) -> TemplateSide:
    """Have the server render some first questions with its own template and default arguments."""
    asked = [first_question(one.prompt.turns) for one in questions[:ASKED]]
    ours = [asking.ids(turns) for turns in asked]
    spoken = [messages(tuple(turns)) for turns in asked]
    theirs = [client.rendered(one, {}) for one in spoken]
    if None in theirs:
        return TemplateSide()
    pairs = zip(questions, ours, theirs, strict=False)
    parted = [
        f"{one.prompt.id}: {how_apart(own, other)}"
        for one, own, other in pairs
        if other is not None and own != other
    ]
    if not parted:
        return TemplateSide(len(asked))
    tried = [asking.template_kwargs, *SWITCHES] if asking.template_kwargs else SWITCHES
    mends = (one for one in tried if [client.rendered(each, one) for each in spoken] == ours)
    return TemplateSide(len(asked), parted[0], len(parted), next(mends, {}))


def how_apart(ours: list[int], theirs: list[int]) -> str:
    pairs = enumerate(zip(ours, theirs, strict=False))
    at = next((i for i, (own, its) in pairs if own != its), min(len(ours), len(theirs)))
    return f"{len(theirs)} tokens against {len(ours)} here, different from token {at} on"
