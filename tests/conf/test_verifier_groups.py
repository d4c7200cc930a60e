"""Every shipped verifier composes, says what it is for, and which layers it will give."""

from pathlib import Path

import pytest

from conf.compose import load_config
from conf.schema import Precision

FOLDER = Path(__file__).resolve().parents[2] / "conf" / "verifier"
LAYERS = {
    "smollm2_135m": 30,
    "llama3_1_8b": 32,
    "llama3_3_70b": 80,
    "qwen3_8b": 36,
    "qwen3_32b": 64,
}


def test_all_groups_are_known_here():
    assert {path.stem for path in FOLDER.glob("*.yaml")} == set(LAYERS)


@pytest.mark.parametrize("name", LAYERS)
def test_a_verifier_group_composes(name):
    cfg = load_config([f"verifier={name}", "data=jsonl", "data.path=x", "stages=[train]"])
    assert cfg.verifier.aux_layers is None  # or verifier.path=another would keep these ids
    assert cfg.verifier.dtype is Precision.bfloat16
    assert "/" in cfg.verifier.path or cfg.verifier.path.startswith("wheel:")


@pytest.mark.parametrize("name", LAYERS)
def test_a_verifier_group_begins_with_its_purpose(name):
    text = (FOLDER / f"{name}.yaml").read_text()
    head = text[: text.index("path:")]
    assert all(line.startswith("# ") for line in head.splitlines())
    assert f"verifier={name}" in head
    count = LAYERS[name]
    assert f"{count} layers" in head
    assert f"here {[2, count // 2, count - 3]}" in text


@pytest.mark.parametrize("name", [name for name in LAYERS if name.startswith("qwen3")])
def test_the_override_in_the_comment_works(name):
    text = (FOLDER / f"{name}.yaml").read_text()
    word = next(w for w in text.split() if "enable_thinking" in w)
    cfg = load_config([f"verifier={name}", "data=jsonl", "data.path=x", "stages=[train]", word])
    assert cfg.data.template_kwargs == {"enable_thinking": False}
