"""What a reader must know before using the figures: the report's warnings."""

from eval.measure import ExactRuns
from eval.report import BeyondTraining, EvalReport
from eval.tables import shown
from eval.verify import LOSSY


def list_warnings(report: EvalReport, exact: ExactRuns) -> list[str]:
    """One sentence each, in the order of their weight on the page."""
    data = report.data
    rules = {report.settings.accept_rule, *(one.rule for one in report.by_temperature)}
    found = [
        f"accept rule {rule}: it changes what the verifier would say, so these acceptances and "
        "speed-ups are of another text; take eval.rule=auto for figures that can be served"
        for rule in sorted(rules & {one.value for one in LOSSY})
    ]
    found += [f"user turns not answered: {n} ({why})" for why, n in exact.skipped.items()]
    found += [f"prompt lines skipped: {n} ({why})" for why, n in data.prompts_skipped.items()]
    if report.beyond_training:
        found.append(too_far(report.beyond_training))
    if data.other_weights:
        found.append(
            f"the head learnt from other weights than the verifier has (fingerprint "
            f"{data.other_weights}): acceptance is that of another pair"
        )
    if report.settings.eval.head is not None:
        found.append(
            f"the head is {report.settings.draft}, trained elsewhere: training samples and what is "
            "said of them here are those of data.path, which give the n-gram floor"
        )
    if data.trained_prompts:
        found.append(
            f"{data.trained_prompts} measured prompts are training prompts, too: the figures are "
            "better than on new ones; give eval.prompts that were never trained on"
        )
    floor, tau = report.ngram_floor.tau, report.tau
    if tau <= floor:
        found.append(
            f"the head's τ ({tau:.3f}) does not clear the n-gram floor ({floor:.3f}): it has "
            "learnt no more than the training answers' phrases"
        )
    return found


def too_far(found: BeyondTraining) -> str:
    """Acceptance often falls at positions that training never reached."""
    within, beyond = found.within, found.beyond
    return (
        f"positions from {found.first} on lie beyond the longest training sample: "
        f"{beyond.rounds} rounds draft there, with α = {shown(beyond.alpha)} and "
        f"τ = {shown(beyond.tau)}; within it {within.rounds} rounds have "
        f"α = {shown(within.alpha)} and τ = {shown(within.tau)}. Train on longer samples before "
        "relying on the head there"
    )
