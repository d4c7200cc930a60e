"""The manifest of a hidden-state cache: what its shards hold, and whether they are all there."""

import json
from dataclasses import dataclass, field
from pathlib import Path

from conf.runtime import plain, write_atomically
from conf.schema import ConfigError, StateDtype

FORMAT_VERSION = 2
AUX_MEANING = "residual stream after n decoder layers, n ascending, concatenated"
LAST_MEANING = "state after the final norm"


@dataclass(frozen=True)
class ShardEntry:
    """One shard file as the manifest knows it."""

    name: str
    samples: int
    tokens: int
    asking: int  # rows whose next token is supervised: they keep last, argmax and lse
    supervised: int  # tokens under the loss mask
    agreed: int  # of them: how many are the verifier's own greedy choice
    bytes: int
    sha256: str
    index: str  # digest of its header and small tensors, compared whenever it is opened

    @property
    def number(self) -> int:
        """By which shards are ordered: a name sorts wrongly from 100,000 shards on."""
        return int(self.name.partition(".")[0])


@dataclass(frozen=True)
class Manifest:
    """``manifest.json``. It is written last: a cache without it is not complete."""

    format_version: int
    fingerprint: str  # of the capture: everything below that decides the states
    verifier: str  # weights_fingerprint of the verifier
    verifier_path: str  # as the user gave it, for messages
    verifier_dtype: str  # what the verifier computed in
    prepared: str  # fingerprint of the prepared samples
    tokenizer: str  # tokenizer_fingerprint
    template: str  # fingerprint of the chat template and its arguments
    dtype: str  # of aux and last
    hidden_size: int
    aux_layers: list[int]
    backend: str  # capture.backend that computed the states, or the last of them
    dump: str  # of backend=dumped: digest of its files (see data/dumped.py); else empty
    aux_meaning: str = AUX_MEANING
    last_meaning: str = LAST_MEANING
    shards: list[ShardEntry] = field(default_factory=list)

    @property
    def source(self) -> str:
        """What each shard's header names: the capture and, where there are, the dumped files."""
        return f"{self.fingerprint} {self.dump}".rstrip()


def shard_folder(folder: Path) -> Path:
    return folder / "shards"


def manifest_file(folder: Path) -> Path:
    return folder / "manifest.json"


def write_manifest(folder: Path, manifest: Manifest) -> None:
    write_atomically(manifest_file(folder), json.dumps(plain(manifest), indent=1) + "\n")


def read_manifest(folder: Path) -> Manifest:
    """Read ``folder``'s manifest. Raises ConfigError: none there, damaged, or of another format."""
    path = manifest_file(folder)
    if not path.is_file():
        raise ConfigError(f"{path}: missing, so the capture is not complete; run data.capture")
    try:
        found = json.loads(path.read_text())
        version = found["format_version"]
        if version == FORMAT_VERSION:
            shards = [ShardEntry(**entry) for entry in found.pop("shards")]
            return Manifest(**found, shards=shards)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{path}: not a manifest ({type(error).__name__}: {error}); delete it and run "
            "data.capture, which keeps the whole shards"
        ) from error
    raise ConfigError(
        f"{path}: format_version={version}, and this program reads {FORMAT_VERSION}; capture again "
        "into another run.cache"
    )


def open_manifest(folder: Path, wanted: Manifest | None = None) -> Manifest:
    """Read a fitting manifest and compare it with the files beside it, by presence and size.

    Raises ConfigError for another one than wanted, and for a shard that is missing or cut.
    """
    manifest = fitting_manifest(folder, wanted)
    for entry in manifest.shards:
        wrong = misfit(folder, entry)
        if wrong:
            raise ConfigError(f"{wrong}; run data.capture, which writes this shard again")
    return manifest


def fitting_manifest(folder: Path, wanted: Manifest | None = None) -> Manifest:
    """Read the manifest; its shards may lie elsewhere.

    ``wanted`` describes the states that are needed; None compares nothing. Raises ConfigError with
    both values when something of it is another.
    """
    manifest = read_manifest(folder)
    for name, way in (
        ("verifier", f"that of the verifier in use, and not of {manifest.verifier_path}"),
        ("dtype", "which is capture.dtype"),
        ("aux_layers", "which are verifier.aux_layers"),
        ("prepared", "the samples that the data section gives"),
        ("tokenizer", "that of the verifier in use"),
        ("template", "that of the verifier in use with data.template_kwargs"),
    ):
        found, ours = shown(manifest, name), shown(wanted or manifest, name)
        if found != ours:
            raise ConfigError(
                f"{manifest_file(folder)}: {name}={found} must be {ours}, {way}; capture the "
                "states again with data.capture"
            )
    return manifest


def shown(manifest: Manifest, name: str) -> str:
    """A field as the knob's value is written: float8_e4m3fn is capture.dtype=fp8."""
    return StateDtype(manifest.dtype).name if name == "dtype" else str(getattr(manifest, name))


def misfit(folder: Path, entry: ShardEntry) -> str | None:
    """What is wrong with a shard's file by its size alone."""
    path = shard_folder(folder) / entry.name
    size = path.stat().st_size if path.is_file() else None
    if size == entry.bytes:
        return None
    found = "missing" if size is None else f"{size} bytes"
    return f"{path}: {found}, must be {entry.bytes} bytes"
