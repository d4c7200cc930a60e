"""Whether a head leaves the output as it is: the proof's parts, and the command."""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from conf.compose import load_saved, to_yaml
from conf.schema import ConfigError, Precision, RunConfig, RunSection, VerifierSection
from conf.shapes import parse_shape
from eval import lossless
from eval.decode import DecodeSettings, decode
from eval.proof import greedy_proof
from eval.proof.difference import compare
from eval.proof.examined import examine, newest_head
from eval.proof.first_token import CASES as FIRST_CASES
from eval.proof.first_token import chance_of_control, count_first, prove_first_token, sides_after
from eval.proof.greedy_proof import Exam, Graded, Way, prove_greedy, rounding, tolerances
from eval.proof.toy import CASES, run_toy
from eval.proof.wrong_rules import Control
from eval.verify import AcceptRule
from models.draft_file import load_draft, save_draft
from models.export.read import read_head
from models.export.write import export_head
from models.sampling import Sampling
from models.verifier import Verifier

PROMPTS = [[1, 40, 41, 42], [7], [3, 3, 60, 61, 62]]
SETTINGS = DecodeSettings(max_new_tokens=12, eos_ids=[])
SHAPES = ["3", "2x2", "dynamic:nodes=5,depth=2,top_k=3"]
WAYS = [Way(parse_shape(name, "x"), batch) for name in SHAPES for batch in (1, 2)]


def test_every_way_gives_the_plain_tokens(verifier: Verifier, make_draft):
    checks = prove_greedy(Exam(verifier, make_draft(), PROMPTS, SETTINGS), 1, [*WAYS, Way(None, 1)])
    assert [(one.checked, one.identical) for one in checks] == [(3, 3)] * 7
    assert all(one.passed for one in checks)


def broken(monkeypatch, at: int) -> None:
    """Rounds whose answers have another token at ``at``."""

    def wrong(verifier, draft, prompts, settings):
        decoded = decode(verifier, draft, prompts, settings)
        if draft is None:
            return decoded
        spoiled = [
            replace(one, tokens=[*one.tokens[:at], one.tokens[at] ^ 1, *one.tokens[at + 1 :]])
            for one in decoded.generations
        ]
        return replace(decoded, generations=spoiled)

    monkeypatch.setattr(greedy_proof, "decode", wrong)


def test_a_wrong_token_is_no_tie(verifier: Verifier, make_draft, monkeypatch):
    """User report B71: it is far below the highest logit, by more than rounding can close."""
    exam = Exam(verifier, make_draft(), PROMPTS, SETTINGS)
    broken(monkeypatch, at=4)
    (check,) = prove_greedy(exam, 1, WAYS[:1])
    assert check.identical == 0 and not check.passed  # float32: nothing may differ
    answers = [one.tokens for one in decode(verifier, None, PROMPTS, SETTINGS).generations]
    allowed = tolerances(verifier, PROMPTS, answers)
    for one, rounded in zip(check.graded, allowed, strict=True):
        assert one.difference.position == 4 and one.tolerance == 0
        assert one.difference.behind > 100 * rounded


def test_bfloat16_is_graded_and_a_wrong_token_caught(
    section: VerifierSection, tmp_path: Path, make_draft, monkeypatch
):
    """User report B71: what rounding moves is a tie, and a token that no rounding gives is not."""
    rounded = Verifier.load(section, tmp_path, torch.device("cpu"), torch.bfloat16)
    exam = Exam(rounded, make_draft().to(torch.bfloat16), PROMPTS, SETTINGS)
    ways = [replace(one, batch=2) for one in WAYS[::2]]
    checks = prove_greedy(exam, 1, ways)
    assert all(one.passed for one in checks)
    assert all(one.tolerance > 0 for check in checks for one in check.graded)
    broken(monkeypatch, at=4)
    assert not any(one.passed for one in prove_greedy(exam, 1, ways))


def test_rounding_is_what_a_logit_may_be_off_by(verifier: Verifier, monkeypatch):
    """Answers of different lengths behind prompts of different lengths; then single steps alone."""
    answers = [[5, 6, 7, 8], [9], [10, 11, 12, 13, 14, 15]]
    assert all(0 < one < 1e-4 for one in rounding(verifier, PROMPTS, answers))  # float32
    own = verifier.logits_from

    def off(last: torch.Tensor) -> torch.Tensor:
        return own(last) + (0.25 if len(last) == 1 else 0.0)

    monkeypatch.setattr(verifier, "logits_from", off)
    assert rounding(verifier, PROMPTS[:1], answers[:1]) == [pytest.approx(0.25, abs=1e-4)]


def test_a_gap_of_twice_the_rounding_can_close_and_short_answers_get_the_usual(
    verifier: Verifier, monkeypatch
):
    seen = {4: 0.1, 1: 0.0, 6: 0.3}  # by length
    monkeypatch.setattr(
        greedy_proof, "rounding", lambda _v, _p, answers: [seen[len(one)] for one in answers]
    )
    assert tolerances(verifier, PROMPTS, [[1] * 4, [1], [1] * 6]) == [0.2, 0.2, 0.6]


def test_a_tie_is_between_the_tokens_that_were_emitted(verifier: Verifier):
    """Two highest logits a hair apart excuse neither a third token nor an end."""
    plain = decode(verifier, None, [PROMPTS[0]], SETTINGS).generations[0]
    text = torch.tensor([[*PROMPTS[0], *plain.tokens[:5]]])
    logits = verifier.logits_from(verifier.states(text).last[0, -1])
    first, second, third = logits.topk(3).indices.tolist()
    assert first == plain.tokens[5]

    def graded(tokens: list[int]) -> Graded:
        found = compare(verifier, PROMPTS[0], plain, replace(plain, tokens=tokens))
        assert found is not None
        return Graded(found, tolerance=1.0001 * found.gap)

    before, after = plain.tokens[:5], plain.tokens[6:]
    assert graded([*before, second, *after]).tie
    assert not replace(graded([*before, second, *after]), tolerance=0.0).tie
    assert not graded([*before, third, *after]).tie
    assert not graded(before).tie


def test_a_difference_is_located_with_its_gap(verifier: Verifier):
    plain = decode(verifier, None, [PROMPTS[0]], SETTINGS).generations[0]
    wrong = [*plain.tokens[:5], 99, *plain.tokens[6:]]
    found = compare(verifier, PROMPTS[0], plain, replace(plain, tokens=wrong), index=2)
    assert found is not None
    assert (found.prompt, found.position, found.plain) == (2, 5, plain.tokens[5])
    assert found.speculative == 99
    text = torch.tensor([[*PROMPTS[0], *plain.tokens[:5]]])
    logits = verifier.logits_from(verifier.states(text).last[0, -1])
    top = logits.topk(2).values
    assert found.gap == pytest.approx(float(top[0] - top[1]), abs=1e-5)
    assert found.behind == pytest.approx(float(top[0] - logits[99]), abs=1e-5)
    short = compare(verifier, PROMPTS[0], plain, replace(plain, tokens=plain.tokens[:4]))
    assert short is not None and (short.position, short.speculative) == (4, None)


# ---- the first token of a real verifier --------------------------------------------------------


def test_first_tokens_follow_the_verifier(verifier: Verifier, make_draft):
    """User report B73: 50,000 draws of each rule, from one forward's distributions."""
    found = prove_first_token(verifier, make_draft(vocab_size=60), PROMPTS[:2], draws=20_000)
    assert len(found) == 2 * len(FIRST_CASES) and all(one.as_expected for one in found)
    assert all(0 < one.accepted < 1 for one in found)
    caught = [one for one in found if one.control is Control.no_residual]
    assert len(caught) == 2 and not any(one.exact for one in caught)


def test_tokens_left_out_change_no_probability(verifier: Verifier, make_draft):
    """The tensors hold what either side can give, and the draft's tokens keep their places."""
    draft = make_draft(vocab_size=60)
    sides = sides_after(verifier, draft, PROMPTS[0])
    assert float(sides.target.sum()) == pytest.approx(1) == float(sides.drawn.sum())
    assert len(sides.target) < verifier.facts.vocab_size
    assert len(set(sides.target_ids.tolist())) == len(sides.drawn) == len(sides.ranked)
    spread = torch.zeros(len(sides.target)).index_add(0, sides.target_ids, sides.drawn)
    overlap = float(torch.minimum(sides.target, spread).sum())  # the chance of a guess to stand
    assert count_first(sides, AcceptRule.rejection, None, 20_000)[1] == pytest.approx(
        overlap, abs=4 * (0.25 / 20_000) ** 0.5
    )


def test_prompts_where_a_wrong_rule_shows_are_taken(verifier: Verifier, make_draft, monkeypatch):
    draft, prompts = make_draft(vocab_size=60), [*PROMPTS, [9, 8, 7], [100, 3, 50]]
    monkeypatch.setattr("eval.proof.first_token.PROMPTS", 2)
    found = prove_first_token(verifier, draft, prompts, draws=2000)
    chance = [chance_of_control(sides_after(verifier, draft, ids), 2000) for ids in prompts]
    best = sorted(range(len(prompts)), key=lambda i: chance[i])[:2]
    assert {one.prompt for one in found} == set(best)


def test_a_draft_that_is_the_verifier_gets_no_control(verifier: Verifier, make_draft, monkeypatch):
    """Its guesses all stand, so that no rule is wrong about what follows a rejection."""
    draft = make_draft()

    def alike(verifier_, draft_, prompt):
        sides = sides_after(verifier_, draft_, prompt)
        own = sides.target[sides.target_ids]
        return replace(sides, drawn=own / own.sum(), ranked=own.log())

    monkeypatch.setattr("eval.proof.first_token.sides_after", alike)
    found = prove_first_token(verifier, draft, PROMPTS[:2], draws=2000)
    assert len(found) == 2 * (len(FIRST_CASES) - 1) and all(one.as_expected for one in found)
    assert "no control: draft and verifier agree" in lossless.describe_first(found, 2000)[-1]


def test_a_verifier_without_a_choice_proves_nothing(verifier: Verifier, make_draft, monkeypatch):
    monkeypatch.setattr("eval.proof.first_token.SAMPLING", Sampling(temperature=1.0, top_k=1))
    assert prove_first_token(verifier, make_draft(), PROMPTS[:1], draws=100) == []
    assert "no prompt leaves the verifier a choice" in lossless.describe_first([], 100)[0]


# ---- the command -------------------------------------------------------------------------------


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
def little(monkeypatch):
    """Few cases and draws, and no second precision."""
    monkeypatch.setattr(lossless, "CASES", (CASES[0], CASES[-1]))
    monkeypatch.setattr(lossless, "QUICK_DRAWS", 5000)
    monkeypatch.setattr(lossless, "run_toy", lambda case, *_: run_toy(case, 1, 5000))


def test_command_takes_the_newest_run(run_folder: Path, little, capsys):
    assert newest_head(Path("runs")) == Path("runs/one/best")
    point = Path(shutil.copytree(run_folder, "runs/sweep/depth-3"))
    later = (run_folder / "best" / "draft.json").stat().st_mtime + 5
    os.utime(point / "best" / "draft.json", (later, later))
    assert newest_head(Path("runs")) == Path("runs/sweep/depth-3/best")
    assert lossless.main(["--quick", "--count", "2", "--new-tokens", "8"]) == 0
    printed = capsys.readouterr().out
    assert "2x2x2, batch 20: 2 of 2 prompts token-identical" in printed
    assert "exact" in printed and "biased" in printed and "UNEXPECTED" not in printed
    assert printed.splitlines()[-1].startswith("PROVED")


def test_the_whole_command_grades_bfloat16(run_folder: Path, little, capsys, monkeypatch):
    monkeypatch.setattr(lossless, "DRAWS", 5000)
    assert lossless.main(["--count", "1", "--new-tokens", "6", "--shapes", "2", "1x2"]) == 0
    printed = capsys.readouterr().out
    assert "float32, 1x2, batch 20" in printed and "bfloat16, 2, batch 20" in printed


def test_command_takes_any_exported_head(run_folder: Path, little, capsys, tiny_verifier: Path):
    """Inside a run and, with --verifier, far from any."""
    exported = run_folder / "export" / "vllm"
    cfg = load_saved(run_folder / "config.yaml")
    export_head(cfg, run_folder / "best", exported, dtype=Precision.float32)
    assert lossless.main([str(exported), "--quick", "--new-tokens", "4"]) == 0
    alone = Path(shutil.copytree(exported, "elsewhere"))
    with pytest.raises(ConfigError, match="its verifier is unknown; give it with --verifier"):
        lossless.main([str(alone)])
    words = [str(alone), "--verifier", str(tiny_verifier), "--quick", "--new-tokens", "4"]
    with pytest.raises(ConfigError, match="names no prompts; give some with --prompts"):
        lossless.main(words)
    assert lossless.main([*words, "--prompts", "prompts.jsonl"]) == 0
    said = capsys.readouterr().out
    assert "3 of 3 prompts token-identical" in said and "assumed" not in said


def test_a_head_that_says_little_is_examined(run_folder: Path, capsys, tiny_verifier: Path):
    """No flag, no layer ids: what an engine would take is taken, and said."""
    exported = run_folder / "export" / "vllm"
    cfg = load_saved(run_folder / "config.yaml")
    export_head(cfg, run_folder / "best", exported, dtype=Precision.float32)
    folder = Path(shutil.copytree(exported, "published"))
    whole = json.loads((folder / "config.json").read_text())
    ids = "eagle_aux_hidden_state_layer_ids"
    dropped = (ids, "eagle_config", "norm_output", "fc_norm", "rope_parameters")
    kept = {key: value for key, value in whole.items() if key not in dropped}
    (folder / "config.json").write_text(json.dumps(kept))
    words = [str(folder), "--verifier", str(tiny_verifier), "--prompts", "prompts.jsonl"]
    exam = examine(lossless.parse(words), torch.float32)
    said = capsys.readouterr().out
    ours = load_draft(run_folder / "best", exam.verifier.device, torch.float32).state_dict()
    theirs = exam.draft.state_dict()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
    assert f"{ids} is not in config.json: [2, 4, 5] is assumed" in said
    assert "fc_norm, norm_output not in config.json: false is assumed" in said


def test_a_run_of_another_version_needs_a_verifier(
    run_folder: Path, little, capsys, tiny_verifier: Path
):
    config = run_folder / "config.yaml"
    config.write_text(config.read_text() + "\nnonsense:\n  batch_size: 8\n")
    words = [str(run_folder / "best"), "--quick", "--new-tokens", "4"]
    with pytest.raises(ConfigError, match=r"config\.yaml: not of this version .*nonsense.*give"):
        lossless.main(words)
    words += ["--verifier", str(tiny_verifier), "--prompts", "prompts.jsonl"]
    assert lossless.main(words) == 0
    printed = capsys.readouterr().out
    assert "is not of this version and not used" in printed
    assert "3 of 3 prompts token-identical" in printed


def test_command_fails_on_a_difference(run_folder: Path, little, capsys, monkeypatch):
    broken(monkeypatch, at=5)
    prompts = str(run_folder.parent.parent / "prompts.jsonl")
    arguments = [str(run_folder / "best"), "--prompts", prompts, "--new-tokens", "6", "--quick"]
    assert lossless.main(arguments) == 1
    printed = capsys.readouterr().out
    assert "0 of 3 prompts token-identical" in printed and "token 5" in printed
    assert "NO TIE" in printed and printed.splitlines()[-1].startswith("FAILED")


def test_command_fails_when_a_control_passes(run_folder: Path, little, capsys, monkeypatch):
    monkeypatch.setattr(lossless, "run_toy", lambda case, *_: run_toy(case, 1, 2))
    assert lossless.main(["--quick", "--count", "1", "--new-tokens", "2"]) == 1
    assert "UNEXPECTED" in capsys.readouterr().out


def test_command_leaves_out_what_the_template_refuses(
    run_folder: Path, little, capsys, tiny_verifier: Path
):
    """One prompt of three is refused; the others are compared."""
    folder = shutil.copytree(tiny_verifier, run_folder / "verifier")
    template = folder / "chat_template.jinja"
    guard = "{% if 'Say 1' in messages[0]['content'] %}{{ raise_exception('not this') }}{% endif %}"
    template.write_text(guard + template.read_text())
    config = run_folder / "config.yaml"
    config.write_text(config.read_text().replace(str(tiny_verifier), str(folder)))
    assert lossless.main(["--quick", "--new-tokens", "4"]) == 0
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


@pytest.mark.parametrize(
    ("file", "content", "sentence"),
    [
        ("draft.json", "{", r"draft\.json: not a draft of this version"),
        ("draft.json", "[]", r"draft\.json: not a draft of this version"),
        ("draft.json", "half", r"draft\.json: hidden_size='64': must be of kind int"),
        ("draft.safetensors", "x", r"not the weights of its draft\.json"),
        ("config.json", "{", r"config\.json: not JSON"),
        ("config.json", "{}", r"config\.json: hidden_size, .* missing; give a folder as it was"),
    ],
)
def test_damaged_heads_are_one_sentence(
    run_folder: Path, tiny_verifier: Path, file: str, content: str, sentence: str
):
    head = run_folder / "best"
    if file == "config.json":
        head = run_folder / "export" / "vllm"
        cfg = load_saved(run_folder / "config.yaml")
        export_head(cfg, run_folder / "best", head, dtype=Precision.float32)
    whole = (head / file).read_bytes()
    if content == "half":
        content = whole.decode().replace('"hidden_size": 64', '"hidden_size": "64"')
    (head / file).write_text(content)
    words = [str(head), "--verifier", str(tiny_verifier), "--prompts", "prompts.jsonl"]
    with pytest.raises(ConfigError, match=sentence):
        lossless.main(words)


def test_a_head_of_another_width_is_refused_by_name(run_folder: Path, verifier: Verifier):
    exported = run_folder / "export" / "vllm"
    cfg = load_saved(run_folder / "config.yaml")
    export_head(cfg, run_folder / "best", exported, dtype=Precision.float32)
    with pytest.raises(ConfigError, match=r"for 128 tokens of width 64, .* has 128 of width 32"):
        read_head(exported, replace(verifier.facts, hidden_size=32), verifier.ends)


def test_a_run_and_one_precision_may_be_named(run_folder: Path, little, capsys):
    words = ["--dtype", "bfloat16", "--quick", "--new-tokens", "4", "--shapes", "2"]
    assert lossless.main([str(run_folder), *words]) == 0
    printed = capsys.readouterr().out
    assert f"head: {run_folder}/best" in printed
    assert "greedy, bfloat16, 2, batch 20" in printed and "float32" not in printed


def test_bad_heads_and_shapes_name_the_way_out(run_folder: Path, tmp_path: Path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"holds no head, neither draft\.json nor"):
        lossless.main([str(tmp_path / "empty")])
    with pytest.raises(ConfigError, match="--shapes=2xx: no shape of guesses"):
        lossless.main(["--shapes", "2xx"])
