"""How a round's guesses are chosen and judged: rule and sampling, and which of them go together."""

from dataclasses import dataclass

from conf.choices import EvalRule
from conf.schema import ConfigError
from conf.shapes import DynamicShape, Shape
from eval.verify import AcceptRule
from models.sampling import Sampling

DRAWN = (AcceptRule.rejection, AcceptRule.tree_without_replacement)
ON_TREES = {  # the rule for a tree that does what a rule for chains does
    AcceptRule.argmax_draft: AcceptRule.tree_one_hot,
    AcceptRule.rejection: AcceptRule.tree_without_replacement,
}


@dataclass(frozen=True)
class RoundPlan:
    """How proposals are made and judged."""

    rule: AcceptRule
    sampling: Sampling
    measure_overlap: bool = False  # chains; costs both softmaxes, so a timed run does without

    def __post_init__(self) -> None:
        """Raises ConfigError for a pair of rule and sampling that would not be exact."""
        if self.rule is AcceptRule.greedy and not self.sampling.greedy:
            raise ConfigError(
                f"rule=greedy: emits argmax tokens and temperature={self.sampling.temperature} "
                "asks for samples; take rule=rejection or temperature=0"
            )

    @property
    def draws(self) -> bool:
        """Whether guesses are drawn from the draft; else they are its likeliest tokens."""
        return self.rule in DRAWN

    def measures(self, shape: Shape) -> bool:
        return self.measure_overlap and shape.is_chain

    def keeps_logits(self, shape: Shape) -> bool:
        """Whether judging reads the draft's distributions again."""
        return self.draws or self.measures(shape)

    def check(self, shape: Shape) -> None:
        """Raises ConfigError for a shape on which the rule would not be exact."""
        if not shape.is_chain and self.rule in ON_TREES:
            tree = ON_TREES[self.rule].value
            raise ConfigError(
                f"rule={self.rule.value}: judges chains and the shape {shape.name} is a tree; take "
                f"rule={tree} or a chain"
            )
        if self.draws and isinstance(shape, DynamicShape):
            raise ConfigError(
                f"rule={self.rule.value}: is exact for draws, and the guesses of {shape.name} are "
                "chosen by confidence; take rule=tree_one_hot or a static tree such as 2x2x2"
            )


def rule_of(choice: EvalRule, shape: Shape, sampling: Sampling) -> AcceptRule:
    """The rule that ``eval.rule`` means for a shape: at temperature 0 all come out as greedy.

    Raises ConfigError for a dynamic tree with ``rejection``: its guesses are no draws.
    """
    if sampling.greedy:
        return AcceptRule.greedy
    if choice is EvalRule.typical:
        return AcceptRule.typical
    dynamic = isinstance(shape, DynamicShape)
    if choice is EvalRule.rejection and dynamic:
        raise ConfigError(
            f"eval.rule=rejection: needs guesses drawn from the draft, and {shape.name} chooses "
            "them by confidence; take eval.rule=auto or a static tree such as 2x2x2"
        )
    certain = choice is EvalRule.argmax_draft or dynamic
    on_chain = AcceptRule.argmax_draft if certain else AcceptRule.rejection
    return on_chain if shape.is_chain else ON_TREES[on_chain]
