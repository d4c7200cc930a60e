"""The simulations: right figures pass, wrong rules and formulas are caught; the exact values."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig

from conf.shapes import StaticShape
from eval.arithmetic.checks import Check, check_lines, drawn, exactly
from eval.arithmetic.enumeration import EXACT, Rule, enumerate_rule, random_pair
from eval.arithmetic.perturbed import NOISES, TARGET, acceptance, divergence, perturb
from eval.arithmetic.rollback import Event, N, rollback_checks, two_rounds, with_one_length
from eval.arithmetic.simulations import by_context, first_token, tokens_a_call, walk_ranks
from eval.arithmetic.table_rounds import Tables, easy_and_hard, exact_figures, play
from eval.arithmetic.tree_theory import same_at_every_depth
from eval.proof.chi_square import against_exact, against_noisy, of_two_samples, quantile, tail
from eval.simulate import main
from eval.theory import expected_tokens
from models.kv import KVCache

# Printed in the course lesson: KL and exact acceptance of its three drafts.
KNOWN = ((0.1345, 0.7978), (0.0198, 0.9325), (0.0017, 0.9802))


def test_the_lessons_drafts():
    for noise, (kl, alpha) in zip(NOISES, KNOWN, strict=True):
        draft = perturb(TARGET, noise)
        assert sum(draft) == pytest.approx(1)
        assert divergence(TARGET, draft) == pytest.approx(kl, abs=5e-5)
        assert acceptance(TARGET, draft) == pytest.approx(alpha, abs=5e-5)
    small = acceptance(TARGET, perturb(TARGET, NOISES[-1]))
    one_run = 5732  # tokens of 1000 calls, each off by 1.16 or so
    assert expected_tokens(small, 5) * 1000 == pytest.approx(one_run, abs=4 * 1.16 * 1000**0.5)


def test_command(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    words = ["--draws", "5000", "--plots", str(tmp_path), "--json", str(tmp_path / "s.json")]
    assert main(words) == 0
    page = capsys.readouterr().out
    assert "all right" in page and "a3 a4 a5 a6 a7" in page
    assert (tmp_path / "simulated_tokens.png").is_file()
    figures = json.loads((tmp_path / "s.json").read_text())
    assert len(figures["simulations"]) == 8


def test_command_fails_on_a_figure_that_is_off(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """An off-by-one in E."""
    monkeypatch.setattr(
        "eval.arithmetic.simulations.expected_tokens",
        lambda alpha, n: expected_tokens(alpha, n - 1),
    )
    assert main(["--draws", "2000"]) == 1
    assert "off: large noise, N = 1" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "sentence"), [(["--draws", "10"], "--draws=10"), (["--seed", "-1"], "--seed=-1")]
)
def test_bad_words_are_one_sentence(
    words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(SystemExit) as stopped:
        main(words)
    assert stopped.value.code == 2
    assert sentence in capsys.readouterr().err


def test_another_seed_draws_other_numbers_about_the_same_values():
    one, two = (tokens_a_call(seed, 2000).checks for seed in (1, 2))
    assert all(check.passed for check in [*one, *two])
    assert [check.found for check in one] != [check.found for check in two]
    assert [check.expected for check in one] == [check.expected for check in two]


def test_the_wrong_rule_is_seen():
    right, wrong = first_token(3, 20_000).checks
    assert right.passed and wrong.passed
    assert wrong.found == pytest.approx(wrong.expected, rel=0.2)


def test_the_lessons_statistic_rejects_a_right_sampler():
    """Two noisy samples, one taken as exact: 42.7 % of seeds fail at the 5 % value."""
    dice = np.random.default_rng(5)
    one, two = dice.multinomial(50_000, TARGET, size=(2, 2000))
    limit = quantile(0.05, 7)
    assert limit == pytest.approx(14.067, abs=1e-3)
    assert (against_noisy(one, two) > limit).mean() == pytest.approx(0.427, abs=0.045)
    assert against_noisy(one, two).mean() == pytest.approx(14, abs=0.5)
    assert tail(limit / 2, 7) == pytest.approx(0.425, abs=1e-3)
    for right in (against_exact(one, np.array(TARGET)), of_two_samples(one, two)):
        assert (right > limit).mean() == pytest.approx(0.05, abs=0.02)


def test_exact_figures_of_alike_rows_are_the_formula():
    draft = perturb(TARGET, NOISES[0])
    alpha = acceptance(TARGET, draft)
    for n in (1, 4):
        exact = exact_figures(Tables.alike(TARGET, draft), n, 3)
        assert exact.tokens == pytest.approx(expected_tokens(alpha, n))
        assert exact.alpha == pytest.approx(alpha)
        assert exact.survival == pytest.approx([alpha**k for k in range(1, n + 1)])


def test_acceptance_that_depends_on_the_text():
    """The exact figure is met, and E of the mean α is not: the formula needs independence."""
    tables = easy_and_hard(8, 0)
    exact = exact_figures(tables, 5, 10)
    tokens = play(tables, 5, 20_000, 10, 0).tokens
    error = float(tokens.std()) / len(tokens) ** 0.5
    assert abs(float(tokens.mean()) - exact.tokens) < 4 * error
    wrong = expected_tokens(exact.alpha, 5)
    assert not drawn("E of the mean", float(tokens.mean()), wrong, error).passed
    assert all(check.passed for check in by_context(1, 20_000).checks)
    assert exact_figures(tables, 5, 1).tokens != pytest.approx(exact.tokens, abs=0.01)  # root 0


def test_alpha_of_played_rounds_counts_tested_guesses_alone():
    tables = easy_and_hard(8, 0)
    found = play(tables, 3, 5000, 10, 2)
    assert found.alpha(3) == pytest.approx(exact_figures(tables, 3, 10).alpha, abs=0.01)


def test_ranks_walk_only_where_the_tree_has_a_node():
    """Two children, the second without children: rank 1 ends the walk one level on."""
    shape = StaticShape("odd", (0, 0, 1), (0, 1, 0))
    tokens = walk_ranks(shape, same_at_every_depth([0.0, 1.0], 2), 50, 0)
    assert tokens.tolist() == [2.0] * 50
    tokens = walk_ranks(shape, same_at_every_depth([1.0, 0.0], 2), 50, 0)
    assert tokens.tolist() == [3.0] * 50
    tokens = walk_ranks(shape, same_at_every_depth([0.0, 0.0], 2), 50, 0)
    assert tokens.tolist() == [1.0] * 50


@pytest.mark.parametrize("seed", range(4))
def test_rules_for_several_guesses(seed: int):
    target, draft = random_pair(seed)
    rates = {
        rule: [enumerate_rule(rule, target, draft, k).accepted for k in (1, 2, 3)] for rule in Rule
    }
    for rule in Rule:
        for k in (1, 2, 3):
            emitted = enumerate_rule(rule, target, draft, k)
            assert emitted.chances.sum() == pytest.approx(1)
            exact = emitted.distance(target) < 1e-12
            one_draw = rule is Rule.unscaled and k == 1  # nothing has been taken from the draft yet
            assert exact is (rule in EXACT or one_draw)
    overlap = float(np.minimum(target, draft).sum())
    assert rates[Rule.without][0] == rates[Rule.replaced][0] == pytest.approx(overlap)
    assert rates[Rule.top_k][0] == pytest.approx(target[draft.argmax()])
    for k in (1, 2):
        assert rates[Rule.without][k] >= rates[Rule.replaced][k]


def test_top_k_guesses_tested_as_if_drawn_never_emit_the_second_token():
    even = np.array([0.51, 0.49])
    assert enumerate_rule(Rule.top_k_ratio, even, even, 1).chances.tolist() == [1.0, 0.0]
    assert enumerate_rule(Rule.top_k, even, even, 1).chances == pytest.approx(even)


def test_rollback_by_the_numbers():
    events = two_rounds()
    assert all(check.passed for check in rollback_checks(events))
    final = {one.sequence: one for one in events}
    for one in final.values():
        assert one.rows[: one.length] == one.text[:-1]  # the root has no row yet
    assert with_one_length(events) == N - 1


def test_rollback_by_too_much_or_too_little_is_seen():
    events = [one for one in two_rounds() if one.action.startswith("round 1: 1 of")]
    (after,) = events
    kept = [row for row, token in zip(after.rows, after.text, strict=False) if row != token]
    assert kept == ["b4×"]  # what one row more would have let attention see
    assert after.foreign == 0 and after.foreign_with_own == 1


@pytest.mark.parametrize("too_far", [0, 1])
def test_the_real_cache_holds_the_same_rows(too_far: int):
    """The story's tokens as keys: KVCache, moved by ``advance`` alone, ends with the same rows.

    One row further for B in round 1, as if the verifier's own token had one, and it does not.
    """
    config = LlamaConfig(hidden_size=4, num_attention_heads=1, num_hidden_layers=1, vocab_size=8)
    batch = KVCache(config, 2, 32, torch.device("cpu"), torch.float32)
    events = two_rounds()
    numbers = {token: i for i, token in enumerate(sorted({r for e in events for r in e.rows}))}
    write(batch, [[*one.rows, "a0"][:3] for one in events[:2]], numbers)  # B: padded on the right
    batch.advance(torch.tensor([one.length for one in events[:2]]))
    for at in (2, 6):
        fed, after = events[at : at + 2], events[at + 2 : at + 4]
        write(batch, [one.rows[one.length : one.length + N + 1] for one in fed], numbers)
        moved = [late.length - early.length for early, late in zip(fed, after, strict=True)]
        moved[1] += too_far if at == 2 else 0
        batch.advance(torch.tensor(moved))
    keys, _ = batch.update(torch.zeros(2, 1, 1, 4), torch.zeros(2, 1, 1, 4), 0)
    held = [
        keys[row, 0, : one.length, 0].long().tolist() == [numbers[token] for token in one.text[:-1]]
        for row, one in enumerate(events[-2:])
    ]
    assert held == [True, not too_far]


def write(cache: KVCache, rows: list[list[str]], numbers: dict[str, int]) -> None:
    """One layer's keys: the number of each token."""
    values = torch.tensor([[numbers[token] for token in row] for row in rows]).float()
    states = values[:, None, :, None].expand(-1, 1, -1, 4)
    cache.update(states, states, 0)


def test_checks_judge():
    assert exactly("x", 1.0, 1.0).passed and not exactly("x", 1.1, 1.0).passed
    assert not Check("x", float("nan"), 0, -1, 1).passed
    assert not drawn("x", 1.05, 1.0, 0.01).passed and drawn("x", 1.03, 1.0, 0.01).passed
    assert check_lines([exactly("x", 2.0, 1.0)])[1].endswith("OFF")


def test_events_are_snapshots():
    """A later action must not reach back into an earlier line of the story."""
    first: Event = two_rounds()[0]
    assert (first.text, first.rows) == (["a0", "a1", "a2", "a3"], ["a0", "a1", "a2"])
