"""The packer: samples of varying length into packs of at most so many tokens."""

from bisect import bisect_left, insort
from dataclasses import dataclass

import torch
from torch import Tensor

CHUNK = 1024  # samples packed together: enough to fill packs, few enough to keep the order random


@dataclass(frozen=True)
class Packing:
    """P packs of N samples: pack p holds samples[ends[p] : ends[p + 1]], longest first."""

    samples: Tensor  # [N] int64
    ends: Tensor  # [P+1] int64, from 0

    @classmethod
    def of(cls, lengths: Tensor, budget: int, generator: torch.Generator) -> "Packing":
        """lengths [N] tokens of each sample -> packs of samples from all over the data.

        The samples are shuffled and cut into chunks of about 1,024, each packed on its own, so a
        million samples take seconds. The same lengths, budget and seed give the same packs.
        """
        samples, ends = [], [0]
        order = torch.randperm(len(lengths), generator=generator)
        for chunk in order.tensor_split(max(1, -(-len(order) // CHUNK))):
            numbers = chunk.tolist()
            for chosen in pack(lengths[chunk].tolist(), budget):
                samples += [numbers[i] for i in chosen]
                ends.append(len(samples))
        return cls(torch.tensor(samples, dtype=torch.int64), torch.tensor(ends))

    def __len__(self) -> int:
        return len(self.ends) - 1

    def __getitem__(self, number: int) -> list[int]:
        start, end = self.ends[number : number + 2].tolist()
        return self.samples[start:end].tolist()


def pack(lengths: list[int], budget: int) -> list[list[int]]:
    """lengths of samples -> packs of their numbers, each of at most ``budget`` tokens.

    Best fit, longest first: each sample goes where the least room stays; at most 11/9 of the fewest
    packs possible, and one more (Johnson et al., SIAM J. Comput. 3, 1974). A sample longer than the
    budget is a pack of its own. The same lengths give the same packs.
    """
    packs: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # (tokens left, pack), ascending
    for number in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        length = lengths[number]
        place = bisect_left(rooms, (length, 0))
        left, chosen = rooms.pop(place) if place < len(rooms) else (budget, len(packs))
        if chosen == len(packs):
            packs.append([])
        packs[chosen].append(number)
        if left > length:
            insort(rooms, (left - length, chosen))
    return packs
