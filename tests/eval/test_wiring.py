"""Wirings are told apart by paired figures: gains beyond chance, of a size that matters."""

import random

import pytest

from eval.wiring import (
    DRAWS,
    MATERIAL,
    Named,
    Tried,
    Wiring,
    chance_of_gain,
    judge_layers,
    judge_rope,
    neighbours,
    same_table,
    table_of,
)
from models.rope import Rope

NAMED = Named("config.json", "aux_ids", "rope_theta", "rope_parameters")
TEXTS, ROWS = 12, 60
PLAIN = {"rope_type": "default", "rope_theta": 1e5}


def tried(share: float, ids=(2, 4, 5), theta: float = 1e5, seed: int = 0, texts=TEXTS) -> Tried:
    """Rows of which about ``share`` have a right first guess."""
    dice = random.Random(f"{share} {seed} {ids} {theta}")
    hits = [[int(dice.random() < share) for _ in range(ROWS)] for _ in range(texts)]
    return Tried(Wiring(list(ids), PLAIN | {"rope_theta": theta}), hits)


def test_neighbours_are_all_ids_moved_then_each_alone():
    assert neighbours([2, 15, 27], 30) == [
        [1, 14, 26],
        [3, 16, 28],
        [1, 15, 27],
        [3, 15, 27],
        [2, 14, 27],
        [2, 16, 27],
        [2, 15, 26],
        [2, 15, 28],
    ]


def test_neighbours_stay_ascending_unique_and_within_the_verifier():
    assert neighbours([1, 2, 8], 8) == [[1, 3, 8], [1, 2, 7]]
    assert neighbours([3], 8) == [[2], [4]]
    assert neighbours([1], 1) == []


@pytest.mark.parametrize("by", [-1, 1])
def test_a_better_neighbour_is_a_finding(by: int):
    filed = tried(0.3)
    right = tried(0.6, [n + by for n in (2, 4, 5)])
    verdict = judge_layers(filed, [tried(0.2, (2, 4, 6)), right], NAMED)
    assert verdict.findings == [
        f"config.json: aux_ids=[2, 4, 5]: the verifier's streams {right.wiring.aux_layers} are "
        f"accepted more often ({right.first:.2f} against {filed.first:.2f} of {TEXTS * ROWS} "
        "rows): ids off by one"
    ]


def test_one_wrong_id_is_told_from_all():
    right = tried(0.6, (2, 4, 6))
    verdict = judge_layers(tried(0.3), [tried(0.5, (3, 5, 6)), right], NAMED)
    assert "[2, 4, 6]" in verdict.findings[0] and "one id off by one" in verdict.findings[0]


def test_right_ids_are_said_to_be_right():
    verdict = judge_layers(tried(0.6), [tried(0.4, (1, 3, 4)), tried(0.5, (3, 5, 6))], NAMED)
    assert not verdict.findings
    assert "accepted more often than every neighbour" in verdict.notes[0]


def test_what_is_alike_is_not_decided():
    filed = tried(0.6)
    verdict = judge_layers(filed, [tried(0.3, (1, 3, 4)), tried(0.6, (2, 4, 6))], NAMED)
    assert not verdict.findings and verdict.notes[0].endswith("not decided: [2, 4, 6]")
    indifferent = [Tried(Wiring([1, 3, 4], PLAIN), filed.hits)]
    verdict = judge_layers(filed, indifferent, NAMED)
    assert not verdict.findings and "not decided, no neighbouring id" in verdict.notes[0]


def test_a_head_that_is_never_right_is_not_decided():
    verdict = judge_layers(tried(0.0), [tried(0.0, (1, 3, 4))], NAMED)
    assert not verdict.findings and "not decided" in verdict.notes[0]


def test_few_texts_find_nothing():
    """Four texts can all gain by chance once in sixteen times."""
    gain = judge_layers(tried(0.3, texts=4), [tried(0.6, (1, 3, 4), texts=4)], NAMED)
    assert not gain.findings and "not decided" in gain.notes[0]


def test_a_certain_gain_that_is_too_small_is_no_finding():
    filed = tried(0.5)
    more = [[*text] for text in filed.hits]
    for text in more[:TEXTS]:
        text[text.index(0)] = 1  # one row of each text
    other = Tried(Wiring([1, 3, 4], PLAIN), more)
    assert 0 < other.first - filed.first < MATERIAL
    assert chance_of_gain(filed, other) < 0.01
    assert not judge_layers(filed, [other], NAMED).findings


def test_equal_wirings_are_rarely_found_to_differ():
    """Of 80 pairs that differ by chance alone about a hundredth lie below a hundredth."""
    chances = [chance_of_gain(tried(0.5, seed=i), tried(0.5, seed=1000 + i)) for i in range(80)]
    assert sum(chance <= 0.01 for chance in chances) <= 4
    assert 20 <= sum(chance <= 0.5 for chance in chances) <= 60


def test_a_gain_in_one_text_is_no_evidence():
    """Rows of one text depend on each other: 60 that are better together count as one."""
    filed = tried(0.5)
    hits = [*filed.hits]
    hits[3] = [1] * ROWS
    assert chance_of_gain(filed, Tried(filed.wiring, hits)) == pytest.approx(0.5, abs=0.02)
    assert chance_of_gain(filed, filed) == 1.0
    assert chance_of_gain(tried(0.1), tried(0.9)) <= 10 / DRAWS + 2 / 2**TEXTS


def test_a_better_base_is_a_finding_that_names_both():
    filed, right = tried(0.3, theta=1e4), tried(0.5)
    assert judge_rope(filed, right, NAMED).findings == [
        "config.json: rope_theta=10000.0: guesses are accepted more often with the verifier's "
        f"100000.0 ({right.first:.2f} against {filed.first:.2f} of {TEXTS * ROWS} rows)"
    ]
    scaled = Tried(Wiring([2, 4, 5], PLAIN | {"rope_type": "linear", "factor": 2.0}), right.hits)
    finding = judge_rope(tried(0.3), scaled, NAMED).findings[0]
    assert finding.startswith("config.json: rope_parameters={") and "'factor': 2.0" in finding


def test_another_base_that_costs_nothing_is_said_and_no_finding():
    alike = judge_rope(tried(0.5, theta=1e4), tried(0.5), NAMED)
    assert not alike.findings and "not decided, with the verifier's 100000.0" in alike.notes[0]
    trained_so = judge_rope(tried(0.5, theta=1e4), tried(0.3), NAMED)
    assert not trained_so.findings
    assert "not the verifier's 100000.0, with which" in trained_so.notes[0]
    assert judge_rope(tried(0.5), None, NAMED).notes == [
        "config.json: rope_theta=100000.0: the verifier's"
    ]


def test_tables_are_compared_by_what_they_do():
    plain = Rope(16, 512, PLAIN)
    assert same_table(plain, Rope(16, 2048, {"rope_theta": 100000, "rope_type": "default"}))
    assert not same_table(plain, Rope(16, 512, PLAIN | {"rope_theta": 1e4}))
    assert not same_table(plain, Rope(16, 512, PLAIN | {"rope_type": "linear", "factor": 2.0}))


def test_the_table_begins_with_the_files_wiring():
    lines = table_of([tried(0.5), tried(0.3, (1, 3, 4))])
    assert lines[1].startswith("[2, 4, 5]") and lines[1].endswith("the file's")
    assert lines[2].startswith("[1, 3, 4]") and "-0." in lines[2]
