"""Acceptance against temperature, measured on the head itself, and the gate that follows."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from conf.schema import ConfigError
from eval.advice.acceptance_mix import between, one_part
from eval.advice.question import EXACT, Accept
from eval.report import EvalReport

PAYS = 1.05  # speed-ups below it are not worth a second model in service


@dataclass(frozen=True)
class Reading:
    temperature: float
    rule: str  # of acceptance
    survival: list[float]  # [depth]
    source: str

    def tau(self, n: int) -> float:
        return one_part(self.survival, "").tau(min(n, len(self.survival)))


@dataclass(frozen=True)
class Heat:
    readings: list[Reading]

    def by_rule(self, rule: str) -> list[Reading]:
        """Of ``rule``, and the greedy one, which is every rule's at 0; by temperature."""
        found = {one.temperature: one for one in self.readings if one.rule in (rule, "greedy")}
        return [found[heat] for heat in sorted(found)]

    def rules(self) -> list[str]:
        sampled = sorted({one.rule for one in self.readings} - {"greedy"})
        return sampled or ["greedy"]


@dataclass(frozen=True)
class GatePoint:
    temperature: float
    tau: float
    speedup: float  # predicted


@dataclass(frozen=True)
class Gate:
    """Up to which temperature drafting pays, for one chain."""

    shape: str
    rule: str
    points: list[GatePoint]
    off_above: float | None  # None: it pays at every temperature measured, or was not measured
    advice: str  # a sentence


def readings_of(report: EvalReport, survival: list[float]) -> Heat:
    """Every temperature of the report at which a rule was exact; ``survival`` is that of its own
    counters, lengthened."""
    own = report.settings.eval.temperature
    found = [
        Reading(own, report.settings.accept_rule, survival, f"counters at temperature {own:g}")
    ]
    for one in report.by_temperature:
        known = (one.temperature, one.rule) == (own, report.settings.accept_rule)
        if one.rule in EXACT and not known:
            curve = one.counters.survival_by_depth
            source = f"counters at temperature {one.temperature:g}, rule {one.rule}"
            found.append(Reading(one.temperature, one.rule, curve, source))
    return Heat(found)


def pick_rule(report: EvalReport, heat: Heat, temperature: float, accept: Accept) -> Reading:
    """The reading at ``temperature`` by the accepted rule with the most tokens a round.

    Raises ConfigError when no measured temperatures enclose it: acceptance at a temperature cannot
    be told from that at others.
    """
    allowed = heat.rules() if accept is Accept.auto else [accept.value]
    found = [one for rule in allowed if (one := read_at(heat.by_rule(rule), temperature))]
    if not found:
        measured = ", ".join(f"{one.temperature:g} ({one.rule})" for one in heat.readings)
        rule = "" if accept is Accept.auto else f" by the rule {accept.value}"
        knob = "" if accept is Accept.auto else f" eval.rule={accept.value}"
        raise ConfigError(
            f"--temperature={temperature:g}: acceptance was not measured there{rule} (only at "
            f"{measured}) and cannot be guessed; calibrate with python -m eval.main "
            f"run.name={report.settings.run} eval.temperatures=[{temperature:g}]{knob}"
        )
    return max(found, key=lambda one: one.tau(len(one.survival)))


def read_at(readings: Sequence[Reading], temperature: float) -> Reading | None:
    """Measured there, or between the two temperatures around it; None outside the measured."""
    for one in readings:
        if one.temperature == temperature:
            return one
    for low, high in itertools.pairwise(readings):
        if low.temperature < temperature < high.temperature:
            share = (temperature - low.temperature) / (high.temperature - low.temperature)
            curve = between(low.survival, high.survival, share)
            source = f"between temperatures {low.temperature:g} and {high.temperature:g}"
            return Reading(temperature, high.rule, curve, f"{source}, rule {high.rule}")
    return None


def gate_of(heat: Heat, rule: str, n: int, cost: float, run: str) -> Gate:
    """For the chain of ``n`` whose round costs ``cost`` plain steps.

    A chain longer than a reading's depth is counted to that depth, which is too few tokens.
    """
    if rule == "greedy":  # says nothing of the draws: those of the rule with the most tokens
        rule = max(heat.rules(), key=lambda one: heat.by_rule(one)[-1].tau(n))
    readings = heat.by_rule(rule)
    points = [GatePoint(one.temperature, one.tau(n), one.tau(n) / cost) for one in readings]
    edge = crossing(points)
    again = f"python -m eval.main run.name={run} eval.temperatures=[0.3,0.6,1.0]"
    if len(points) < 2:
        return Gate(str(n), rule, points, None, f"Not measured: {again} measures it on this head.")
    low, high = points[0].temperature, points[-1].temperature
    if edge is None:
        advice = (
            f"It pays at every temperature measured ({low:g} to {high:g}); above {high:g} nothing "
            "is known, so send such requests to the plain verifier or measure there."
        )
    else:
        advice = f"Send requests above temperature {edge:.2f} to the plain verifier."
    return Gate(str(n), rule, points, edge, advice)


def crossing(points: Sequence[GatePoint]) -> float | None:
    """The temperature at which the speed-up first falls below ``PAYS``, between two measured ones.

    0 where it never pays; None where it always does.
    """
    for before, after in zip([None, *points], points, strict=False):
        if after.speedup >= PAYS:
            continue
        if before is None:
            return 0.0
        fall = (before.speedup - PAYS) / (before.speedup - after.speedup)
        return before.temperature + fall * (after.temperature - before.temperature)
    return None
