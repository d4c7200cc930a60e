"""The shapes of guesses that are weighed: tokens a round over the measured cost of a round."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from conf.shapes import DynamicShape, StaticShape, chain, parse_shape
from eval.acceptance import Interval
from eval.advice.acceptance_mix import Mix
from eval.arithmetic.tree_theory import HitRates, best_tree, expected_tokens_of_tree
from eval.speed_report import CostTable, ShapeSpeed, interpolate
from eval.theory import BAND

TREE_BUDGETS = (4, 8, 14, 24, 48)  # guesses a round that trees are searched for


@dataclass(frozen=True)
class Candidate:
    """One shape at one batch size. Costs are in plain steps of the verifier at that batch."""

    shape: str  # its name, see conf/shapes.py
    depth: int
    nodes: int
    tau: float  # tokens a round
    tau_from: str
    verify: float  # v of nodes + 1 tokens
    draft: float  # d, all drafting of a round
    rest: float
    measured: float | None = None  # decode speed-up as timed at this batch, mix and temperature
    interval: Interval | None = None  # of it
    predicted: float = field(init=False)  # speed-up, tau / (verify + draft + rest)
    worked: str = field(init=False)  # the same, figure by figure

    def __post_init__(self) -> None:
        predicted = self.tau / self.cost
        rest = f" + {self.rest:.3f}" if self.rest else ""
        costs = f"{self.verify:.3f} + {self.draft:.3f}{rest}"
        object.__setattr__(self, "predicted", predicted)
        object.__setattr__(self, "worked", f"{self.tau:.3f} / ({costs}) = {predicted:.3f}")

    @property
    def is_chain(self) -> bool:
        return self.depth == self.nodes

    @property
    def cost(self) -> float:
        return self.verify + self.draft + self.rest


@dataclass(frozen=True)
class Timed:
    """Shapes as timed at the batch size in question; empty where it was not timed."""

    speeds: dict[str, ShapeSpeed]
    load: float = 1.0  # tokens a round of the load in question / of the timed one

    def of(self, candidate: Candidate) -> Candidate:
        """``candidate`` with its measurement, if it has one."""
        found = self.speeds.get(candidate.shape)
        if found is None:
            return candidate
        spread = found.speedup_decode_interval
        return replace(
            candidate,
            measured=found.speedup_decode * self.load,
            interval=Interval(spread.low * self.load, spread.high * self.load),
        )


@dataclass(frozen=True)
class Chains:
    """Every chain that was measured, by the predicted speed-up."""

    all: list[Candidate]  # of 1, 2, ... guesses

    @property
    def best(self) -> Candidate:
        return max(self.all, key=lambda one: (one.predicted, -one.nodes))

    @property
    def band(self) -> list[int]:
        """The shortest and the longest in a row around the best that lose less than 1 % of it."""
        at = self.best.nodes
        good = [one.nodes for one in self.all if one.predicted >= (1 - BAND) * self.best.predicted]
        low, high = at, at
        while low - 1 in good:
            low -= 1
        while high + 1 in good:
            high += 1
        return [low, high]

    @property
    def around(self) -> list[Candidate]:
        """Three in a row with the best among them, in the middle where it can be."""
        first = min(max(self.best.nodes - 2, 0), max(len(self.all) - 3, 0))
        return self.all[first : first + 3]

    @property
    def at_edge(self) -> bool:
        """The best is the longest measured: a longer one may be better."""
        return self.best is self.all[-1]


def weigh_chains(mix: Mix, table: CostTable, timed: Timed, longest: int) -> Chains:
    """Chains of 1 to ``longest`` guesses, which must have been measured."""
    found: list[Candidate] = []
    for n in range(1, longest + 1):
        one = Candidate(
            shape=chain(n).name,
            depth=n,
            nodes=n,
            tau=mix.tau(n),
            tau_from="survival by depth",
            verify=interpolate(table.verify, n + 1),
            draft=table.drafting([1] * (n - 1)),
            rest=table.rest,
        )
        found.append(timed.of(one))
    return Chains(found)


def weigh_trees(
    rates: HitRates | None, mix: Mix, table: CostTable, timed: Timed
) -> list[Candidate]:
    """Trees as timed, and the best of several sizes by the hit rates of ranks; best first.

    ``rates`` None: they were not measured for this temperature, and only timed trees are weighed.
    """
    shapes = [parse_shape(name, "eval.trees") for name in timed.speeds]
    found = [weigh_timed(one, rates, table, timed) for one in shapes if not one.is_chain]
    if rates and mix.depth:
        scale = mix_scale(rates, mix)
        for shape in searched(rates, table):
            found.append(timed.of(weigh_tree(shape, rates, scale, table)))
    named = {one.shape: one for one in reversed(found)}
    return sorted(named.values(), key=lambda one: -(one.measured or one.predicted))


def searched(rates: HitRates, table: CostTable) -> list[StaticShape]:
    """The most likely tree of each size and depth whose verification was timed."""
    room = max(table.verify) - 1
    budgets = [size for size in TREE_BUDGETS if size <= room]
    shapes = [best_tree(rates, size, deep) for size in budgets for deep in range(1, len(rates) + 1)]
    widest = max(table.draft_next, default=0)
    named = {shape.name: shape for shape in shapes if not shape.is_chain}
    return [shape for shape in named.values() if max(shape.fed, default=0) <= widest]


def mix_scale(rates: HitRates, mix: Mix) -> float:
    """Tokens of the load's chain over those by the rates alone, at the deepest both have."""
    depth = min(mix.depth, len(rates))
    return mix.tau(depth) / expected_tokens_of_tree(chain(depth), rates)


def weigh_tree(shape: StaticShape, rates: HitRates, scale: float, table: CostTable) -> Candidate:
    return Candidate(
        shape=shape.name,
        depth=shape.depth,
        nodes=shape.nodes,
        tau=expected_tokens_of_tree(shape, rates) * scale,
        tau_from="hit rates of ranks",
        verify=interpolate(table.verify, shape.nodes + 1),
        draft=table.drafting(shape.fed),
        rest=table.rest,
    )


def weigh_timed(
    shape: StaticShape | DynamicShape, rates: HitRates | None, table: CostTable, timed: Timed
) -> Candidate:
    """A tree by its own runs' tokens and costs."""
    speed = timed.speeds[shape.name]
    one = Candidate(
        shape=shape.name,
        depth=shape.depth,
        nodes=shape.nodes,
        tau=speed.tau * timed.load,
        tau_from="the timed runs",
        verify=speed.v,
        draft=speed.d,
        rest=table.rest,
    )
    return timed.of(one)


def overhead(candidates: Sequence[Candidate]) -> float | None:
    """Measured over predicted, the median of the shapes that were timed; never above 1.

    None where none was timed.
    """
    ratios = [one.measured / one.predicted for one in candidates if one.measured]
    return min(1.0, median(ratios)) if ratios else None
