"""The advice as one page of Markdown, and as JSON of the same content."""

import json

from eval.advice.advise import Advice
from eval.advice.candidates import Candidate
from eval.report import jsonable
from eval.tables import shown, span, table

FORMULA = (
    "speed-up = tokens a round / (verify + draft + rest), costs in plain steps of the verifier"
)


def to_json(advice: Advice) -> str:
    return json.dumps(jsonable(advice), indent=2, allow_nan=False, ensure_ascii=False) + "\n"


def render(advice: Advice) -> str:
    """One page: what to do and why, then the figures behind it, then how to watch it."""
    parts = [
        f"# Speculative decoding: {advice.verdict}",
        advice.reason,
        *load_part(advice),
        *serving_part(advice),
        *chain_part(advice),
        *tree_part(advice),
        *gate_part(advice),
        *request_part(advice),
        *family_part(advice),
        *watch_part(advice),
    ]
    if advice.notes:
        parts += ["## Assumed, or not measured", *bullets(advice.notes)]
    return "\n\n".join(parts) + "\n"


def watch_part(advice: Advice) -> list[str]:
    """Rollback, settings that stay as they are, and telemetry; nothing where drafting is off."""
    if advice.verdict == "off":
        return []
    rows = [[one.watch, one.hook, one.alarm] for one in advice.telemetry]
    return [
        "## Rollback",
        *bullets(advice.rollback),
        "## Never set",
        *bullets(advice.forbidden),
        "## First week",
        table(["watch", "where", "alarm"], rows),
    ]


def bullets(lines: list[str]) -> list[str]:
    return ["\n".join(f"- {line}" for line in lines)]


def family_part(advice: Advice) -> list[str]:
    chosen = advice.family
    rows = [[one.name, one.training, one.published] for one in [chosen.family, *chosen.others]]
    said = ["## Draft family", f"**{chosen.family.name}.** " + " ".join(chosen.why)]
    return [*said, table(["family", "training", "published"], rows)] if chosen.others else said


def load_part(advice: Advice) -> list[str]:
    asked = advice.question
    said = [f"batch {asked.batch}", f"temperature {advice.temperature:g}", f"rule {advice.rule}"]
    lengths = ((asked.prompt_length, "prompt"), (asked.answer_length, "answer"))
    said += [f"{name} {length} tokens" for length, name in lengths if length]
    if asked.target:
        said.append(f"{asked.target.percentile} of a request below {asked.target.seconds:g} s")
    return [f"Load: {', '.join(said)}. Acceptance: {advice.acceptance}."]


def timing(one: Candidate) -> list[str]:
    return ["not timed" if one.measured is None else f"{one.measured:.3f}", span(one.interval)]


def chain_part(advice: Advice) -> list[str]:
    low, high = advice.band
    length = str(advice.pick.depth) if advice.pick.is_chain else f"{advice.pick.depth} levels"
    if advice.verdict == "off":
        length = "none"
    same = f"N={low} alone is" if low == high else f"N={low} to {high} are"
    return [
        f"## N: {length}",
        f"{FORMULA}.",
        table(
            ["N", "predicted", "measured", "95 %"],
            [[one.shape, one.worked, *timing(one)] for one in advice.around],
        ),
        f"{same} within 1 % of the best prediction; chains of 1 to {advice.longest} were weighed. "
        f"{overhead_said(advice.overhead)} {advice.why[0]}",
    ]


def overhead_said(overhead: float | None) -> str:
    if overhead is None:
        return "No shape was timed under this load: what the loop itself costs is not taken off."
    return (
        f"Where a shape was not timed, {overhead:.3f} of its prediction is expected: the median of "
        "measured / predicted, which is the loop's own overhead."
    )


def tree_part(advice: Advice) -> list[str]:
    picked = "none" if advice.pick.is_chain or advice.verdict == "off" else advice.pick.shape
    parts = [f"## Tree: {picked}", *advice.why[1:]]
    if advice.trees:
        head = ["tree", "guesses", "predicted", "tokens from", "measured", "95 %"]
        rows = [
            [one.shape, str(one.nodes), one.worked, one.tau_from, *timing(one)]
            for one in advice.trees
        ]
        parts.append(table(head, rows))
    if len(advice.by_batch) > 1:
        parts.append(by_batch(advice))
    return parts


def by_batch(advice: Advice) -> str:
    """Where the tree stops paying: predictions alone, at every batch size of the report."""
    rows = [[str(one.batch), one.chain.shape, one.chain.worked] for one in advice.by_batch]
    if all(one.tree is None for one in advice.by_batch):
        return table(["batch", "best N", "predicted"], rows)
    trees = [one.tree for one in advice.by_batch]
    more = [["-", "-"] if tree is None else [tree.shape, tree.worked] for tree in trees]
    whole = [[*row, *cells] for row, cells in zip(rows, more, strict=True)]
    return table(["batch", "best N", "predicted", "tree", "predicted"], whole)


def gate_part(advice: Advice) -> list[str]:
    gate = advice.gate
    if gate is None:
        ask = "No report, so no gate: acceptance by temperature is measured by eval.temperatures."
        return ["## Temperature gate", ask]
    rows = [[f"{one.temperature:g}", shown(one.tau), shown(one.speedup)] for one in gate.points]
    return [
        "## Temperature gate",
        gate.advice,
        f"Chain of {gate.shape}, rule {gate.rule}:",
        table(["temperature", "tokens a round", "predicted speed-up"], rows),
    ]


def request_part(advice: Advice) -> list[str]:
    request = advice.request
    if request is None:
        return []
    text = f"{request.worked}."
    if advice.verdict == "on":
        text += (
            f" Plain: p50 {request.plain_p50:.3f} s, p95 {request.plain_p95:.3f} s. With drafts: "
            f"p50 {request.p50:.3f} s, p95 {request.p95:.3f} s, "
            f"{request.speedup_end_to_end:.3f}x end to end, prefill included."
        )
    if request.target:
        held = "is held" if request.met else "is not held"
        text += f" The target, {request.target.percentile} {request.target.seconds:g} s, {held}."
    return ["## Latency of a request", text]


def serving_part(advice: Advice) -> list[str]:
    serving = advice.serving
    lines = [serving.line] if serving.before is None else [serving.before, serving.line]
    return [
        f"## Serve: {serving.stack} {serving.version}",
        "```bash\n" + "\n".join(lines) + "\n```",
        *(bullets(serving.notes) if serving.notes else []),
    ]
