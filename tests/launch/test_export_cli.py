"""python -m launch.export: a run's head becomes a folder, and a broken folder an exit code."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from conf.compose import load_config, to_yaml
from conf.schema import DraftSection, VerifierSection
from data.prepare import prepare
from launch import alignment
from launch.export import main
from models.draft_file import save_draft
from models.eagle3 import DraftConfig, Eagle3Draft
from models.verifier import load_facts
from models.vocab import DraftVocab

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def run(tmp_path: Path, tiny_verifier: Path) -> Path:
    """The folder of a run with a random head, as train/main.py leaves it."""
    answer = {"role": "assistant", "content": "yes"}
    rows = [{"messages": [{"role": "user", "content": f"{i}?"}, answer]} for i in range(30)]
    data = tmp_path / "answers.jsonl"
    data.write_text("\n".join(json.dumps(row) for row in rows))
    cfg = load_config(
        [
            f"verifier.path={tiny_verifier}",
            "verifier.aux_layers=null",
            "data=jsonl",
            f"data.path={data}",
            f"run.cache={tmp_path / 'cache'}",
            f"run.root={tmp_path}",
            "run.name=run",
            "stages=[prepare,export]",
        ]
    )
    prepare(cfg)
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.yaml").write_text(to_yaml(cfg))
    facts = load_facts(VerifierSection(path=str(tiny_verifier)), tmp_path)
    draft = Eagle3Draft(DraftConfig.of(DraftSection(vocab_size=32, fc_norm=True), facts))
    vocab = DraftVocab.from_counts(torch.arange(facts.vocab_size), 32)
    draft.d2t.copy_(vocab.d2t)
    draft.t2d.copy_(vocab.t2d)
    save_draft(folder / "best", draft.config, draft.state_dict())
    return folder


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """The one sentence on standard error, once the exit code has proved to be 2."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        main(list(argv))
    assert ended.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1, lines
    return lines[0]


def test_a_head_of_other_tokens(run: Path, capsys):
    """As when the files at verifier.path were replaced since the training."""
    (run / "best" / "tokens.json").write_text(json.dumps(["<|unk|>", "<|other|>"]))
    said = refused(capsys, str(run / "best"))
    assert "token 1 is '<|im_start|>'" in said and "trained with '<|other|>' there" in said


def test_export_writes_the_folder_and_says_how_to_serve_it(run, capsys, tiny_verifier):
    assert main([str(run / "best"), "--to", "vllm"]) == 0
    folder = run / "export" / "vllm"
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith(f"vllm serve {tiny_verifier} --speculative-config '{{")
    assert str(folder) in last
    config = json.loads((folder / "config.json").read_text())
    assert config["torch_dtype"] == "bfloat16"
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]
    card = (folder / "README.md").read_text()
    assert last in card
    assert "not measured" in card
    samples = int(card.split("- samples: ")[1].split(";")[0])
    assert 25 <= samples < 30  # some are held out


def test_a_head_that_learnt_nothing_is_in_order_and_not_decided(
    run, capsys, tiny_verifier, monkeypatch
):
    assert main([str(run / "best")]) == 0
    monkeypatch.setattr(alignment, "TALKS", 2)
    monkeypatch.setattr(alignment, "NEW_TOKENS", 8)
    folder = run / "export" / "vllm"
    assert main(["--check", str(folder), "--verifier", str(tiny_verifier)]) == 0
    said = capsys.readouterr().out
    assert "layer_ids=[2, 4, 5]: not decided" in said and said.endswith("nothing found\n")


def test_dtype_and_out_are_heeded(run, tmp_path):
    out = tmp_path / "elsewhere"
    assert main([str(run / "best"), "--dtype", "float32", "--out", str(out)]) == 0
    ours = load_file(run / "best" / "draft.safetensors")
    theirs = load_file(out / "model.safetensors")
    assert all(torch.equal(tensor, ours[name]) for name, tensor in theirs.items())
    assert not (run / "export").exists()


def test_without_its_data_the_card_says_less(run, capsys, tmp_path):
    (tmp_path / "answers.jsonl").write_text("{}")
    assert main([str(run / "best")]) == 0
    assert "the card will not say" in capsys.readouterr().out
    assert "samples: not recorded" in (run / "export" / "vllm" / "README.md").read_text()


def test_check_prints_findings_and_ends_with_1(run, capsys):
    main([str(run / "best")])
    path = run / "export" / "vllm" / "model.safetensors"
    rest = {k: t for k, t in load_file(path).items() if k not in ("d2t", "fc.weight")}
    save_file(rest, path, metadata={"format": "pt"})
    capsys.readouterr()
    assert main(["--check", str(path.parent)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert "d2t missing" in lines[0]
    assert "fc.weight missing" in lines[1]


def test_an_embedding_is_not_compared_in_silence(run, capsys):
    main([str(run / "best"), "--dtype", "float32"])
    path = run / "export" / "vllm" / "model.safetensors"
    embedding = load_file(run / "best" / "draft.safetensors")["embed_tokens.weight"]
    save_file(load_file(path) | {"embed_tokens.weight": embedding}, path, {"format": "pt"})
    capsys.readouterr()
    assert main(["--check", str(path.parent)]) == 0
    assert "embedding was not compared" in capsys.readouterr().out


def test_bad_input_is_one_sentence(run, capsys, tmp_path):
    assert "--help shows the options" in refused(capsys)
    assert "--help" in refused(capsys, str(run / "best"), "--check", str(run))
    assert "invalid choice: 'tensorrt'" in refused(capsys, str(run / "best"), "--to", "tensorrt")
    assert "is no head" in refused(capsys, str(tmp_path / "nothing"))
    two_lines = refused(capsys, str(run / "best"), "--licence", "a: b\n---")
    assert two_lines.startswith("--licence=") and "one word" in two_lines
    assert "no such folder" in refused(capsys, "--check", str(tmp_path / "nothing"))
    assert "draft.json" in refused(capsys, make(run / "new"))
    lonely = make(tmp_path / "a" / "best")
    (Path(lonely) / "draft.json").write_text("{}")
    assert "config.yaml" in refused(capsys, lonely)
    main([str(run / "best")])
    assert "holds no config.json" in refused(
        capsys, "--check", str(run / "export" / "vllm"), "--verifier", str(tmp_path)
    )
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("...")
    words = refused(capsys, str(run / "best"), "--out", str(tmp_path / "full"))
    assert "holds something else" in words
    assert (tmp_path / "full" / "thesis.tex").is_file()


def make(folder: Path) -> str:
    folder.mkdir(parents=True)
    return str(folder)


def test_it_runs_as_a_module():
    words = [sys.executable, "-m", "launch.export", "--check", "no/such/folder"]
    ended = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert ended.stderr.splitlines()[-1].startswith("--check no/such/folder: no such folder")


def test_several_engines_at_once(run, tmp_path, capsys):
    out = tmp_path / "heads"
    assert main([str(run / "best"), "--to", "vllm", "speculators", "--out", str(out)]) == 0
    assert sorted(path.name for path in out.iterdir()) == ["speculators", "vllm"]
    said = capsys.readouterr().out
    assert f"vllm serve {out / 'speculators'}" in said
    assert main(["--check", str(out / "vllm"), "--to", "vllm", "sglang"]) == 0
    assert main(["--check", str(out / "vllm"), "--to", "vllm", "llamacpp"]) == 1  # fc_norm


@pytest.mark.parametrize("content", ["5", "[]", "\xff"])
def test_a_run_whose_configuration_is_none(run, capsys, content):
    (run / "config.yaml").write_bytes(content.encode("latin-1"))
    assert "config.yaml" in refused(capsys, str(run / "best"))
