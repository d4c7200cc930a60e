"""Watches over ranks that work together: no silent hang, and one clear sentence on rank 0.

Each rank's watch is a thread that writes a sign of life on a board all ranks can read (the store
of the rendezvous). It ends the job in three cases, and rank 0 says which:
- a rank has failed: its sentence is on the board;
- a rank gives no sign of life for engine.timeout_minutes (it is stopped, or its machine is gone);
- a rank's main thread has used no CPU time for so long without waiting for other ranks, or all
  ranks wait for one another. Rank 0 may well prepare or evaluate for hours while the rest waits.
"""

import json
import os
import re
import signal
import sys
import threading
import time
import traceback
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType, TracebackType

from conf.compose import in_words
from conf.runtime import ROOT, RankInfo, note_in_log
from conf.schema import ConfigError, JobError
from data.distributed import Board, board

BEAT = 0.25  # seconds between two signs of life
LISTENING = 10.0  # seconds that a rank waits for rank 0 to say what happened
NAMING = 3.0  # seconds in which a lost rank is told from the living by its silence
IDLE = 1e-3  # CPU seconds a beat below which the main thread stands still
FAULT, SAID = "fault", "said"
LOST = re.compile(r"gloo|nccl|peer|Connection|Broken pipe|Timed out|socket", re.IGNORECASE)
AT_OTHERS = (("torch", "distributed"), ("torch", "autograd"))  # reductions run inside backward
HERE = ROOT / "data" / "distributed.py"
AGAIN = "run the same command again, which goes on from the newest checkpoint"


@dataclass(frozen=True)
class Sign:
    """What a rank writes on the board: a count that rises, and what its main thread does."""

    count: int
    still: float  # seconds without any CPU time
    waits: bool  # for other ranks
    place: str  # the line of Eyrie it is at


@dataclass(frozen=True)
class Fault:
    code: int  # the exit code
    sentence: str


class Watch:
    """While it is entered, this process is watched, and watches. Alone it does nothing."""

    def __init__(self, ranks: RankInfo, minutes: float):
        self.ranks, self.minutes = ranks, minutes
        self.ends = threading.Event()
        self.main = threading.main_thread()
        self.thread = threading.Thread(target=self.run, name="watch", daemon=True)
        self.speaking = threading.Lock()

    def __enter__(self) -> "Watch":
        if self.ranks.world_size > 1:
            self.board = board()
            self.others = Others(self.ranks.world_size, self.minutes)
            self.former = signal.signal(signal.SIGTERM, asked_to_end)
            self.thread.start()
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        error: BaseException | None,
        _t: TracebackType | None,
    ) -> None:
        if self.ranks.world_size == 1:
            return
        signal.signal(signal.SIGTERM, self.former if error is None else signal.SIG_IGN)
        if isinstance(error, Exception):
            self.tell(in_words(error))
        self.ends.set()
        self.thread.join()

    def tell(self, error: Exception) -> None:
        """An error of this rank, for rank 0 to say. Raises what is to be said in its place."""
        lost = isinstance(error, Ended) or (isinstance(error, RuntimeError) and is_lost(error))
        own = not lost
        if lost:
            time.sleep(NAMING)  # a rank that failed has said so by now, and the thread has heard it
            error = self.without(error)
        code = 2 if isinstance(error, ConfigError) else 1
        told = str(error)
        if not isinstance(error, ConfigError | JobError):  # a mistake of the program's
            traceback.print_exception(error)
            told = f"{type(error).__name__}: {first_line(error)} (its traceback is above)"
        if own and not self.ranks.is_main:
            told = f"rank {self.ranks.rank}: {told}"
        fault = json.dumps(asdict(Fault(code, told)))
        first = self.board.compare_set(FAULT, "", fault).decode() == fault
        if not (self.ranks.is_main and first):
            self.thread.join(LISTENING + 5)  # it ends this process
        self.ends.set()
        with self.speaking:
            self.board.set(SAID, "")
        raise error

    def without(self, error: Exception) -> Exception:
        """What a broken connection, or SIGTERM from torchrun, comes from: ranks that are gone."""
        own = self.others.age(self.ranks.rank)  # where cores are scarce all signs are late
        silent = self.others.silent(max(NAMING / 2, 3 * own))
        if silent:
            return JobError(
                f"{numbers(silent)} ended without a word (killed, or out of memory?); {AGAIN}"
            )
        if isinstance(error, Ended):
            return error
        return JobError(f"the connection between ranks broke ({first_line(error)}); {AGAIN}")

    def run(self) -> None:
        """The thread."""
        try:
            self.watch()
        except RuntimeError as error:  # the board is gone: torchrun was killed, or all is over
            if not self.ends.wait(2.0):
                self.leave(
                    Fault(1, f"torchrun is gone, and its ranks end ({first_line(error)}); {AGAIN}")
                )

    def watch(self) -> None:
        clock = time.pthread_getcpuclockid(self.main.ident or 0)
        count, used, moved = 0, time.clock_gettime(clock), time.monotonic()
        while not self.ends.wait(BEAT):
            now, spent = time.monotonic(), time.clock_gettime(clock)
            if spent - used > IDLE or self.main_is_runnable():
                moved = now
            count, used = count + 1, spent
            place = whereabouts(sys._current_frames().get(self.main.ident or 0))
            sign = Sign(count, now - moved, place.waits, place.line)
            self.board.set(key(self.ranks.rank), json.dumps(asdict(sign)))
            fault = self.others.judge(self.board)
            if fault is not None:
                self.board.compare_set(FAULT, "", json.dumps(asdict(fault)))
            if self.board.check([FAULT]):
                self.leave(Fault(**json.loads(self.board.get(FAULT))))

    def main_is_runnable(self) -> bool:
        """It wants a core, on a machine that has too few: no hang."""
        stat = Path(f"/proc/self/task/{self.main.native_id}/stat").read_text()
        return stat.rpartition(")")[2].split()[0] == "R"

    def leave(self, fault: Fault) -> None:
        """End this process; rank 0 says why, or whoever finds that it does not."""
        with self.speaking:
            if self.ends.is_set():
                return  # the main thread speaks
            if self.ranks.is_main or not self.was_said():
                sys.stdout.flush()
                sys.stderr.write(f"\n{fault.sentence}\n")
                sys.stderr.flush()
                note_in_log(fault.sentence)
            if self.ranks.is_main:
                with suppress(RuntimeError):  # torchrun may be gone, and the board with it
                    self.board.set(SAID, "")
            os._exit(fault.code)

    def was_said(self) -> bool:
        end = time.monotonic() + LISTENING
        while time.monotonic() < end:
            try:
                if self.board.check([SAID]):
                    return True
            except RuntimeError:  # the board is gone for rank 0, too, which speaks
                return True
            time.sleep(BEAT)
        return False


class Others:
    """What one rank knows of all, by its own clock alone: machines' clocks differ."""

    def __init__(self, world_size: int, minutes: float):
        self.world_size, self.minutes = world_size, minutes
        self.signs: dict[int, Sign] = {}
        self.heard = dict.fromkeys(range(world_size), time.monotonic())

    def age(self, rank: int) -> float:
        """Seconds since its last sign of life."""
        return time.monotonic() - self.heard[rank]

    def silent(self, seconds: float) -> list[int]:
        return [rank for rank in self.heard if self.age(rank) > seconds]

    def judge(self, where: Board) -> Fault | None:
        """Read the board -> what is wrong, if anything is."""
        now = time.monotonic()
        for rank in range(self.world_size):
            if where.check([key(rank)]):
                sign = Sign(**json.loads(where.get(key(rank))))
                if rank not in self.signs or sign.count != self.signs[rank].count:
                    self.heard[rank] = now
                self.signs[rank] = sign
        wrong = self.wrong()
        if wrong is None:
            return None
        limit = f"engine.timeout_minutes={self.minutes:g}"
        return Fault(1, f"{wrong} for longer than {limit}; mend that, and {AGAIN}")

    def wrong(self) -> str | None:
        patience = 60 * self.minutes
        silent = self.silent(patience)
        if silent:
            return f"{numbers(silent)} gave no sign of life (stopped, or its machine is gone)"
        still = {rank: sign for rank, sign in self.signs.items() if sign.still > patience}
        stuck = [rank for rank, sign in still.items() if not sign.waits]
        if stuck:
            return f"{numbers(stuck)} did not move from {still[stuck[0]].place}"
        if len(still) == self.world_size:
            places = sorted({sign.place for sign in still.values()})
            return f"all ranks waited for one another at {', '.join(places)}"
        return None


class Ended(JobError):
    """SIGTERM came while no training could note it."""


def asked_to_end(_signal: int, _frame: FrameType | None) -> None:
    raise Ended("ended by SIGTERM; the same command goes on from what is finished")


@dataclass(frozen=True)
class Place:
    waits: bool
    line: str


def whereabouts(frame: FrameType | None) -> Place:
    """Where a thread is: inside a collective or not, and the innermost line of Eyrie."""
    waits = False
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        waits = waits or path.parts[-3:-1] in AT_OTHERS or "deepspeed" in path.parts
        if path.is_relative_to(ROOT) and "site-packages" not in path.parts and path != HERE:
            return Place(waits, f"{path.relative_to(ROOT)}:{frame.f_lineno}")
        frame = frame.f_back
    return Place(waits, "its start")


def key(rank: int) -> str:
    return f"sign/{rank}"


def numbers(ranks: list[int]) -> str:
    word = "rank" if len(ranks) == 1 else "ranks"
    return f"{word} {', '.join(map(str, ranks))}"


def is_lost(error: RuntimeError) -> bool:
    """Whether a collective failed because its other end did."""
    return bool(LOST.search(str(error)))


def first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
