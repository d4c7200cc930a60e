"""The wish to stop: SIGTERM is noted, and all ranks leave training after the same step."""

import signal
from types import FrameType

import torch

from data.distributed import sum_over_ranks


class StopRequest:
    """While it is entered, SIGTERM sets ``asked`` instead of ending the process.

    One rank alone may get the signal, and none may leave a step that others have begun. So fit()
    sends ``asked`` along with the reduction that every step makes anyway.
    """

    def __init__(self):
        self.asked = False

    def __enter__(self) -> "StopRequest":
        self.former = signal.signal(signal.SIGTERM, self.note)
        return self

    def __exit__(self, *_error: object) -> None:
        signal.signal(signal.SIGTERM, self.former)

    def note(self, _signal: int, _frame: FrameType | None) -> None:
        self.asked = True

    def by_any_rank(self, device: torch.device) -> bool:
        """Whether any rank was asked: a reduction of its own, for after the last step."""
        return bool(sum_over_ranks(torch.tensor(float(self.asked), device=device)))
