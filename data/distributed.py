"""Processes that work together: owns torch.distributed. One process alone needs no torchrun."""

import os
from datetime import timedelta
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed
from torch.distributed import (
    PrefixStore,  # pyright: ignore[reportPrivateImportUsage]
    Store,  # pyright: ignore[reportPrivateImportUsage]
    TCPStore,  # pyright: ignore[reportPrivateImportUsage]
)
from torch.distributed.rendezvous import rendezvous

from conf.runtime import RankInfo
from conf.schema import ConfigError, Device

Payload = TypeVar("Payload")
Board = Store  # small texts by key, that all ranks write and read
LOOPBACK = "127.0.0.1"
PATIENCE = timedelta(hours=24)  # rank 0 may evaluate for hours while the others wait for it


def pick_device(choice: Device, local_rank: int) -> torch.device:
    """The device of this process: its own GPU, or the CPU. Raises ConfigError without one."""
    cuda = torch.cuda.is_available()
    if choice is Device.cpu or (choice is Device.auto and not cuda):
        return torch.device("cpu")
    if not cuda:
        raise ConfigError("run.device=cuda: torch finds no CUDA device; take run.device=cpu")
    if local_rank >= torch.cuda.device_count():
        raise ConfigError(
            f"run.device={choice.value}: process {local_rank} of this machine needs a GPU of its "
            f"own and {torch.cuda.device_count()} are visible; start as many processes as GPUs "
            "with torchrun --nproc-per-node"
        )
    return torch.device("cuda", local_rank)


def use_threads(threads: int | None) -> None:
    """Compute with so many CPU threads; None: this rank's share of the cores it may run on."""
    # oneDNN, which computes bf16 products on a CPU, builds code for each shape it meets, 0.8 ms a
    # time, and forgets beyond 1,024. Packs vary: remembering more takes a third off small steps.
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "16384")
    # torchrun says how many ranks this machine has by the first name, DeepSpeed's launcher by the
    # second.
    local = int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or "1")
    torch.set_num_threads(threads or max(1, len(os.sched_getaffinity(0)) // local))


def setup(device: torch.device) -> None:
    """Join the other ranks: gloo on the CPU, nccl on CUDA. A second call does nothing.

    A process alone opens a store of its own on a port that the system picks, and writes the
    variables that torchrun would have set, because DeepSpeed reads them.
    """
    if distributed.is_initialized():
        return
    ranks = RankInfo.from_env()
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.set_device(device)
    store = alone() if ranks.world_size == 1 else meeting()
    distributed.init_process_group(
        "nccl" if on_gpu else "gloo",
        store=store,
        rank=ranks.rank,
        world_size=ranks.world_size,
        timeout=PATIENCE,
        device_id=device if on_gpu else None,
    )


@cache
def meeting() -> Store:
    """The store through which the ranks that torchrun started find each other."""
    store, _rank, _size = next(rendezvous("env://", timeout=PATIENCE))
    return PrefixStore("ranks", store)


def board() -> Board:
    """A connection of its own to the same store: the group's may be busy waiting on it."""
    store: Any = meeting()  # its type lacks clone
    return PrefixStore("board", store.clone())


def alone() -> TCPStore:
    """The store of a world of one, and the environment that goes with it."""
    store = TCPStore(LOOPBACK, 0, 1, is_master=True, timeout=PATIENCE)
    os.environ.update(
        RANK="0",
        WORLD_SIZE="1",
        LOCAL_RANK="0",
        MASTER_ADDR=LOOPBACK,
        MASTER_PORT=str(store.port),
    )
    return store


def shutdown() -> None:
    """Leave the group. Not for error paths: a rank that fails ends, and torchrun ends the rest."""
    if distributed.is_initialized():
        distributed.destroy_process_group()


def sum_over_ranks(tensor: Tensor) -> Tensor:
    """Add up ``tensor`` over all ranks, in place, and return it. Alone: nothing to do."""
    if distributed.is_initialized():
        distributed.all_reduce(tensor)
    return tensor


def barrier() -> None:
    """Wait until every rank is here."""
    if distributed.is_initialized():  # a reduction: nccl's own barrier must be told the device
        sum_over_ranks(torch.zeros((), device=meeting_place())).item()  # reading it waits for CUDA


def broadcast_object(value: Payload) -> Payload:
    """Rank 0's ``value`` on every rank; what the others pass is ignored. It is pickled."""
    if not distributed.is_initialized():
        return value
    carrier = [value]
    distributed.broadcast_object_list(carrier, src=0, device=meeting_place())
    return carrier[0]


def gather_objects(value: Payload) -> list[Payload]:
    """Every rank's ``value``, by rank, on every rank. They are pickled."""
    if not distributed.is_initialized():
        return [value]
    gathered: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(gathered, value)
    return gathered


def meeting_place() -> torch.device:
    """Where tensors must lie that the backend exchanges."""
    on_gpu = distributed.get_backend() == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
