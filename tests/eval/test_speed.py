"""Speed arithmetic on hand-made timings, and the order in which methods run."""

import pytest

from conf.schema import ConfigError
from eval.decode import DecodeSettings
from eval.speed import LIBRARY, PLAIN, Timing, interleave, measure_speed, summarise
from models.verifier import Verifier


def timings() -> dict[str, list[Timing]]:
    """Plain: 10 tokens/s. N=1: rounds of 0.11 + 0.02 s. N=2: rounds of 0.12 + 0.05 s."""
    return {
        PLAIN: [Timing(11, 0.5, 1.0), Timing(21, 0.5, 2.0)],
        "1": [
            Timing(11, 0.6, 0.78, 0.12, 0.66, rounds=6, accepted=5),
            Timing(21, 0.6, 1.56, 0.24, 1.32, rounds=12, accepted=9),
        ],
        "2": [
            Timing(11, 0.6, 0.85, 0.25, 0.60, rounds=5, accepted=6),
            Timing(21, 0.6, 1.70, 0.50, 1.20, rounds=10, accepted=10),
        ],
        LIBRARY: [Timing(11, 0.0, 2.2), Timing(21, 0.0, 4.2)],
    }


def test_figures_follow_their_definitions():
    report = summarise(timings(), resamples=500, seed=0)
    base = report.baselines
    assert (base.prompts, base.tokens) == (2, 32)
    assert base.plain_step_seconds == pytest.approx(0.1)  # 30 tokens after the first, 3 s
    assert base.plain_tokens_per_second_decode == pytest.approx(10)
    assert base.plain_tokens_per_second_end_to_end == pytest.approx(32 / 4)
    assert base.generate_tokens_per_second == pytest.approx(32 / 6.4)

    one = report.by_n[1]
    assert one.tau == pytest.approx(1 + 14 / 18)
    assert (one.v, one.d, one.c) == pytest.approx((1.1, 0.2, 0.2))
    assert one.predicted_speedup == pytest.approx((1 + 14 / 18) / 1.3)
    assert one.tokens_per_second_decode == pytest.approx(30 / 2.34)
    assert one.speedup_decode == pytest.approx(30 / 2.34 / 10)
    assert one.speedup_end_to_end == pytest.approx((32 / 3.54) / (32 / 4))

    two = report.by_n[2]
    assert (two.tau, two.v, two.d, two.c) == pytest.approx((1 + 16 / 15, 1.2, 0.5, 0.25))
    assert two.speedup_decode == pytest.approx(30 / 2.55 / 10)

    assert report.best_n == 1 and report.best is one
    assert report.speedup_vs_generate == pytest.approx((32 / 3.54) / (32 / 6.4))
    # Every prompt has the same rates after prefill, so no resample can differ.
    assert one.speedup_decode_interval.low == pytest.approx(one.speedup_decode)
    assert one.speedup_decode_interval.high == pytest.approx(one.speedup_decode)
    interval = one.speedup_end_to_end_interval
    assert interval.low < one.speedup_end_to_end < interval.high


def test_an_answer_of_one_token_is_not_timed():
    data = timings()
    for runs in data.values():
        runs.append(Timing(1, 0.5, 0.0))
    assert summarise(data, 10, 0) == summarise(timings(), 10, 0)
    only = {name: [Timing(1, 0.5, 0.0)] for name in data}
    with pytest.raises(ConfigError, match=r"all 1 answers end.*eval\.prompts"):
        summarise(only, 10, 0)


def test_no_draft_accepted_and_all_accepted_stay_finite():
    data = timings()
    data["1"] = [Timing(11, 0.6, 1.3, 0.2, 1.1, rounds=10, accepted=0)] * 2
    data["2"] = [Timing(11, 0.6, 0.68, 0.2, 0.48, rounds=4, accepted=8)] * 2
    report = summarise(data, 50, 0)
    assert (report.by_n[1].tau, report.by_n[2].tau) == (1.0, 3.0)
    assert report.best_n == 2


def test_every_prompt_is_run_by_every_method_and_the_order_rotates():
    order: list[tuple[str, int]] = []

    def method(name: str):
        def run(ids: list[int]) -> Timing:
            order.append((name, ids[0]))
            return Timing(len(ids), 0.0, 0.0)

        return run

    names = ["plain", "1", "generate"]
    found = interleave({name: method(name) for name in names}, [[0], [1], [2], [3]])
    assert [name for name, _ in order] == [
        *("plain", "1", "generate"),
        *("1", "generate", "plain"),
        *("generate", "plain", "1"),
        *("plain", "1", "generate"),
    ]
    assert [prompt for _, prompt in order] == [i for i in range(4) for _ in names]
    assert all(len(found[name]) == 4 for name in names)


def test_measured_on_a_tiny_verifier(verifier: Verifier, make_draft):
    settings = DecodeSettings(n_draft=3, max_new_tokens=12, eos_ids=[])
    report = measure_speed(verifier, make_draft(), [[5, 6, 7], [9, 8]], settings, [1, 3], 20)
    assert report.baselines.tokens == 24  # nothing beyond the limit is counted
    assert list(report.by_n) == [1, 3] and report.best_n in (1, 3)
    for n, at in report.by_n.items():
        assert 1 <= at.tau <= n + 1
        assert min(at.v, at.d, at.c, at.speedup_decode, at.speedup_end_to_end) > 0
        assert at.predicted_speedup == pytest.approx(at.tau / (at.v + at.d))
    assert report.speedup_vs_generate > 0
