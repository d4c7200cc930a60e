"""A checkpoint of another number of ranks: every rank takes its part of whole masters and moments.

ZeRO cuts fp32 masters and Adam's moments into one part a rank, and DeepSpeed loads only as many
parts as there are ranks. Here the parts are joined, one parameter at a time, and cut anew.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from conf.schema import ConfigError
from data.distributed import gather_objects

MOMENTS = ("exp_avg", "exp_avg_sq")
MASTER = "master"
PATTERN = "*zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"  # bf16_ may stand before it


@dataclass(frozen=True)
class Stretch:
    """Where a piece of a parameter lies in the flat tensor of one group."""

    group: int
    begin: int
    numel: int


def part_files(folder: Path, world_size: int) -> list[Path]:
    """The optimizer's file of each rank. Raises ConfigError when one is not there."""
    found = [list(folder.glob(PATTERN.format(rank=rank))) for rank in range(world_size)]
    for rank, files in enumerate(found):
        if len(files) != 1:
            raise ConfigError(f"{folder}: the optimizer state of rank {rank} is not there")
    return [files[0] for files in found]


def flats(state: dict[str, Any], kind: str) -> list[Tensor]:
    """The flat tensors of one rank, one a group (stages 1 and 2) or a sub-group (stage 3)."""
    if kind == MASTER:
        at_stage_3 = "fp32_flat_groups" in state
        return state["fp32_flat_groups" if at_stage_3 else "single_partition_of_fp32_groups"]
    moments = adam_of(state)["state"]
    return [moments[group][kind] for group in sorted(moments)]


def adam_of(state: dict[str, Any]) -> dict[str, Any]:
    """The state of Adam itself, as torch writes it, inside a ZeRO optimizer's."""
    return state["optimizer_state_dict" if "fp32_flat_groups" in state else "base_optimizer_state"]


def rank_stretches(state: dict[str, Any]) -> dict[str, Stretch]:
    """Stages 1 and 2: where the named parameters of one rank's file lie in it."""
    return {
        name: Stretch(group, address.start, address.numel)
        for group, mapping in enumerate(state["param_slice_mappings"])
        for name, address in mapping.items()
    }


def joined(states: list[dict[str, Any]], name: str, kind: str) -> Tensor:
    """[numel] one whole parameter (or moment) from the pieces of all ranks, stages 1 and 2."""
    pieces = []
    for state in states:
        place = rank_stretches(state).get(name)
        if place is not None:
            pieces.append(flats(state, kind)[place.group][place.begin :][: place.numel])
    return torch.cat(pieces)


def fill_stage_2(template: dict[str, Any], states: list[dict[str, Any]], rank: int) -> None:
    """Put into ``template``, this rank's fresh state, its part of what ``states`` hold."""
    by_rank = gather_objects({n: s.numel for n, s in rank_stretches(template).items()})
    for name, place in rank_stretches(template).items():
        skipped = sum(numels.get(name, 0) for numels in by_rank[:rank])
        for kind in (MASTER, *MOMENTS):
            whole = joined(states, name, kind)
            target = flats(template, kind)[place.group][place.begin :][: place.numel]
            target.copy_(whole[skipped:][: place.numel])


def cut(numel: int, ranks: int) -> int:
    """Elements of a parameter in one rank's part at stage 3; the last part is padded."""
    return -(-numel // ranks)


def fill_stage_3(
    template: dict[str, Any], states: list[dict[str, Any]], numels: list[int], rank: int
) -> None:
    """The same at stage 3: ``numels`` are the whole sizes of the parameters, in ZeRO's order.

    A rank's sub-groups, end to end, hold its part of each parameter in that order.
    """
    ranks = len(gather_objects(rank))
    for kind in (MASTER, *MOMENTS):
        old = [torch.cat([flat.view(-1) for flat in flats(state, kind)]) for state in states]
        mine = []
        for begin, numel in starts(numels, len(states)):
            part = cut(numel, len(states))
            whole = torch.cat([flat[begin : begin + part] for flat in old])[:numel]
            room = torch.zeros(cut(numel, ranks) * ranks, dtype=whole.dtype)
            room[:numel] = whole
            mine.append(room.view(ranks, -1)[rank])
        new = torch.cat(mine)
        for target in flats(template, kind):
            target.view(-1).copy_(new[: target.numel()])
            new = new[target.numel() :]
        assert not len(new)


def starts(numels: list[int], ranks: int) -> Iterator[tuple[int, int]]:
    """(where its part begins in a rank's sub-groups, whole size) of each parameter, stage 3."""
    begin = 0
    for numel in numels:
        yield begin, numel
        begin += cut(numel, ranks)


def with_moments(
    fresh: dict[str, Any], masters: list[Tensor], states: list[dict[str, Any]]
) -> dict[str, Any]:
    """This rank's ``fresh`` state with tensors of its own to fill, shaped as its ``masters`` are,
    and with Adam's step count as in ``states``."""
    moments = adam_of(states[0])["state"]
    step = next(one["step"] for one in moments.values())
    rooms = {
        group: {"step": step.clone(), **{kind: torch.zeros_like(flat) for kind in MOMENTS}}
        for group, flat in enumerate(masters)
    }
    own = [torch.zeros_like(flat) for flat in masters]
    at_stage_3 = "fp32_flat_groups" in fresh
    where = "optimizer_state_dict" if at_stage_3 else "base_optimizer_state"
    kept = "fp32_flat_groups" if at_stage_3 else "single_partition_of_fp32_groups"
    return {**fresh, kept: own, where: {**adam_of(fresh), "state": rooms}}
