"""The simulations of speculative decoding: each draws or enumerates, and knows its exact value.

No model takes part: tables of probabilities go through the accept rule that models go through.
Beside most of them stands a control, a wrong rule or statistic that must be seen to be wrong.
"""

import math
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from conf.runtime import progress
from conf.shapes import StaticShape, chain, parse_shape
from eval.arithmetic.checks import Check, above, below, drawn, exactly, share
from eval.arithmetic.enumeration import EXACT, Rule, enumerate_rule, random_pair
from eval.arithmetic.perturbed import NOISES, TARGET, acceptance, divergence, perturb
from eval.arithmetic.rollback import rollback_checks, rollback_lines, two_rounds
from eval.arithmetic.table_rounds import (
    Tables,
    easy_and_hard,
    exact_figures,
    first_tokens_without_residual,
    play,
)
from eval.arithmetic.tree_theory import (
    BRANCHY,
    HEADS,
    HitRates,
    best_tree,
    expected_tokens_of_tree,
    same_at_every_depth,
)
from eval.proof.chi_square import against_exact, against_noisy, of_two_samples, quantile, tail
from eval.theory import expected_tokens

LENGTHS = (1, 3, 5, 7, 10)  # of chains
ROUNDS = 10  # one after another; ``draws`` is the number of rounds in all
SEEDS = 4000  # samples that each of the three chi-square tests is tried on
LEVEL = 0.05  # of these tests
STRICT = 1e-4  # chance that the check of the distribution fails a right rule
BIAS = 1e-3  # total variation that a wrong rule must show at least
TABLES = 0  # seed of the distributions that depend on the text
DF = len(TARGET) - 1


@dataclass(frozen=True)
class Simulation:
    title: str
    checks: list[Check]
    lines: list[str] = field(default_factory=list)  # shown before the checks


def run_all(seed: int, draws: int) -> list[Simulation]:
    todo = (
        lambda: first_token(seed, draws),
        lambda: three_tests(seed, draws),
        lambda: perturbed_drafts(seed, draws),
        lambda: tokens_a_call(seed, draws),
        lambda: by_context(seed, draws),
        lambda: trees(seed, draws),
        lambda: several_guesses(),
        lambda: rollback(),
    )
    return [make() for make in progress(todo, len(todo), "simulations", "one")]


def first_token(seed: int, draws: int) -> Simulation:
    """The lesson's 50,000 draws, against the exact probabilities."""
    tables = Tables.alike(TARGET, perturb(TARGET, NOISES[0]))
    bound = quantile(STRICT, DF)
    right = statistic(play(tables, 1, draws, 1, seed).first)
    wrong = statistic(first_tokens_without_residual(tables, draws, seed))
    biased = (tables.kept + (1 - tables.kept.sum(-1, keepdim=True)) * tables.target)[0].numpy()
    shift = float(draws * ((biased - TARGET) ** 2 / np.array(TARGET)).sum())
    return Simulation(
        f"The first token of {draws} rounds against its exact probabilities: chi-square, df {DF}",
        [
            below("the rejection rule", right, DF, bound),
            above("without the residual (must be seen)", wrong, DF + shift, bound),
        ],
        [f"chance of a larger value for a right rule: {tail(right, DF):.2f}"],
    )


def statistic(tokens: Tensor) -> float:
    counts = torch.bincount(tokens, minlength=len(TARGET)).numpy()
    return float(against_exact(counts, np.array(TARGET)))


def three_tests(seed: int, draws: int) -> Simulation:
    """Why drawn counts cannot stand for exact ones, on samples straight from the target."""
    dice = np.random.default_rng(seed)
    one, two = dice.multinomial(draws, TARGET, size=(2, SEEDS))
    limit = quantile(LEVEL, DF)
    found = (
        ("against another sample as if exact", against_noisy(one, two), tail(limit / 2, DF)),
        ("against the exact probabilities", against_exact(one, np.array(TARGET)), LEVEL),
        ("as two samples", of_two_samples(one, two), LEVEL),
    )
    checks = [
        share(name, float((values > limit).mean()), chance, SEEDS) for name, values, chance in found
    ]
    title = f"A right sampler fails a test at {limit:.2f}: share of {SEEDS} samples of {draws}"
    return Simulation(title, checks)


def perturbed_drafts(seed: int, draws: int) -> Simulation:
    checks: list[Check] = []
    for noise in NOISES:
        draft = perturb(TARGET, noise)
        exact = acceptance(TARGET, draft)
        found = float(play(Tables.alike(TARGET, draft), 1, draws, 1, seed).accepted.double().mean())
        kl = divergence(TARGET, draft)
        checks.append(share(f"{noise.name} noise, KL {kl:.4f}: α", found, exact, draws))
    return Simulation("Perturbed drafts: α measured, and Σ min(target, draft)", checks)


def tokens_a_call(seed: int, draws: int) -> Simulation:
    """The same drafts in chains: every round is independent, so E is exact."""
    checks = [
        off_the_formula(number, n, seed, draws) for number in range(len(NOISES)) for n in LENGTHS
    ]
    tables = Tables.alike(TARGET, perturb(TARGET, NOISES[-1]))
    thousand = play(tables, 5, 1000, 1, seed).accepted + 1
    expected = 1000 * expected_tokens(acceptance(TARGET, perturb(TARGET, NOISES[-1])), 5)
    error = float(thousand.double().std()) * math.sqrt(1000)
    checks.append(
        drawn("small noise, N = 5: tokens of 1000 calls", float(thousand.sum()), expected, error)
    )
    return Simulation("Tokens a call, the same distributions at every position", checks)


def off_the_formula(number: int, n: int, seed: int, draws: int) -> Check:
    draft = perturb(TARGET, NOISES[number])
    tokens = play(Tables.alike(TARGET, draft), n, draws, 1, seed).tokens
    name = f"{NOISES[number].name} noise, N = {n}"
    expected = expected_tokens(acceptance(TARGET, draft), n)
    return drawn(name, float(tokens.mean()), expected, standard_error(tokens))


def standard_error(values: Tensor) -> float:
    return float(values.std()) / math.sqrt(len(values))


def by_context(seed: int, draws: int) -> Simulation:
    """Acceptance that depends on the text: E with the mean α is no longer exact."""
    tables = easy_and_hard(len(TARGET), TABLES)
    sequences = max(2, draws // ROUNDS)
    checks: list[Check] = []
    lines: list[str] = []
    for n in LENGTHS:
        exact = exact_figures(tables, n, ROUNDS)
        tokens = play(tables, n, sequences, ROUNDS, seed).tokens
        error = standard_error(tokens)
        checks.append(drawn(f"N = {n}", float(tokens.mean()), exact.tokens, error))
        mean = expected_tokens(exact.alpha, n)
        lines.append(
            f"N = {n}: exact {exact.tokens:.3f}, E of the mean α {exact.alpha:.3f}: {mean:.3f}"
        )
    return Simulation("Tokens a call, distributions that depend on the text", checks, lines)


def trees(seed: int, draws: int) -> Simulation:
    checks: list[Check] = []
    for head in HEADS:
        hits = same_at_every_depth(head.rank_hits, 8)
        shapes = (chain(3), parse_shape(BRANCHY, "tree"), best_tree(hits, 14, 3))
        for name, shape in zip(("chain of 3", BRANCHY, "best of 14"), shapes, strict=True):
            assert isinstance(shape, StaticShape)
            tokens = walk_ranks(shape, hits, draws, seed)
            expected = expected_tokens_of_tree(shape, hits)
            label = f"{head.name}, {name}"
            checks.append(drawn(label, float(tokens.mean()), expected, standard_error(tokens)))
    return Simulation("Trees in the rank-hit model: tokens a call", checks)


def walk_ranks(shape: StaticShape, rank_hits: HitRates, draws: int, seed: int) -> Tensor:
    """Tokens [draws] of a call: draw the rank of the verifier's token level by level, and walk.

    A rank that has no node at the place reached ends the walk.
    """
    generator = torch.Generator().manual_seed(seed)
    node_at = {
        (p, r): i + 1 for i, (p, r) in enumerate(zip(shape.parents, shape.ranks, strict=True))
    }
    width = 1 + max(len(hits) for hits in rank_hits)  # the last column: no rank of the draft's
    onward = torch.full((shape.nodes + 1, width), -1)
    for (parent, rank), node in node_at.items():
        onward[parent, rank] = node
    place = torch.zeros(draws, dtype=torch.long)
    tokens = torch.ones(draws, dtype=torch.float64)
    for hits in rank_hits[: shape.depth]:
        uniform = torch.rand(draws, generator=generator, dtype=torch.float64)
        borders = torch.tensor(hits, dtype=torch.float64).cumsum(0)
        rank = torch.searchsorted(borders, uniform, right=True)
        rank[rank == len(hits)] = width - 1
        place = torch.where(place >= 0, onward[place.clamp_min(0), rank], -1)
        tokens += place >= 0
    return tokens


def several_guesses() -> Simulation:
    """Exact enumeration, three random pairs over six tokens."""
    checks: list[Check] = []
    lines: list[str] = []
    pairs = [random_pair(number) for number in range(3)]
    for rule in Rule:
        rates: list[str] = []
        for k in (1, 2, 3):
            results = [(enumerate_rule(rule, pair[0], pair[1], k), pair[0]) for pair in pairs]
            far = [emitted.distance(target) for emitted, target in results]
            rates.append(f"{results[-1][0].accepted:.3f}")
            if rule in EXACT:
                checks.append(exactly(f"{rule.value}, k = {k}", max(far), 0.0))
            elif k > 1 or rule is Rule.top_k_ratio:
                checks.append(above(f"{rule.value}, k = {k} (must be seen)", min(far), BIAS, BIAS))
        lines.append(f"{rule.value}: accepted at k = 1, 2, 3 {' '.join(rates)}")
    even = np.array([0.51, 0.49])
    never = enumerate_rule(Rule.top_k_ratio, even, even, 1).chances[1]
    checks.append(exactly("draft = target = (.51, .49), tested as if drawn: token 2", never, 0.0))
    title = "Several guesses for one position, enumerated: distance to the target (total variation)"
    return Simulation(title, checks, lines)


def rollback() -> Simulation:
    events = two_rounds()
    title = (
        "Rollback in a batch: lengths and cache rows; × is a guess that is not the verifier's token"
    )
    return Simulation(title, rollback_checks(events), rollback_lines(events))
