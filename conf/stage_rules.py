"""What the stages that run must find, and knobs of theirs that do not go together."""

import os
import re
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

from conf.prompt_files import parse_prompt_file
from conf.schema import (
    HUB,
    Attention,
    CaptureMode,
    ConfigError,
    MissingStates,
    RunConfig,
    Stage,
    StateBackend,
)


def flash_for_capture_alone(cfg: RunConfig, running: Sequence[Stage]) -> Iterator[str]:
    """Decoding hands the verifier masks of its own, which flash_attention_2 does not take."""
    if cfg.verifier.attention is Attention.flash_attention_2 and Stage.eval in running:
        yield (
            "verifier.attention=flash_attention_2: works for stages=[prepare,capture,train] and "
            "not for decoding; evaluate with verifier.attention=sdpa"
        )


def enough_packs(cfg: RunConfig, running: Sequence[Stage]) -> Iterator[str]:
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if Stage.train in running and cfg.optim.packs_per_step < world:
        yield (
            f"optim.packs_per_step={cfg.optim.packs_per_step}: smaller than the {world} ranks, "
            f"some would idle; try optim.packs_per_step={world}"
        )


def places(cfg: RunConfig, running: Sequence[Stage]) -> Iterator[str]:
    if not str(cfg.verifier.path):
        yield "verifier.path=: is empty; give a folder or a hub name, as in verifier=qwen3_8b"
    local = cfg.verifier.path.startswith(("/", "./", "../", "~"))
    if local and not (Path(cfg.verifier.path).expanduser() / "config.json").is_file():
        yield (
            f"verifier.path={cfg.verifier.path}: no folder with a config.json; "
            "give one, or a hub name"
        )
    if Stage.prepare in running:
        yield from data_files(cfg)
    if Stage.eval in running:
        yield from prompt_files(cfg)


HEAD_FILES = ("draft.json", "config.json")  # of a best/ folder, and of a published head


def heads(cfg: RunConfig, running: Sequence[Stage]) -> Iterator[str]:
    """The head that training starts from, and the one that is measured in place of the run's."""
    for knob, text, used in (
        ("draft.init", cfg.draft.init, Stage.train in running),
        ("eval.head", cfg.eval.head, Stage.eval in running),
    ):
        if used and text is not None and not any((Path(text) / n).is_file() for n in HEAD_FILES):
            yield (
                f"{knob}={text}: no folder with {' or '.join(HEAD_FILES)}; give runs/NAME/best, "
                "the folder of a published head, or null"
            )
    run = (Path(cfg.run.root) / cfg.run.name).resolve()
    if cfg.draft.init is not None and Path(cfg.draft.init).resolve().is_relative_to(run):
        yield (
            f"draft.init={cfg.draft.init}: lies in the folder that run.name={cfg.run.name} writes; "
            "choose another run.name"
        )
    if cfg.eval.head is not None and {Stage.train, Stage.eval} <= set(running):
        yield (
            f"eval.head={cfg.eval.head}: another head than the one that is trained; leave it out, "
            "or measure it with python -m eval.main under another run.name"
        )


def data_files(cfg: RunConfig) -> Iterator[str]:
    remedy = "make it with python -m data.regenerate"
    if not cfg.data.path:
        yield f"data.path=[]: is empty; {remedy}, then data.path=FILE"
    for path in cfg.data.path:
        there = path.startswith(HUB) or Path(path).expanduser().exists()  # only the hub knows
        if not there:
            yield f"data.path={path}: no such file; {remedy}"


def prompt_files(cfg: RunConfig) -> Iterator[str]:
    remedy = "give a .jsonl file of prompts"
    if not cfg.eval.prompts:
        yield f"eval.prompts=[]: is empty; {remedy}, then eval.prompts=FILE"
    for text in cfg.eval.prompts:
        try:
            if not parse_prompt_file(text).path.is_file():
                yield f"eval.prompts={text}: no such file; {remedy}"
        except ConfigError as error:
            yield str(error)


def state_backends(cfg: RunConfig, running: Sequence[Stage]) -> Iterator[str]:
    """What the chosen capture.backend needs, and knobs that it would not heed."""
    capture, backend = cfg.capture, cfg.capture.backend
    if capture.tensor_parallel and backend is not StateBackend.transformers:
        yield (
            f"capture.tensor_parallel=true: has no effect with capture.backend={backend.value}; "
            "take capture.backend=transformers (vLLM splits by capture.vllm_args)"
        )
    computes = backend is StateBackend.transformers and not capture.tensor_parallel
    if capture.mode is CaptureMode.online and not computes:
        yield (
            "capture.mode=online: each rank computes with a whole verifier of its own; take "
            "capture.backend=transformers without capture.tensor_parallel, or capture.mode=cache"
        )
    alone = int(os.environ.get("WORLD_SIZE", "1")) < 2
    if capture.tensor_parallel and alone and running:  # launch.plan runs nothing
        yield (
            "capture.tensor_parallel=true: one process cannot split a verifier; start with "
            "torchrun --nproc-per-node=GPUS"
        )
    yield from parts_of_a_cache(cfg, running)
    yield from unheeded(cfg)
    if Stage.capture not in running:
        return
    if backend is StateBackend.vllm and not has_vllm(capture.vllm_python):
        yield (
            f"capture.vllm_python={capture.vllm_python or 'null'}: no Python with vLLM there; "
            "name the interpreter of an environment with vllm >= 0.18, or take "
            "capture.backend=transformers"
        )


def parts_of_a_cache(cfg: RunConfig, running: Sequence[Stage]) -> Iterator[str]:
    """A part leaves shards without a manifest, so nothing that reads the cache can follow it."""
    capture = cfg.capture
    if not 0 <= capture.part < capture.parts:
        yield (
            f"capture.part={capture.part}: parts count from 0 and there are {capture.parts}; take "
            f"0 to {capture.parts - 1}, or more with capture.parts"
        )
    if capture.parts == 1:
        return
    if capture.mode is CaptureMode.online:
        yield (
            f"capture.parts={capture.parts}: has no effect with capture.mode=online, which writes "
            "nothing; leave it out"
        )
    beyond = [stage.value for stage in running if stage not in (Stage.prepare, Stage.capture)]
    if beyond:
        yield (
            f"capture.parts={capture.parts}: a part is no whole cache, and {beyond[0]} needs one; "
            "take stages=[prepare,capture] for each part, then the job without capture.parts"
        )
    if capture.store is not None:
        yield (
            f"capture.store={capture.store}: parts write to run.cache alone, and the whole capture "
            "after them sends their shards; leave it out for the parts"
        )


def stores(cfg: RunConfig, running: Sequence[Stage]) -> Iterator[str]:
    """Where the cache lies besides run.cache, and how much of it may stay there."""
    store, gib = cfg.capture.store, cfg.capture.stage_gib
    if store is not None and not re.match(r"[a-z][a-z0-9+.-]*://.", store):
        yield (
            f"capture.store={store}: must be a URL, as s3://BUCKET/PREFIX; for a mounted folder "
            "give file:///FOLDER"
        )
    if store is not None and cfg.capture.mode is CaptureMode.online:
        yield (
            f"capture.store={store}: has no effect with capture.mode=online, which keeps no "
            "states; leave it out, or take capture.mode=cache"
        )
    if gib is None:
        return
    if store is None:
        yield (
            f"capture.stage_gib={gib:g}: has no effect without capture.store, since what leaves "
            "the disk must be somewhere; set capture.store, or capture.stage_gib=null"
        )
    if not cfg.capture.shard_mib / 1024 <= gib < float("inf"):
        yield (
            f"capture.stage_gib={gib:g}: must hold one shard of capture.shard_mib="
            f"{cfg.capture.shard_mib} MiB; try capture.stage_gib="
            f"{max(1, -(-cfg.capture.shard_mib // 1024) * 8)}, best of all the whole cache"
        )


def unheeded(cfg: RunConfig) -> Iterator[str]:
    """Knobs of another capture.backend than the chosen one."""
    capture, backend = cfg.capture, cfg.capture.backend
    if (capture.dumped is not None) != (backend is StateBackend.dumped):
        given = "null" if capture.dumped is None else capture.dumped
        yield (
            f"capture.dumped={given}: capture.backend=dumped needs the folder of the files, and no "
            "other backend takes one; set capture.dumped=FOLDER; now "
            f"capture.backend={backend.value}"
        )
    if capture.missing is MissingStates.compute and backend is not StateBackend.dumped:
        yield (
            f"capture.missing=compute: has no effect with capture.backend={backend.value}; leave "
            "it out, or take capture.backend=dumped"
        )
    for knob in ("vllm_python", "vllm_args"):
        value = getattr(capture, knob)
        if value and backend is not StateBackend.vllm:
            yield (
                f"capture.{knob}={value}: has no effect with capture.backend={backend.value}; "
                "leave it out, or take capture.backend=vllm"
            )


def has_vllm(python: str | None) -> bool:
    """Whether there is one; another interpreter is not asked, which would take seconds."""
    if python is None:
        return find_spec("vllm") is not None
    return Path(python).expanduser().is_file()
