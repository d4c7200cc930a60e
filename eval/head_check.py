"""Whether a verifier is the one a head was trained on: its tokens, and its weights."""

from pathlib import Path

from conf.compose import load_saved
from conf.runtime import cache_dir
from conf.schema import ConfigError, RunConfig, VerifierSection
from data.manifest import Manifest, manifest_file, read_manifest
from models.bundled import SCHEME, known_wheel, resolve
from models.draft_file import CONFIG, read_config
from models.drafts import AnyConfig
from models.eagle3 import DraftConfig
from models.export.check_verifier import learnt_weights
from models.token_strings import refuse_other_tokens
from models.verifier import load_tokenizer, weights_fingerprint


def check_verifier(head: Path, verifier: str) -> str:
    """Compare ``verifier`` with the head in ``head``; what was compared, in a sentence.

    Raises ConfigError when it has other tokens or other weights than the one trained on, or when
    it cannot be read.
    """
    if not (head / CONFIG).is_file():
        raise ConfigError(
            f"--verifier={verifier}: no head in {head} to compare it with; give the report of a "
            "run whose best/ folder is there"
        )
    saved = head.parent / "config.yaml"
    cfg = load_saved(saved)
    cache = cache_dir(cfg)
    refuse_other_tokens(head, load_tokenizer(VerifierSection(path=verifier), cache))
    theirs = weights_fingerprint(resolve(verifier, cache))
    ours = trained_weights(cfg)
    if not ours:
        return (
            f"{verifier}: no capture of the training is left in {cache}, so its weights "
            f"({theirs}) were not compared."
        )
    if theirs not in ours:
        raise ConfigError(
            f"--verifier={verifier}: its weights ({theirs}) are not those that the head learnt "
            f"from ({', '.join(sorted(ours))}, {cfg.verifier.path}), and acceptance measured with "
            "those does not hold; serve that revision, or train a head for this one"
        )
    return f"{verifier}: the weights ({theirs}) that the head was trained on."


def other_weights(cfg: RunConfig) -> str | None:
    """The verifier's fingerprint and those learnt from, in words, where it is none of them.

    A head of the run learnt from its captures, one in ``eval.head`` from what its export names.
    """
    if cfg.eval.head is None:
        ours = trained_weights(cfg)
    else:
        ours = {named for named in [learnt_weights(Path(cfg.eval.head))] if named}
    theirs = weights_fingerprint(resolve(cfg.verifier.path, cache_dir(cfg)))
    return f"{theirs}, not {', '.join(sorted(ours))}" if ours and theirs not in ours else None


def trained_weights(cfg: RunConfig) -> set[str]:
    """Fingerprints in the captures of this run's verifier and layers; empty when none is left."""
    found: set[str] = set()
    for folder in cache_dir(cfg).glob("capture-*"):
        if manifest_file(folder).is_file():
            manifest = read_manifest(folder)
            if is_of(manifest, cfg):
                found.add(manifest.verifier)
    return found


def is_of(manifest: Manifest, cfg: RunConfig) -> bool:
    layers = cfg.verifier.aux_layers
    counted = layers is None or min(layers) < 0  # by the number of layers, which is not known here
    same = counted or layers == manifest.aux_layers
    return manifest.verifier_path == cfg.verifier.path and same


def is_eagle3(head: Path) -> bool:
    """Whether the head in ``head`` is one; those that others published are."""
    return not (head / CONFIG).is_file() or isinstance(read_config(head), DraftConfig)


def head_config(head: Path) -> AnyConfig | None:
    """Of the draft in ``head``; None where there is none."""
    return read_config(head) if (head / CONFIG).is_file() else None


def served_verifier(run: Path, named: str) -> str:
    """What an engine can open: the converted folder of a wheel, where it is there."""
    config = run / "config.yaml"
    if not named.startswith(SCHEME) or not config.is_file():
        return named
    folder = cache_dir(load_saved(config)) / "verifiers" / known_wheel(named).folder
    return str(folder) if folder.is_dir() else named
