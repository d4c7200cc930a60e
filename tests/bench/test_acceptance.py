"""The acceptance bench without a training: recipes, split, and the arithmetic of its report."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parent))  # the benchmark's modules import each other

from acceptance import PEERS, Budget, wanted
from acceptance_data import AUX_LAYERS, VALID_SHARE, named, overrides_of
from acceptance_eyrie import Budget as Used
from acceptance_recipes import BASE, RECIPES, WORDS
from acceptance_report import Group, Head, gain, spread

from conf.compose import load_config
from conf.schema import ConfigError
from data.split import place


def each_of_a_group() -> list:
    """The first recipe of a group, and the others for --all: to compose one takes half a second."""
    seen: set[str] = set()
    found = []
    for one in RECIPES:
        marks = [pytest.mark.slow] if one.group in seen else []
        found.append(pytest.param(one, id=one.name, marks=marks))
        seen.add(one.group)
    return found


@pytest.mark.parametrize("recipe", each_of_a_group())
def test_every_recipe_is_one_that_the_job_takes(recipe, tmp_path: Path):
    own = [w for w in overrides_of(tmp_path, recipe.kind) if not w.startswith("verifier.aux")]
    layers = f"verifier.aux_layers=[{recipe.layers}]"
    cfg = load_config([*own, layers, "stages=[capture]", *recipe.overrides])
    assert set(cfg.verifier.aux_layers or []) <= set(AUX_LAYERS)
    base = load_config([*own, "verifier.aux_layers=[2,15,27]", "stages=[capture]", *WORDS])
    apart = recipe.kind != "greedy" or recipe.samples is not None
    assert recipe.name == BASE or apart or cfg != base  # a switch without effect is none


def test_names_are_unique_and_an_unknown_one_is_named():
    for task, known in (("train", RECIPES), ("peers", PEERS)):
        assert len({one.name for one in known}) == len(known)
        assert wanted(task, []) == known and wanted(task, [known[1].name]) == [known[1]]
    with pytest.raises(ConfigError, match="nothing: no such recipe; there are first, "):
        wanted("train", ["nothing"])


def test_ids_go_where_the_products_split_puts_them():
    for stem in ("t0", "t1", "h0", "h7"):
        held = stem[0] == "h"
        row = named({"id": "other", "text": "kept"}, stem, held)
        assert row["text"] == "kept" and row["id"].startswith(stem + "~")
        assert (place(row["id"]) < VALID_SHARE) is held


def head(recipe: str, rounds: list[int], accepted: list[int]) -> Head:
    rows = [
        {"rounds": r, "accepted_by_depth": [a, 0], "reached_by_depth": [r, a]}
        for r, a in zip(rounds, accepted, strict=True)
    ]
    result = {"recipe": recipe, "updates": 1, "cpu_seconds": 1.0}
    return Head(result, {"counters": {"3": rows, "5": rows}})


def test_tau_is_a_ratio_of_sums_over_prompts_and_seeds():
    group = Group([head("x", [10, 30], [5, 3]), head("x", [20, 20], [10, 0])])
    assert group.tau("5") == 1 + 18 / 80
    assert spread(group) == [1 + 8 / 40, 1 + 10 / 40]
    assert group.conditional("5") == [18 / 80, 0.0]


def test_a_gain_is_of_tau_minus_one_and_pairs_the_prompts():
    """Prompts that differ from each other and not between the two make no interval."""
    rounds, accepted = [10] * 40, list(range(40))
    base = Group([head("base", rounds, accepted)])
    twice = Group([head("twice", rounds, [2 * a for a in accepted])])
    found = gain(twice, base)
    assert found.ratio == pytest.approx(2)
    assert (found.interval.low, found.interval.high) == pytest.approx((2, 2))
    mixed = Group([head("mixed", rounds, accepted[::-1])])  # as good, on other prompts
    other = gain(mixed, base)
    assert other.ratio == pytest.approx(1) and other.interval.low < 0.9 < 1.1 < other.interval.high


def test_seeds_that_differ_widen_the_interval():
    rounds = [10] * 40
    base = Group([head("base", rounds, [5] * 40)])
    alike = Group([head("x", rounds, [6] * 40) for _ in range(3)])
    apart = Group([head("x", rounds, [a] * 40) for a in (3, 6, 9)])
    near, far = gain(alike, base).interval, gain(apart, base).interval
    assert near.low == near.high == pytest.approx(1.2)
    assert far.low < 1.0 < 1.4 < far.high


def test_a_budget_is_used_up_by_steps_or_by_seconds():
    assert Budget(None, 60.0).words == ["--cpu-seconds", "60.0"]
    assert [Budget(None, 60.0).name, Budget(300, None).name] == ["60s", "300steps"]
    assert Used(None, 50.0).used(7, 25.0) == 0.5 and Used(10, None).used(5, 99.0) == 0.5
