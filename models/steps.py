"""How a verifier step runs: plainly, compiled, or as a CUDA graph, over shapes that never change.

A step feeds each sequence one token or a root and its guesses. Decoding with a draft and without
takes them from here alike, so that a speed-up is over the best baseline. Compiled and graphed steps
have one graph for each pair of sequences and tokens a sequence: a sequence that leaves the batch
keeps its slot, as junk, until the batch ends, so that sizes between need no graph of their own.
Their memory outlives a decoding and grows, where it must, by 256 tokens, which makes graphs anew.
"""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from conf.choices import StepKind
from conf.runtime import progress, say
from conf.schema import ConfigError
from models.branches import Branches
from models.fixed import FixedCache
from models.kv import KVCache
from models.verifier import Verifier, VerifierStates

CAPACITIES = 256  # a capacity is a multiple of it: answers of other lengths find their graphs
BACKEND = "inductor"
MOST_GRAPHS = 64  # compiled; an evaluation has a few batch sizes times a few shapes of guesses
TIMED = 10  # steps behind a choice
WARM_UP = 3  # steps before a capture: libraries make their workspaces in the first ones


@dataclass(frozen=True)
class Step:
    """What one forward gave. Of a graphed step, until the next one: its memory is used again."""

    states: VerifierStates
    logits: Tensor  # [B, T, V]


def run(
    verifier: Verifier, tokens: Tensor, cache: KVCache | FixedCache, branches: Branches | None
) -> Step:
    states = verifier.states(tokens, cache, branches)
    return Step(states, verifier.logits_from(states.last))


class Frame:
    """The inputs of one shape at fixed addresses, and the way its steps run."""

    def __init__(self, fixed: FixedCache, width: int):
        slots, device = len(fixed.lengths), fixed.lengths.device
        self.fixed = fixed
        self.tokens = torch.zeros(slots, width, dtype=torch.long, device=device)
        self.line = Branches.line(slots, width, device)
        self.branches = Branches(self.line.depth.clone(), self.line.seen.clone())
        self.lined = True  # the branches are a line now
        self.take: Callable[[], Step] | None = None

    def fill(self, tokens: Tensor, cache: KVCache, branches: Branches | None) -> None:
        """Copy tokens [B, T] and ``branches`` of the sequences still there to the first slots."""
        batch = len(tokens)
        self.fixed.follow(cache)
        self.tokens[:batch].copy_(tokens)
        if branches is not None or not self.lined:
            given = branches or self.line
            self.branches.depth[:batch].copy_(given.depth[:batch])
            self.branches.seen[:batch].copy_(given.seen[:batch])
        self.lined = branches is None


class Steps:
    """A verifier's steps, for one decoding at a time."""

    def __init__(self, verifier: Verifier, kind: StepKind = StepKind.eager):
        """Raises ConfigError for a kind that cannot work here."""
        refuse(kind, verifier.device)
        self.verifier = verifier
        alone = kind is StepKind.auto and verifier.device.type != "cuda"
        self.kind = StepKind.eager if alone else kind  # auto until the first step, on CUDA
        self._cache: KVCache | None = None
        self._frames: dict[tuple[int, int], Frame] = {}  # by slots and tokens a sequence
        self._views: dict[int, FixedCache] = {}  # by slots
        self._compiled: Callable[..., Step] | None = None
        self._pool: Any = None  # CUDA's handle of what graphs keep between their kernels

    def cache(self, batch: int, capacity: int) -> KVCache:
        """An empty cache for ``batch`` sequences of up to ``capacity`` tokens, guesses included."""
        model, device = self.verifier.model, self.verifier.device
        if self.kind is StepKind.eager:
            return KVCache(model.config, batch, capacity, device, model.dtype)
        known = self._cache
        if known is None or known.room < batch or known.capacity < capacity:
            room = max(batch, known.room if known else 0)
            longest = max(capacity, known.capacity if known else 0)
            self._forget()
            longest = -(-longest // CAPACITIES) * CAPACITIES
            self._cache = known = KVCache(model.config, room, longest, device, model.dtype)
        known.begin(batch)
        return known

    def _forget(self) -> None:
        """Drop the memory and what was made for it."""
        self._frames.clear()
        self._views.clear()
        self._cache = self._compiled = self._pool = None

    def take(self, tokens: Tensor, cache: KVCache, branches: Branches | None = None) -> Step:
        """One forward over ``tokens`` [B, T] at the ends of ``cache``, which was made here."""
        if self.kind is StepKind.auto:
            self.kind = self._fastest(cache, [tokens.shape[1]])
        if self.kind is StepKind.eager:
            return run(self.verifier, tokens, cache, branches)
        cache.check_room(tokens.shape[1])
        frame = self._frame(cache, tokens.shape[1])
        frame.fill(tokens, cache, branches)
        if frame.take is None:
            frame.take = self._way(frame)
        step, batch = frame.take(), cache.batch
        states = VerifierStates(step.states.aux[:batch], step.states.last[:batch])
        return Step(states, step.logits[:batch])

    @torch.inference_mode()
    def prepare(self, batch: int, capacity: int, widths: Sequence[int]) -> None:
        """Settle ``auto`` and make every graph, so that nothing is made within a timed run.

        ``widths``: tokens a sequence of the steps to come; 1 is the plain step. Compiling takes a
        minute or so for each.
        """
        if self.kind is StepKind.eager:
            return
        cache = self.cache(batch, capacity)
        tokens = torch.zeros(batch, max(widths), dtype=torch.long, device=self.verifier.device)
        self.verifier.states(tokens[:, :1], cache)
        cache.advance(1)
        if self.kind is StepKind.auto:
            self.kind = self._fastest(cache, widths)
        for width in progress(widths, len(widths), f"{self.kind.value} steps", "shape"):
            self.take(tokens[:, :width], cache)

    def _frame(self, cache: KVCache, width: int) -> Frame:
        slots = cache.slots
        if slots not in self._views:
            self._views[slots] = FixedCache(cache)
        if (slots, width) not in self._frames:
            self._frames[slots, width] = Frame(self._views[slots], width)
        return self._frames[slots, width]

    def _way(self, frame: Frame) -> Callable[[], Step]:
        """The steps of ``frame`` from now on; it holds the inputs of the first. ConfigError."""
        inputs = (self.verifier, frame.tokens, frame.fixed, frame.branches)
        try:
            if self.kind is StepKind.graphed:
                self._pool = self._pool or torch.cuda.graph_pool_handle()
                return captured(lambda: run(*inputs), self._pool)
            compiled = self._compiled = self._compiled or compiled_run()
            compiled(*inputs)
        except RuntimeError as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            raise ConfigError(
                f"eval.step={self.kind.value}: a step of {type(self.verifier.model).__name__} "
                f"cannot be ({first_line(error)}); take eval.step=eager"
            ) from error
        return lambda: compiled(*inputs)

    def _fastest(self, cache: KVCache, widths: Sequence[int]) -> StepKind:
        """Time the kinds that run here at the ends of ``cache``, whose lengths stay. Says which."""
        kinds = [StepKind.eager, StepKind.graphed]
        if has_compiler(self.verifier.device):
            kinds.append(StepKind.compiled)
        taken: dict[StepKind, float] = {}
        for kind in kinds:
            try:
                taken[kind] = sum(self._seconds(kind, cache, width) for width in widths)
            except ConfigError as refusal:
                say(f"eval.step=auto goes without: {refusal}")
        self._frames.clear()
        best = min(taken, key=lambda kind: taken[kind])
        if best is StepKind.eager:
            self._forget()
        times = ", ".join(f"{kind.value} {1e3 * taken[kind]:.2f} ms" for kind in taken)
        say(f"eval.step=auto: {best.value} ({times} for steps of {list(widths)} tokens)")
        return best

    def _seconds(self, kind: StepKind, cache: KVCache, width: int) -> float:
        """The median of some steps, their way made before."""
        self.kind = kind
        self._frames.clear()
        tokens = torch.zeros(cache.batch, width, dtype=torch.long, device=cache.device)
        seconds: list[float] = []
        for _ in range(1 + TIMED):
            begin = now(cache.device)
            self.take(tokens, cache)
            seconds.append(now(cache.device) - begin)
        return median(seconds[1:])


def compiled_run() -> Callable[..., Step]:
    """``run`` by torch.compile, with graphs of its own: one for each shape, no fall back."""
    return torch.compile(  # pyright: ignore[reportCallIssue]  overloads lack the last two
        run,
        backend=BACKEND,
        fullgraph=True,
        dynamic=False,
        recompile_limit=MOST_GRAPHS,
        isolate_recompiles=True,
    )


def captured(work: Callable[[], Step], pool: Any) -> Callable[[], Step]:
    """Capture ``work`` once; each call replays it and gives the same tensors, with new content.

    Graphs of one ``pool`` share what they need between their kernels; results stay apart.
    """
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(WARM_UP):
            work()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        step = work()

    def replay() -> Step:
        graph.replay()
        return step

    return replay


def now(device: torch.device) -> float:
    """Seconds, once the device has done what was asked of it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return perf_counter()


def first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def refuse(kind: StepKind, device: torch.device) -> None:
    """Raise ConfigError for a kind that cannot work on ``device``."""
    if kind is StepKind.graphed and device.type != "cuda":
        raise ConfigError(
            f"eval.step=graphed: CUDA graphs need CUDA, and this run computes on {device}; take "
            "eval.step=auto"
        )
    if kind is StepKind.compiled and not has_compiler(device):
        raise ConfigError(
            f"eval.step=compiled: needs a {'C' if device.type == 'cuda' else 'C++'} compiler, and "
            "none is installed; install g++, or take eval.step=eager"
        )


def has_compiler(device: torch.device) -> bool:
    """torch.compile writes C++ for a CPU, and for CUDA kernels that a stub in C launches."""
    names = ("gcc", "cc", "clang") if device.type == "cuda" else ("g++", "c++", "clang++")
    return any(map(shutil.which, names))
