"""Which shape is picked: the chain by prediction, a tree where it is faster and served."""

from collections.abc import Sequence
from dataclasses import dataclass

from eval.advice.candidates import Candidate, Chains, overhead
from eval.advice.question import Stack
from eval.theory import BAND

ERROR = 0.05  # what a prediction may be off by; measurements that differ by more overrule it


@dataclass(frozen=True)
class Choice:
    pick: Candidate
    expected: float  # decode speed-up: as measured, or as predicted less the loop's own overhead
    overhead: float | None  # measured / predicted of the shapes timed, which cuts predictions
    why: list[str]  # sentences


def choose(chains: Chains, trees: Sequence[Candidate], stack: Stack) -> Choice:
    """A prediction stands unless something timed beats it by more than ``ERROR``."""
    measured = overhead([*chains.all, *trees])
    cut = 1.0 if measured is None else measured
    pick, why = chains.best, [f"N={chains.best.nodes} has the highest predicted speed-up."]

    def expected(one: Candidate) -> float:
        return one.measured if one.measured is not None else one.predicted * cut

    timed = [one for one in chains.all if one.measured is not None]
    fastest = max(timed, key=expected, default=pick)
    if expected(fastest) > (1 + ERROR) * expected(pick):
        why = [
            f"N={pick.nodes} was predicted best, but N={fastest.nodes} was timed at "
            f"{expected(fastest):.3f}x against {expected(pick):.3f}x, which is beyond the error of "
            f"a prediction ({ERROR:.0%})."
        ]
        pick = fastest
    best_tree = max(
        (one for one in trees if served(one, stack)), key=lambda one: worth(one, cut), default=None
    )
    why.append(about_trees(trees, best_tree, cut, expected(pick), stack))
    if best_tree and worth(best_tree, cut) > (1 + BAND) * expected(pick):
        pick = best_tree
    return Choice(pick, expected(pick), measured, why)


def worth(tree: Candidate, cut: float) -> float:
    """Its measured speed-up; an untimed tree must promise as much more as predictions may err."""
    if tree.measured is not None:
        return tree.measured
    return tree.predicted * cut / (1 + ERROR)


def served(tree: Candidate, stack: Stack) -> bool:
    """vLLM 0.32 verifies chains alone; SGLang builds the dynamic tree and takes no static one."""
    if stack is Stack.sglang:
        return tree.shape.startswith("dynamic")
    return stack is Stack.eyrie


def about_trees(
    trees: Sequence[Candidate], best: Candidate | None, cut: float, chain: float, stack: Stack
) -> str:
    """A sentence on why there is a tree, or none."""
    if not trees:
        return "No tree: none was timed, and hit rates of ranks are not known here."
    top = trees[0]
    seen = f"{top.measured:.3f}x timed" if top.measured is not None else f"{top.predicted:.3f}x"
    if best is None:
        reason = {
            Stack.vllm: "vLLM verifies chains alone",
            Stack.sglang: "SGLang builds EAGLE-2's dynamic tree alone, and none was timed",
        }[stack]
        return f"No tree: {reason}, so the best one ({top.shape}, {seen}) comes down to a chain."
    untimed = "" if best.measured is not None else f", cut by overhead and by {ERROR:.0%} untimed"
    verdict = "pays" if worth(best, cut) > (1 + BAND) * chain else "does not pay"
    return (
        f"The best tree, {best.shape}, is worth {worth(best, cut):.3f}x{untimed}, against "
        f"{chain:.3f}x of the chain: it {verdict}."
    )
