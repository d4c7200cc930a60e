"""Entry: turn a trained head into a folder that an engine serves, or check such a folder.

python -m launch.export runs/demo/best --to vllm
python -m launch.export --check runs/demo/export/vllm [--to sglang]
"""

import sys
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

from conf.compose import load_saved, sentence_on_error
from conf.rules import licence_fault
from conf.runtime import say
from conf.schema import ConfigError, ExportFormat, Precision, RunConfig
from data.origin import data_facts
from data.prepare import find_prepared
from eval.parser import Parser
from launch.alignment import wiring_findings
from models.draft_file import CONFIG
from models.export.card import DataFacts
from models.export.check import check
from models.export.check_verifier import holds_embedding
from models.export.engines import LAYOUTS
from models.export.layout import Layout
from models.export.medusa import is_medusa
from models.export.medusa_check import check_medusa
from models.export.read_eagle1 import is_eagle1_folder
from models.export.small_model import check_model
from models.export.vllm import VLLM
from models.export.write import export_head
from models.model_folder import is_model_folder


def parser() -> Parser:
    words = Parser(prog="python -m launch.export", description="Export a draft head, or check one.")
    words.add_argument("head", nargs="?", type=Path, help="a trained head: runs/NAME/best")
    formats = [kind.value for kind in ExportFormat]
    words.add_argument(
        "--to",
        nargs="+",
        choices=formats,
        help="engines; default: vllm, with --check as it is written",
    )
    words.add_argument(
        "--out",
        type=Path,
        help="folder to write; with several engines, the one above",
    )
    words.add_argument("--licence", help="for the card, as hubs spell it: apache-2.0")
    words.add_argument(
        "--dtype",
        choices=[kind.value for kind in Precision],
        default=Precision.bfloat16.value,
        help="precision of the written weights (default: %(default)s)",
    )
    words.add_argument("--check", type=Path, metavar="DIR", help="judge an exported folder instead")
    words.add_argument(
        "--verifier",
        type=Path,
        metavar="DIR",
        help="with --check: also compare with this verifier, and try the head on its answers",
    )
    return words


def main(argv: list[str] | None = None) -> int:
    """Exit code: 0, or 1 when --check finds something. Bad input ends with one sentence and 2."""
    words = parser()
    chosen = words.parse_args(argv)
    if (chosen.head is None) == (chosen.check is None):
        words.error("give the folder of a head to export, or --check and an exported folder")
    with sentence_on_error():
        if chosen.check is not None:
            layouts = [LAYOUTS[ExportFormat(kind)] for kind in chosen.to or []]
            found = [judge(chosen.check, chosen.verifier, layout) for layout in layouts or [None]]
            return max(found)
        export_all(chosen)
    return 0


def judge(folder: Path, verifier: Path | None, layout: Layout | None) -> int:
    """Print what ``check`` finds for one engine, the folder's own where none is named."""
    if not folder.is_dir():
        raise ConfigError(f"--check {folder}: no such folder; give one that launch.export wrote")
    findings, compared = examined(folder, verifier, layout)
    engine = f" for {layout.engine}" if layout else ""
    if verifier is not None and not compared:
        findings = [*findings, *beside_verifier(folder, verifier, bool(findings))]
    for finding in findings:
        say(finding)
    if not findings:
        say(f"{folder}: in order{engine}, nothing found")
        if verifier is None and not compared and holds_embedding(folder):
            say("its embedding was not compared: --verifier DIR names the verifier's folder")
    return 1 if findings else 0


def examined(folder: Path, verifier: Path | None, layout: Layout | None) -> tuple[list[str], bool]:
    """Findings of the family's own check, and whether that has compared all it can with the
    verifier: an EAGLE head's states and embedding are compared apart."""
    if layout in (None, VLLM) and is_medusa(folder):
        return check_medusa(folder, verifier), True
    if layout in (None, VLLM) and is_model_folder(folder):
        return check_model(folder, verifier), True
    return check(folder, verifier, layout), False


def beside_verifier(folder: Path, verifier: Path, found: bool) -> list[str]:
    """What the head's guesses show. A head that cannot be run is the finding that was ``found``."""
    if is_eagle1_folder(folder):
        say("an EAGLE-1 head reads the last layer alone: other layer ids were not tried")
        return []
    try:
        return wiring_findings(folder, verifier)
    except ConfigError as refusal:
        if not found:
            raise
        say(f"layer ids and rotary base were not tried: {refusal}")
        return []


def export_all(chosen: Namespace) -> None:
    """Export the head for each engine, with what its run's folder tells about it."""
    head = chosen.head
    if not (head / CONFIG).is_file():
        raise ConfigError(
            f"{head}: is no head, there is no {CONFIG}; give runs/<name>/best, written by training"
        )
    cfg = load_saved(head.parent / "config.yaml")
    if chosen.licence:
        fault = licence_fault(chosen.licence)
        if fault:
            raise ConfigError(f"--{fault}")
        cfg = replace(cfg, export=replace(cfg.export, licence=chosen.licence))
    data, dtype = known_data(cfg), Precision(chosen.dtype)
    kinds = [ExportFormat(kind) for kind in chosen.to or [ExportFormat.vllm.value]]
    parent = chosen.out or head.parent / "export"
    for kind in kinds:
        folder = chosen.out if chosen.out and len(kinds) == 1 else parent / kind.value
        export_head(cfg, head, folder, data, dtype, LAYOUTS[kind])


def known_data(cfg: RunConfig) -> DataFacts | None:
    """What the head was trained on, if the prepared data is still there."""
    try:
        prepared = find_prepared(cfg)
    except ConfigError as error:
        say(f"the card will not say how much data it was: {error}")
        return None
    return data_facts(cfg, prepared)


if __name__ == "__main__":
    sys.exit(main())
