"""What training foretold of the head: its held-out acceptance, and the formula people estimate by.

Rounds walked over the verifier's own held-out answers are what the loop would do there, so that τ
is a measurement of other prompts. A product of accuracies, 1 + α + α² + ..., is an estimate even on
the same prompts: it takes every guess to stand with the same chance, whatever came before.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from eval.acceptance import AcceptanceReport
from eval.report import DataOrigin, TrainingEstimate
from eval.theory import expected_tokens

FORMULA = "1 + alpha + ... + alpha^N = (1 - alpha^(N+1)) / (1 - alpha)"


@dataclass(frozen=True)
class HeldOut:
    """Acceptance on the held-out answers, which training left beside the weights."""

    tau: float | None = None  # None: no held-out answer had a round, or nothing was left
    alpha: float | None = None
    depth: int | None = None  # draft tokens a round


def read_held_out(draft_folder: Path) -> HeldOut:
    path = draft_folder / "acceptance.json"
    if not path.is_file():
        return HeldOut()
    found = json.loads(path.read_text())
    depths = found.get("alpha_by_depth")
    return HeldOut(found["tau"], found.get("alpha"), None if depths is None else len(depths))


def foretell(accepted: AcceptanceReport, n_draft: int, data: DataOrigin) -> TrainingEstimate:
    """Training's figures and the formula's, beside what was measured."""
    alpha, depth = data.held_out_alpha, data.held_out_depth
    held_out = None if alpha is None or depth is None else expected_tokens(alpha, depth)
    return TrainingEstimate(
        held_out_tau=data.held_out_tau,
        held_out_tau_if_independent=held_out,
        tau=accepted.tau,
        tau_if_independent=expected_tokens(accepted.alpha, n_draft),
        formula=FORMULA,
    )
