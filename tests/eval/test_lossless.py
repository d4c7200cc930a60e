"""Token-exactness is checked, differences are located, and the command says so."""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from conf.compose import to_yaml
from conf.schema import ConfigError, Precision, RunConfig, RunSection, VerifierSection
from eval import lossless
from eval.decode import DecodeSettings, decode_plain, decode_speculative
from eval.lossless import check_greedy, compare, newest_head
from eval.toy import CASES, run_toy
from models.draft_file import save_draft
from models.verifier import Verifier

PROMPTS = [[1, 40, 41, 42], [7], [3, 3, 60, 61, 62]]
SETTINGS = DecodeSettings(n_draft=3, max_new_tokens=12, eos_ids=[])


def test_greedy_check_counts_identical_prompts(verifier: Verifier, make_draft):
    report = check_greedy(verifier, make_draft(), PROMPTS, SETTINGS)
    assert (report.checked, report.identical, report.differences) == (3, 3, [])
    assert report.passed


def test_a_difference_is_located_with_its_gap(verifier: Verifier, make_draft):
    plain = decode_plain(verifier, PROMPTS[0], SETTINGS)
    wrong = [*plain.tokens[:5], 99, *plain.tokens[6:]]
    found = compare(verifier, PROMPTS[0], plain, replace(plain, tokens=wrong), index=2)
    assert found is not None
    assert (found.prompt, found.position, found.plain) == (2, 5, plain.tokens[5])
    assert found.speculative == 99
    text = torch.tensor([[*PROMPTS[0], *plain.tokens[:5]]])
    logits = verifier.logits_from(verifier.states(text).last[0, -1])
    top = logits.topk(2).values
    assert found.gap == pytest.approx(float(top[0] - top[1]), abs=1e-5)
    short = compare(verifier, PROMPTS[0], plain, replace(plain, tokens=plain.tokens[:4]))
    assert short is not None and (short.position, short.speculative) == (4, None)


@pytest.fixture
def run_folder(tmp_path: Path, tiny_verifier: Path, make_draft, monkeypatch) -> Path:
    """runs/one/ with a config, a head and a prompt file; the working directory is its parent."""
    monkeypatch.chdir(tmp_path)
    prompts = tmp_path / "prompts.jsonl"
    rows = [{"id": str(i), "task": "t", "turns": [f"Say {i}", "And?"]} for i in range(3)]
    prompts.write_text("\n".join(json.dumps(row) for row in rows))
    cfg = RunConfig(
        run=RunSection(name="one", cache=str(tmp_path / "cache")),
        verifier=VerifierSection(path=str(tiny_verifier), dtype=Precision.float32),
    )
    cfg.eval.prompts = [str(prompts)]
    folder = tmp_path / "runs" / "one"
    draft = make_draft(vocab_size=60)
    save_draft(folder / "best", draft.config, draft.state_dict())
    (folder / "config.yaml").write_text(to_yaml(cfg))
    return folder


@pytest.fixture
def one_toy_case(monkeypatch):
    monkeypatch.setattr(lossless, "CASES", (CASES[0], CASES[-1]))
    monkeypatch.setattr(lossless, "run_toy", lambda case: run_toy(case, seeds=1, sequences=5000))


def test_command_takes_the_newest_run(run_folder: Path, one_toy_case, capsys):
    assert newest_head(Path("runs")) == Path("runs/one/best")
    point = Path(shutil.copytree(run_folder, "runs/sweep/depth-3"))
    later = (run_folder / "best" / "draft.json").stat().st_mtime + 5
    os.utime(point / "best" / "draft.json", (later, later))
    assert newest_head(Path("runs")) == Path("runs/sweep/depth-3/best")
    assert lossless.main(["--count", "2", "--new-tokens", "8"]) == 0
    printed = capsys.readouterr().out
    assert "2 of 2 prompts token-identical" in printed
    assert "exact" in printed and "biased" in printed and "UNEXPECTED" not in printed


def test_command_fails_on_a_difference(run_folder: Path, one_toy_case, capsys, monkeypatch):
    def off_by_one(*args):
        output = decode_speculative(*args)
        return replace(output, tokens=[*output.tokens[:-1], output.tokens[-1] ^ 1])

    monkeypatch.setattr(lossless, "decode_speculative", off_by_one)
    prompts = str(run_folder.parent.parent / "prompts.jsonl")
    arguments = [str(run_folder / "best"), "--prompts", prompts, "--new-tokens", "6"]
    assert lossless.main(arguments) == 1
    printed = capsys.readouterr().out
    assert "0 of 3 prompts token-identical" in printed and "token 5" in printed


def test_command_fails_when_a_control_passes(run_folder: Path, one_toy_case, capsys, monkeypatch):
    monkeypatch.setattr(lossless, "run_toy", lambda case: run_toy(case, seeds=1, sequences=20))
    assert lossless.main(["--count", "1", "--new-tokens", "2"]) == 1
    assert "UNEXPECTED" in capsys.readouterr().out


def test_command_leaves_out_what_the_template_refuses(
    run_folder: Path, one_toy_case, capsys, tiny_verifier: Path
):
    """One prompt of three is refused; the others are compared."""
    folder = shutil.copytree(tiny_verifier, run_folder / "verifier")
    template = folder / "chat_template.jinja"
    guard = "{% if 'Say 1' in messages[0]['content'] %}{{ raise_exception('not this') }}{% endif %}"
    template.write_text(guard + template.read_text())
    config = run_folder / "config.yaml"
    config.write_text(config.read_text().replace(str(tiny_verifier), str(folder)))
    assert lossless.main(["--new-tokens", "4"]) == 0
    printed = capsys.readouterr().out
    assert "2 of 2 prompts token-identical" in printed
    assert "not compared: 1 prompts that the chat template refuses" in printed
    template.write_text("{{ raise_exception('never') }}")
    with pytest.raises(ConfigError, match=r"eval\.prompts: the chat template refuses every"):
        lossless.main([])


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--count", "0"], "--count=0: must be 1 or more"),
        (["--count", "x"], "argument --count: invalid int value: 'x'"),
        (["--what"], "unrecognized arguments: --what"),
    ],
)
def test_bad_options_are_one_sentence(words: list[str], sentence: str, run_folder: Path, capsys):
    with pytest.raises(SystemExit) as ended:
        lossless.main(words)
    assert ended.value.code == 2
    assert capsys.readouterr().err == f"{sentence}; --help shows the options\n"


def test_command_without_a_run_names_the_way_out(run_folder: Path):
    shutil.rmtree(run_folder)
    with pytest.raises(ConfigError, match="no run with a best/ head"):
        lossless.main([])
