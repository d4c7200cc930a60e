"""The proof by counting on the real verifier: the first token that an accept rule let through.

One forward gives the verifier's distribution after a prompt and its first token, and the draft's.
Both are then fixed, and 50,000 sequences go through the product's own proposals and judgements at
once. Tokens that neither side can give after the filters are left out of the tensors, which changes
no probability and makes 50,000 rows of a vocabulary of any size fit into memory.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from conf.runtime import progress
from conf.shapes import parse_shape
from eval.drafters.choose import drafter_for
from eval.proof.chi_square import chi_square_p
from eval.proof.wrong_rules import Control, Seen, judge_wrongly
from eval.propose import Proposal, propose
from eval.round_plan import RoundPlan
from eval.rounds import judge_proposal
from eval.sides import TargetDecoder
from eval.verify import AcceptRule, Verdict, scatter_to_target
from models.drafts import Draft
from models.sampling import Dice, Sampling, SharedDice, probabilities
from models.steps import Steps
from models.verifier import Verifier

DRAWS = 50_000
CHUNK = 5_000  # sequences at once
PROMPTS = 4
MOST_CHOICES = 256  # of a prompt: rarer tokens than that fall into one cell, and cost time
SHOWS = 1e-20  # chance below which draws by the wrong rule fail in all but one of 10,000 runs
ERROR_RATE = 0.01  # chance that exact rules fail somewhere among all tests
WARM = Sampling(temperature=1.0)
SAMPLING = Sampling(temperature=0.9, top_p=0.95)
SHAPES = {  # one level: the first token is decided there
    AcceptRule.rejection: "1",
    AcceptRule.argmax_draft: "1",
    AcceptRule.tree_one_hot: "3",
    AcceptRule.tree_without_replacement: "3",
}
CASES: list[tuple[AcceptRule, Control | None]] = [
    *((rule, None) for rule in SHAPES),
    (AcceptRule.rejection, Control.no_residual),
]


@dataclass(frozen=True)
class FirstToken:
    """One rule on one prompt."""

    prompt: int
    rule: AcceptRule
    control: Control | None
    accepted: float  # share of the draws that were guesses
    tokens: int  # that the verifier can give here
    p: float
    bound: float

    @property
    def exact(self) -> bool:
        return self.p >= self.bound

    @property
    def as_expected(self) -> bool:
        return self.exact is (self.control is None)


@dataclass(frozen=True)
class Sides:
    """What both sides say after the root, on the tokens that either can give: U of them."""

    target: Tensor  # [U] probabilities after the filters
    drawn: Tensor  # [U'] the draft's after the filters, on its own tokens among them
    ranked: Tensor  # [U'] its logits
    target_ids: Tensor  # [U'] where its tokens stand among the U

    @property
    def choices(self) -> int:
        """Tokens that the verifier can give."""
        return int((self.target > 0).sum())


class FixedDraft:
    """A draft that says the same to every sequence; it is asked for one level."""

    def __init__(self, logits: Tensor, target_ids: Tensor, sequences: int):
        self.logits = logits.expand(sequences, 1, -1)
        self.target_ids = target_ids

    def start(self) -> Tensor:
        return self.logits

    def step(self, ids: Tensor, parents: Tensor) -> Tensor:
        raise AssertionError("one level is asked for")


@torch.inference_mode()
def sides_after(verifier: Verifier, draft: Draft, prompt: list[int]) -> Sides:
    """Both sides after ``prompt`` and the verifier's likeliest token, the root."""
    target = TargetDecoder(Steps(verifier), 1, len(prompt) + 1)
    ids = torch.tensor([prompt], device=verifier.device)
    target.root = target.prefill(ids, [len(prompt)]).argmax(-1)[:, None]
    guesser = drafter_for(draft, 1, len(prompt), verifier.device)
    guesser.begin(ids, target.states, target.root, [len(prompt)])
    ranked = guesser.start()[0, 0].float().cpu()
    wanted = probabilities(target.step(), SAMPLING)[0].cpu()
    drawn = probabilities(ranked, SAMPLING)
    own_ids = guesser.target_ids.cpu()
    likeliest = ranked.topk(max(int(width) for width in SHAPES.values())).indices
    given = torch.zeros(len(own_ids), dtype=torch.bool).scatter_(0, likeliest, True) | (drawn > 0)
    kept = torch.zeros(len(wanted), dtype=torch.bool)
    kept[own_ids[given]] = True
    kept |= wanted > 0
    place = kept.long().cumsum(0) - 1
    own = kept[own_ids]
    return Sides(wanted[kept], drawn[own], ranked[own], place[own_ids[own]])


def draw_first(
    sides: Sides, rule: AcceptRule, control: Control | None, sequences: int, seed: int
) -> tuple[Tensor, Tensor]:
    """[S] first tokens by one rule, and [S] whether each was a guess."""
    width = SHAPES[rule]
    shape = parse_shape("[" + ",".join(f"[{rank}]" for rank in range(int(width))) + "]", "shape")
    plan = RoundPlan(rule, WARM)  # the filters are in the probabilities already
    logits = sides.drawn.log() if plan.draws else sides.ranked
    draft = FixedDraft(logits, sides.target_ids, sequences)
    dice = SharedDice(seed, sequences)
    proposal = propose(draft, shape, plan, dice)
    rows = sides.target.log().expand(sequences, shape.nodes + 1, -1)
    if control is None:
        verdict = judge_proposal(proposal, rows, draft.target_ids, plan, dice).verdict
    else:
        verdict = judge_control(control, proposal, rows, draft, dice)
    first = proposal.ids.gather(1, (verdict.path[:, :1] - 1).clamp(min=0))[:, 0]
    stood = verdict.accepted > 0
    return torch.where(stood, first, verdict.token), stood


def judge_control(
    control: Control, proposal: Proposal, rows: Tensor, draft: FixedDraft, dice: Dice
) -> Verdict:
    """By a rule that is known to be wrong."""
    target = rows.exp()
    spread = scatter_to_target(draft.logits.exp(), draft.target_ids, rows.shape[-1])
    return judge_wrongly(control, Seen(proposal, target, spread, target), dice)


def count_first(
    sides: Sides, rule: AcceptRule, control: Control | None, draws: int
) -> tuple[float, float]:
    """The chance of the counts under the verifier's own distribution, and the share accepted."""
    counts = torch.zeros(len(sides.target), dtype=torch.float64)
    guesses = 0
    for seed, begin in enumerate(range(0, draws, CHUNK)):
        size = min(CHUNK, draws - begin)
        tokens, stood = draw_first(sides, rule, control, size, seed)
        counts += torch.bincount(tokens, minlength=len(counts))
        guesses += int(stood.sum())
    exact = sides.target.double() / sides.target.double().sum()
    return chi_square_p(counts, exact * draws), guesses / draws


def chance_of_control(sides: Sides, draws: int) -> float:
    """How unlikely the right distribution is to give the counts that the wrong rule gives.

    Its draws follow min(p, q) + (1 - sum of min(p, q)) p, p the verifier's and q the draft's: no
    draw is needed to know, and prompts are chosen without a look at any.
    """
    wanted = sides.target.double() / sides.target.double().sum()
    offered = torch.zeros_like(wanted).index_add(0, sides.target_ids, sides.drawn.double())
    shared = torch.minimum(wanted, offered)
    wrong = shared + (1 - shared.sum()) * wanted
    return chi_square_p(wrong * draws, wanted * draws)


def prove_first_token(
    verifier: Verifier, draft: Draft, prompts: Sequence[list[int]], draws: int = DRAWS
) -> list[FirstToken]:
    """Every rule, and a wrong one that must fail, after the prompts where that one shows most.

    Prompts with more than ``MOST_CHOICES`` possible tokens come last. Where draft and verifier are
    too alike for the wrong rule to show, it is left out. A prompt after which the verifier can give
    one token alone says nothing. Empty when all do.
    """
    known = [sides_after(verifier, draft, ids) for ids in prompts]
    chances = [chance_of_control(sides, draws) for sides in known]
    able = [index for index, sides in enumerate(known) if sides.choices > 1]
    able.sort(key=lambda i: (known[i].choices > MOST_CHOICES, chances[i], -known[i].choices))
    work = [
        (index, *case)
        for index in able[:PROMPTS]
        for case in CASES
        if case[1] is None or chances[index] < SHOWS
    ]
    found: list[FirstToken] = []
    for index, rule, control in progress(work, len(work), "first token", "test"):
        sides = known[index]
        p, accepted = count_first(sides, rule, control, draws)
        found.append(FirstToken(index, rule, control, accepted, sides.choices, p, 0.0))
    bound = ERROR_RATE / max(1, sum(one.control is None for one in found))
    return [replace(one, bound=bound) for one in found]
