"""The time of a plan: what computes, reads and communicates, and which of them binds."""

from dataclasses import dataclass

from launch.planning.hardware import GB
from launch.planning.question import (
    Question,
    forward_flops,
    training_flops,
)

HOUR = 3600.0


@dataclass(frozen=True)
class Hours:
    """Of one pass over the samples, on all GPUs together; wall time."""

    compute: float
    disk: float  # reading or writing the cache
    links: float = 0.0  # communication, which nothing hides

    @property
    def total(self) -> float:
        """The disk is read ahead and written behind, so the longer of the two counts."""
        return max(self.compute + self.links, self.disk)

    @property
    def bound(self) -> str:
        if self.disk > self.compute + self.links:
            return "disk"
        return "communication" if self.links > self.compute else "compute"


def disk_hours(asked: Question) -> float:
    """Bytes of the cache / (plan.read_gbs of each machine x machines that the GPUs fill)."""
    machines = -(-asked.gpus // asked.cfg.plan.node_gpus)
    rate = asked.cfg.plan.read_gbs * GB * machines
    return asked.stored_bytes / rate / HOUR


def capture_hours(asked: Question) -> Hours:
    """Forward FLOPs of all samples / (GPUs x peak x plan.forward_mfu); writing beside it."""
    plan = asked.cfg.plan
    rate = asked.gpus * asked.hardware.peak * plan.forward_mfu
    compute = asked.samples * forward_flops(asked) / rate / HOUR
    return Hours(compute, disk_hours(asked))


def epoch_hours(asked: Question) -> Hours:
    """Training FLOPs of all samples / (GPUs x peak x plan.train_mfu), steps x communication of one,
    and reading the cache once."""
    plan = asked.cfg.plan
    rate = asked.gpus * asked.hardware.peak * plan.train_mfu
    compute = asked.samples * training_flops(asked).total / rate / HOUR
    links = asked.epoch_steps * step_seconds(asked) / HOUR
    return Hours(compute, disk_hours(asked), links)


def step_seconds(asked: Question) -> float:
    """Communication of one step: 2 x P x w x (W - 1) / W / bandwidth.

    Gradients of the P trained parameters are reduced and scattered, new weights gathered: a ring
    sends (W - 1) / W of their w bytes for each. Inside one machine over NVLink; with several each
    GPU's network port is the slowest part of the ring. ZeRO-3 gathers weights again in forward and
    backward: twice as much on top.
    """
    ranks = asked.gpus
    if ranks == 1:
        return 0.0
    alone = ranks <= asked.cfg.plan.node_gpus
    rate = asked.hardware.link if alone else asked.hardware.network
    trips = 4 if asked.cfg.engine.zero_stage == 3 else 2
    sent = trips * asked.draft.trainable * asked.weight_bytes * (ranks - 1) / ranks
    return sent / rate


def online_hours(asked: Question) -> float:
    """One pass with the verifier beside the draft: both computations, nothing read or written."""
    epoch = epoch_hours(asked)
    return capture_hours(asked).compute + epoch.compute + epoch.links


def break_even(asked: Question) -> float | None:
    """Passes from which on a cache takes less time than capture.mode=online; None: never.

    Cached: capture + n x epoch. Online: n x (forward + training). Equal at n = capture / (online -
    epoch).
    """
    gained = online_hours(asked) - epoch_hours(asked).total
    return capture_hours(asked).total / gained if gained > 0 else None


def needed_read_gbs(asked: Question) -> float:
    """Gigabytes a second, over all machines, at which training never waits for the cache."""
    epoch = epoch_hours(asked)
    return asked.stored_bytes / ((epoch.compute + epoch.links) * HOUR) / GB
