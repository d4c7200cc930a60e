"""What of a capture the store holds: shards, each with a mark behind it, and at last the manifest.

    capture-<fingerprint>/shards/NNNNN.safetensors    as on the disk
    capture-<fingerprint>/shards/NNNNN.json           its mark: written when the shard is there
    capture-<fingerprint>/manifest.json               written when all shards are there

A mark holds what the manifest will say of the shard, so that a capture which goes on elsewhere
need not fetch a shard to know it. Who finds a shard without its mark sends it again.
"""

import hashlib
import json
from dataclasses import dataclass

from conf.runtime import plain, write_atomically
from conf.schema import Verify
from data.manifest import Manifest, ShardEntry, manifest_file, shard_folder
from data.shard_file import span_text
from data.shard_plan import ShardSpan
from data.staging import Staging

MANIFEST = "manifest.json"
PROBE = "probe"
BLOCK = 1 << 24  # bytes of a shard in memory while the store's copy is hashed


@dataclass(frozen=True)
class Mark:
    """What a stored shard holds, and which span of which capture it is."""

    capture: str  # Manifest.source
    span: str
    entry: ShardEntry

    def to_bytes(self) -> bytes:
        return json.dumps(plain(self)).encode()

    @classmethod
    def from_bytes(cls, content: bytes) -> "Mark | None":
        """None for what is no mark: cut, or of another format."""
        try:
            found = json.loads(content)
            return cls(found["capture"], found["span"], ShardEntry(**found["entry"]))
        except (ValueError, KeyError, TypeError):
            return None


def pull_manifest(stage: Staging) -> None:
    """Bring the store's manifest, where it has one, to where the local one is looked for."""
    try:
        content = stage.store.read(MANIFEST)
    except FileNotFoundError:
        return
    write_atomically(manifest_file(stage.folder), content)


def is_published(stage: Staging) -> bool:
    return stage.store.size(MANIFEST) is not None


def withdraw(stage: Staging) -> None:
    """Remove the manifest before a shard changes: what has one is complete.

    Raises JobError where nothing may be written: now, and not after hours of computing.
    """
    stage.store.write(b"may this be written?", PROBE)
    stage.store.remove(PROBE)
    stage.store.remove(MANIFEST)


def publish(stage: Staging, manifest: Manifest) -> None:
    """Write the manifest of shards that are all there, and remove what it does not name."""
    keep = {name for entry in manifest.shards for name in (entry.name, mark_name(entry.name))}
    for name in stage.store.names("shards"):
        if name not in keep:  # cut for another capture.shard_mib, or left by a kill
            stage.store.remove(f"shards/{name}")
    stage.store.write(manifest_file(stage.folder).read_bytes(), MANIFEST)


def send(stage: Staging, entry: ShardEntry, span: ShardSpan, capture: str) -> None:
    """Send a shard that lies whole on the disk, unless the store has it; it may then go."""
    mark = Mark(capture, span_text(span), entry)
    if mark_of(stage, entry.name) != mark or not has_size(stage, entry):
        stage.store.remove(f"shards/{mark_name(entry.name)}")
        if stage.has(entry):  # else it came from the store, and its mark alone is wrong
            stage.store.put(stage.path(entry), f"shards/{entry.name}")
        stage.store.write(mark.to_bytes(), f"shards/{mark_name(entry.name)}")
    stage.stored.add(entry.name)
    stage.trim()


def stored_entry(
    stage: Staging, span: ShardSpan, known: ShardEntry | None, capture: str, verify: Verify
) -> ShardEntry | None:
    """The shard of ``span`` as the store has it; None when it has not, or not as ``known``.

    Its size is compared, with verify=full all of its bytes; a shard that is fetched is compared
    with its sha256 in any case.
    """
    entry = known
    if entry is None:
        mark = mark_of(stage, span.name)
        if mark is None or (mark.capture, mark.span) != (capture, span_text(span)):
            return None
        entry = mark.entry
    if not has_size(stage, entry):
        return None
    if verify is Verify.full and sha256_there(stage, entry) != entry.sha256:
        stage.store.remove(f"shards/{mark_name(entry.name)}")  # or it would be taken for sent
        return None
    return entry


def has_size(stage: Staging, entry: ShardEntry) -> bool:
    return stage.store.size(f"shards/{entry.name}") == entry.bytes


def sha256_there(stage: Staging, entry: ShardEntry) -> str:
    digest = hashlib.sha256()
    for start in range(0, entry.bytes, BLOCK):
        end = min(start + BLOCK, entry.bytes)
        digest.update(stage.store.read(f"shards/{entry.name}", start, end))
    return digest.hexdigest()


def mark_of(stage: Staging, name: str) -> Mark | None:
    try:
        return Mark.from_bytes(stage.store.read(f"shards/{mark_name(name)}"))
    except FileNotFoundError:
        return None


def mark_name(shard: str) -> str:
    return shard.removesuffix(".safetensors") + ".json"


def settle(
    stage: Staging, found: ShardEntry | str | None, stored: ShardEntry | None, span: ShardSpan
) -> ShardEntry | str | None:
    """What counts of a shard: the store's, which the disk's must equal, or else the disk's."""
    if stored is None:
        return found
    if found != stored:
        (shard_folder(stage.folder) / span.name).unlink(missing_ok=True)
    stage.stored.add(span.name)
    return stored
