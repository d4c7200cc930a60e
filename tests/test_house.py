"""The rules of the house that a machine can check: imports, owners, names, sizes, leaks."""

import ast
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ["conf", "models", "data", "eval", "train", "launch"]  # each imports those before it
OWNERS = {
    "deepspeed": {"train/engine.py"},
    "torch.distributed": {"data/distributed.py", "train/engine.py"},
    "wandb": {"train/metrics.py"},
    "datasets": {"data/tables.py"},
    "fsspec": {"data/store.py"},
    "flash_attn": {"models/kernels.py"},
    "matplotlib": {"eval/plots.py"},
    "hydra": {"conf/compose.py", "launch/sweep.py"},
}
LONG_FUNCTIONS = {
    "train/loop.py:fit": 100,  # the table of contents of training
    "eval/summary.py:build_report": 50,  # a line a figure
}
MAX_FILE, MAX_FUNCTION = 300, 40
LEAKS = {
    "a path of one machine": r"(?<![\w.])/(work|tmp/w|root|home/\w+)/",
    "a package registry's host": r"(pypi|pythonhosted|npmjs|debian)\.(org|net|com)",
}

SOURCES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def imported_modules(path: Path) -> list[tuple[str, int]]:
    """(module, line) of every import, inside functions too; ``from a import b`` counts as a.b."""
    found = []
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            found += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            found += [(f"{base}.{alias.name}", node.lineno) for alias in node.names]
        elif isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.distributed":
            found.append(("torch.distributed", node.lineno))  # reachable by ``import torch`` alone
    return found


def committed_files() -> list[Path]:
    """Files that git tracks or would track; all text but the data."""
    listing = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if listing.returncode:
        pytest.skip("not a git checkout")
    binary = {".png", ".safetensors", ".jsonl"}
    paths = [ROOT / line for line in listing.stdout.splitlines()]
    return [path for path in paths if path.is_file() and path.suffix not in binary]


def test_imports_point_one_way():
    wrong = []
    for path in SOURCES:
        own = FOLDERS.index(path.relative_to(ROOT).parts[0])
        for module, line in imported_modules(path):
            top = module.split(".")[0]
            if top == "" or (top in FOLDERS and FOLDERS.index(top) > own):
                wrong.append(f"{name_of(path)}:{line} imports {module}")
    assert not wrong


@pytest.mark.parametrize("package", OWNERS)
def test_heavy_packages_have_one_owner(package: str):
    wrong = []
    for path in SOURCES:
        for module, line in imported_modules(path):
            if f"{module}.".startswith(f"{package}.") and name_of(path) not in OWNERS[package]:
                wrong.append(f"{name_of(path)}:{line} imports {module}")
    assert not wrong


def test_eval_the_builtin_stays_whole():
    """``import eval.x`` binds the name eval in that file; only ``from eval.x import y`` is safe."""
    wrong = []
    for path in [*SOURCES, *(ROOT / "tests").rglob("*.py")]:
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Import):
                tops = {alias.name.split(".")[0] for alias in node.names}
                wrong += [f"{name_of(path)}:{node.lineno}"] if "eval" in tops else []
    assert not wrong


def test_no_file_is_named_after_another_module():
    """A script's folder comes first on the path, so train/logging.py would shadow the library."""
    taken = set(sys.stdlib_module_names) | set(metadata.packages_distributions()) - set(FOLDERS)
    taken -= {"tests"}  # some distributions install a package of that name by mistake
    assert not [name_of(path) for path in SOURCES if path.stem in taken]


def test_tests_have_no_packages():
    """An __init__.py under tests/data would make ``import data`` mean that folder."""
    assert not list((ROOT / "tests").rglob("__init__.py"))


@pytest.mark.parametrize("leak", LEAKS)
def test_nothing_points_outside(leak: str):
    pattern = re.compile(LEAKS[leak])
    found = []
    for path in committed_files():
        if path == Path(__file__):
            continue
        for number, line in enumerate(path.read_text().splitlines(), start=1):
            if pattern.search(line):
                found.append(f"{name_of(path)}:{number}: {line.strip()}")
    assert not found


def test_files_are_short():
    sizes = {name_of(path): len(path.read_text().splitlines()) for path in SOURCES}
    assert not {name: size for name, size in sizes.items() if size > MAX_FILE}


def test_functions_are_short():
    long = {}
    for path in SOURCES:
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                key = f"{name_of(path)}:{node.name}"
                size = (node.end_lineno or node.lineno) - node.lineno + 1
                if size > LONG_FUNCTIONS.get(key, MAX_FUNCTION):
                    long[key] = size
    assert not long


def test_every_module_says_what_it_owns():
    modules = [path for path in SOURCES if path.name != "__init__.py"]
    assert not [name_of(path) for path in modules if not ast.get_docstring(tree_of(path))]


def test_packaging_lists_every_package():
    """An editable install hides a forgotten package; a built one would lack it."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = {path.parent.relative_to(ROOT).as_posix() for path in SOURCES}
    listed = settings["tool"]["setuptools"]["packages"]
    assert {name.replace("/", ".") for name in packages} == set(listed)
