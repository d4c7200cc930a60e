"""The container recipe, by a small reader of our own: everything pinned, nothing said twice apart.

The image itself is not built by a test: that takes a GPU machine's disk and an hour.
"""

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "launch" / "container" / "Dockerfile"
INDEX = "https://download.pytorch.org/whl/"


@dataclass(frozen=True)
class Instruction:
    name: str
    text: str


def instructions(text: str) -> list[Instruction]:
    """Comments dropped, continued lines joined."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    found = [line.split(None, 1) for line in joined.splitlines() if line.strip()]
    return [Instruction(words[0], words[1]) for words in found]


def pins(text: str) -> dict[str, str]:
    return dict(re.findall(r"(?<![\w.-])([A-Za-z][\w.-]*)==([\w.+]+)", text))


def faults(text: str) -> list[str]:
    """What is wrong with a recipe, in words."""
    found = ["latest: moves"] if re.search(r":latest|FROM [^:\n]+$", text, re.M) else []
    for one in instructions(text):
        tag = one.text.split()[0].partition(":")[2]
        if one.name == "FROM" and not re.match(r"\d+\.\d+\.\d+-", tag):
            found.append(f"FROM {one.text}: no exact version")
        if one.name == "RUN":
            found += faults_of_a_command(one.text)
    return found


def faults_of_a_command(text: str) -> list[str]:
    constraints = pins((ROOT / "launch" / "constraints.txt").read_text())
    found = [
        f"{name}=={version}: launch/constraints.txt has {constraints[name]}"
        for name, version in pins(text).items()
        if constraints.get(name, version) != version
    ]
    for command in re.findall(r"pip install ([^&|;]+)", text):
        if "-c launch/constraints.txt" not in command:
            found.append(f"pip install {command}: without the constraints")
        if "flash-attn" in command and "--no-build-isolation" not in command:
            found.append("flash-attn: its isolated build sees no torch")
    hosts = re.findall(r"https?://\S+", text)
    return found + [f"{host}: another index" for host in hosts if not host.startswith(INDEX)]


def test_the_recipe_is_in_order():
    assert faults(RECIPE.read_text()) == []


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("nvidia/cuda:13.0.1-devel-ubuntu24.04", "nvidia/cuda:latest"),
        ("nvidia/cuda:13.0.1-devel-ubuntu24.04", "nvidia/cuda"),
        ("torch==2.13.0", "torch==2.12.0"),
        ("--no-build-isolation -c launch/constraints.txt", "-c launch/constraints.txt"),
        ("--no-cache-dir -c launch/constraints.txt -e .", "-e ."),
        (INDEX, "https://example.org/whl/"),
    ],
)
def test_the_reader_sees_what_is_wrong(old: str, new: str):
    text = RECIPE.read_text()
    assert old in text and faults(text.replace(old, new))


def test_every_version_is_said_once_or_alike():
    """flash-attn in pyproject's comment, torch in setup.sh, and CUDA in image and index."""
    text = RECIPE.read_text()
    recipe = pins(text)
    for path in (ROOT / "pyproject.toml", ROOT / "README.md"):
        assert pins(path.read_text())["flash-attn"] == recipe["flash-attn"], path
    setup = re.search(r"^TORCH=(\S+)", (ROOT / "launch" / "setup.sh").read_text(), re.M)
    assert setup is not None and setup[1] == recipe["torch"]
    image = re.search(r"cuda:(\d+)\.(\d+)\.", text)
    assert image is not None and f"{INDEX}cu{image[1]}{image[2]}" in text


def test_the_python_of_the_image_is_one_that_was_tested():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    version = re.search(r"python(3\.\d+)-venv", RECIPE.read_text())
    assert version is not None
    assert any(line.endswith(f":: {version[1]}") for line in settings["project"]["classifiers"])


def test_torch_comes_before_what_is_built_against_it():
    text = "\n".join(one.text for one in instructions(RECIPE.read_text()))
    order = [text.index(mark) for mark in ("torch==", "flash-attn==", "-e .")]
    assert order == sorted(order)


def test_the_job_gets_the_environment_of_all_jobs():
    (entry,) = [one for one in instructions(RECIPE.read_text()) if one.name == "ENTRYPOINT"]
    assert "source launch/environment.sh" in entry.text and 'exec \\"$@\\"' in entry.text


def test_runs_and_caches_stay_out_of_the_image():
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert {".git", ".venv", "cache", "runs"} <= set(ignored)
