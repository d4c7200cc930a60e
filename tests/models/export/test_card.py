"""The card says what was measured, and that the rest was not."""

import json
from dataclasses import replace

import pytest

from conf.schema import ConfigError
from models.export.card import DataFacts, Figures, read_figures, write_card
from models.export.vllm import VLLM

MEASURED = Figures(
    tau=2.034,
    floor_tau=1.512,
    held_out_tau=1.943,
    alpha_by_depth=[0.71, 0.62, None],
    speedup_decode=1.447,
    speedup_end_to_end=1.321,
    checked=20,
    identical=20,
    n_draft=4,
    best_n=3,
)


def test_the_card_holds_the_figures_with_dtype_and_machine(plain_card, make_head, tmp_path):
    data = DataFacts("data/demo/answers.jsonl", 1234, 56789, 0.875)
    card = replace(plain_card, figures=MEASURED, data=data, training=["unroll depth 5"])
    config = make_head().config
    text = write_card(card, config, VLLM.serve(card, config, tmp_path / "vllm"))
    for words in (
        "| τ, tokens a round | 2.03 | chain of 4, greedy, float32, CPU |",
        "| τ of an n-gram table on the same text | 1.51 |",
        "0.71, 0.62, –",
        "| 20 of 20 |",
        "| speed-up, decoding alone | 1.45× | chain of 3, greedy, bfloat16, CPU,",
        "1.32×",
        "samples: 1,234; supervised tokens: 56,789",
        "of these tokens the verifier's own top choice: 87.5%",
        "data/demo/answers.jsonl",
        "unroll depth 5",
        "base_model: org/verifier",
        "fingerprint 0123abcd",
        "after 2, 4, 5 decoder layers",
        "fc_norm false",
        "What it is not",
    ):
        assert words in text
    assert "not measured" not in text


def test_without_figures_every_row_says_so(plain_card, make_head, tmp_path):
    text = write_card(plain_card, make_head().config, ["serve it"])
    assert text.count("| not measured |  |") == 7
    assert "license: unknown" in text
    assert "samples: not recorded" in text
    assert "top choice: not recorded" in text


def test_the_serve_line_is_one_a_shell_can_run(plain_card, make_head, tmp_path):
    import shlex

    card = replace(plain_card, figures=MEASURED)
    config = make_head().config
    words = shlex.split(VLLM.serve(card, config, tmp_path / "it's here")[0])
    assert words[:4] == ["vllm", "serve", "org/verifier", "--speculative-config"]
    assert json.loads(words[4]) == {
        "method": "eagle3",
        "model": str(tmp_path / "it's here"),
        "num_speculative_tokens": 3,
    }
    unmeasured = shlex.split(VLLM.serve(plain_card, config, tmp_path)[0])
    assert json.loads(unmeasured[4])["num_speculative_tokens"] == 4


def test_a_local_verifier_is_no_hub_name(plain_card, make_head, tmp_path):
    card = replace(plain_card, served_verifier="/models/mine")
    assert "base_model" not in write_card(card, make_head().config, [])


def report_of(head: str, held_out_tau: float) -> dict:
    return {
        "tau": 2.0,
        "ngram_floor": {"tau": 1.5},
        "alpha_by_depth": [0.7, None],
        "speedup_decode": 1.4,
        "speedup_end_to_end": 1.3,
        "lossless": {"checked": 20, "identical": 20},
        "data": {"held_out_tau": held_out_tau},
        "settings": {
            "draft": head,
            "best_n": 3,
            "counters_dtype": "float32",
            "device": "CPU",
            "eval": {"n_draft": 4, "temperature": 0.0, "speed_dtype": "bfloat16"},
        },
    }


def test_figures_come_from_the_report_and_the_best_head(tmp_path, capsys):
    head, path = tmp_path / "best", tmp_path / "eval" / "report.json"
    assert read_figures(head) == Figures()
    head.mkdir()
    path.parent.mkdir()
    (head / "acceptance.json").write_text('{"tau": 1.9}')
    path.write_text(json.dumps(report_of("runs/x/best", 1.9)))
    figures = read_figures(head)
    assert (figures.tau, figures.held_out_tau, figures.floor_tau) == (2.0, 1.9, 1.5)
    assert (figures.identical, figures.n_draft, figures.best_n) == (20, 4, 3)
    assert (figures.dtype, figures.speed_dtype, figures.machine) == ("float32", "bfloat16", "CPU")

    for other in (report_of("runs/x/best", 1.8), report_of("runs/x/step-00100", 1.9)):
        path.write_text(json.dumps(other))
        assert read_figures(head) == Figures(held_out_tau=1.9)
        assert "another head" in capsys.readouterr().out

    for broken, words in (("{", "not a report"), ('{"tau": 2.0}', "settings")):
        path.write_text(broken)
        with pytest.raises(ConfigError, match=words):
            read_figures(head)


@pytest.mark.parametrize(
    ("key", "value"), [("tau", "x"), ("tau", [2.0]), ("alpha_by_depth", 5), ("best_n", "x")]
)
def test_a_figure_that_is_no_number_is_refused(tmp_path, key, value):
    head, path = tmp_path / "best", tmp_path / "eval" / "report.json"
    head.mkdir()
    path.parent.mkdir()
    (head / "acceptance.json").write_text(json.dumps({"tau": 1.9}))
    report = report_of("best", 1.9)
    (report["settings"] if key == "best_n" else report)[key] = value
    path.write_text(json.dumps(report))
    with pytest.raises(ConfigError, match=r"no numbers; run python -m eval\.main again"):
        read_figures(head)
