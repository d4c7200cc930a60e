"""The speculative counters of a vLLM server: read from /metrics, and what two readings lie apart.

Names and meaning as in vLLM 0.32.0 (v1/spec_decode/metrics.py): a draft is a round, and position
``i`` counts the rounds that accepted their guess number i + 1. Every engine of a server has a line
of its own; they are added up.
"""

import re
from dataclasses import dataclass, field

from conf.schema import ConfigError
from eval.acceptance import Counters

LINE = re.compile(r"^(?P<name>[a-zA-Z_:][\w:]*)(?:\{(?P<labels>.*)\})?\s+(?P<value>\S+)")
POSITION = re.compile(r'(?:^|,)position="(\d+)"')
GENERATED = "vllm:generation_tokens"
DRAFTS = "vllm:spec_decode_num_drafts"
DRAFTED = "vllm:spec_decode_num_draft_tokens"
BY_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos"


@dataclass(frozen=True)
class Snapshot:
    """Sums since the server started."""

    generated: int  # tokens of answers
    drafts: int = 0  # rounds
    drafted: int = 0
    by_position: list[int] = field(
        default_factory=list
    )  # as many as a round can accept; none: no head

    def since(self, before: "Snapshot", tokens: int) -> Counters:
        """What was counted after ``before``, for answers of ``tokens`` in all."""
        rounds = self.drafts - before.drafts
        earlier = before.by_position or [0] * len(self.by_position)
        accepted = [a - b for a, b in zip(self.by_position, earlier, strict=True)]
        reached = [rounds, *accepted][: len(accepted)]
        drafted = self.drafted - before.drafted
        return Counters(rounds, drafted, sum(reached), accepted, reached, tokens)


def read_metrics(text: str) -> Snapshot:
    """Read the Prometheus text. Raises ConfigError for a server that counts nothing."""
    sums: dict[str, float] = {}
    positions: dict[int, float] = {}
    for line in text.splitlines():
        found = LINE.match(line)
        if not found:
            continue
        name, value = found["name"].removesuffix("_total"), float(found["value"])
        at = POSITION.search(found["labels"] or "")
        if name == BY_POSITION and at:
            positions[int(at[1])] = positions.get(int(at[1]), 0.0) + value
        else:
            sums[name] = sums.get(name, 0.0) + value
    if GENERATED not in sums:
        raise ConfigError(
            "/metrics: has no vllm:generation_tokens_total; give a vLLM server that was started "
            "without --disable-log-stats"
        )
    return Snapshot(
        generated=round(sums[GENERATED]),
        drafts=round(sums.get(DRAFTS, 0)),
        drafted=round(sums.get(DRAFTED, 0)),
        by_position=[round(positions.get(i, 0)) for i in range(max(positions, default=-1) + 1)],
    )
