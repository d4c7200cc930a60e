"""A cache in a store: found, staged, evicted and fetched again, with the same bytes each time."""

import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from pathlib import Path

import fsspec
import pytest
import torch
from fsspec.implementations.local import LocalFileSystem
from torch import Tensor

from conf.runtime import RankInfo, note_once
from conf.schema import (
    CaptureMode,
    CaptureSection,
    ConfigError,
    Device,
    JobError,
    OptimSection,
    Precision,
    RunConfig,
    StateDtype,
    TTTSection,
    VerifierSection,
    Verify,
)
from conf.stage_rules import stores
from data import store as store_module
from data.capture import capture
from data.loader import TrainLoader
from data.manifest import manifest_file, read_manifest, shard_folder
from data.publish import is_published, mark_of, publish, send, stored_entry
from data.reader import ShardReader
from data.records import PreparedData, TokenizedSample
from data.shard_file import span_text
from data.shard_plan import ShardSpan
from data.staging import GIB, Staging
from data.store import Store
from data.writer import written
from models.verifier import Verifier

ALONE = RankInfo(0, 1, 0)
MEMORY = "memory://bucket/prefix"


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch) -> Iterator[None]:
    monkeypatch.setattr(store_module, "PAUSES", (0.0, 0.0, 0.0))
    yield
    files = fsspec.filesystem("memory")
    if files.exists("/bucket"):
        files.rm("/bucket", recursive=True)


@pytest.fixture
def cache(write_cache, some_samples: list[TokenizedSample], tmp_path: Path) -> Path:
    return write_cache(tmp_path / "capture-0", some_samples)


@pytest.fixture
def cfg(tiny_verifier: Path, tmp_path: Path) -> RunConfig:
    cfg = RunConfig()
    cfg.run.cache = str(tmp_path / "cache")
    cfg.run.device = Device.cpu
    cfg.verifier = VerifierSection(path=str(tiny_verifier), dtype=Precision.float32)
    cfg.capture = CaptureSection(dtype=StateDtype.float32, batch_tokens=128)
    return cfg


def loader_of(reader: ShardReader) -> TrainLoader:
    optim = OptimSection(packs_per_step=2, micro_batch_tokens=80, epochs=3.0)
    return TrainLoader(reader, optim, TTTSection(depth=3), 7, ALONE)


def same(ours, theirs) -> bool:
    """Are two values, dataclasses and lists of tensors included, equal to the last bit?"""
    if isinstance(ours, Tensor):
        return ours.dtype == theirs.dtype and torch.equal(ours, theirs)
    if isinstance(ours, list):
        return len(ours) == len(theirs) and all(map(same, ours, theirs))
    if is_dataclass(ours):
        names = [part.name for part in fields(ours) if part.compare]
        return all(same(getattr(ours, name), getattr(theirs, name)) for name in names)
    return ours == theirs


def spans_of(cache: Path) -> list[ShardSpan]:
    """Those of the cache that was written by hand; what they weigh has no say here."""
    spans: list[ShardSpan] = []
    for number, entry in enumerate(read_manifest(cache).shards):
        first = sum(span.count for span in spans)
        spans.append(ShardSpan(number, first, entry.samples, entry.tokens, entry.bytes))
    return spans


def send_all(cache: Path, url: str) -> None:
    manifest = read_manifest(cache)
    stage = Staging(cache, Store(url, cache.name), None)
    for entry, span in zip(manifest.shards, spans_of(cache), strict=True):
        send(stage, entry, span, manifest.source)
    publish(stage, manifest)


def elsewhere(cache: Path, name: str, url: str, limit: int | None = None) -> Staging:
    """Another machine, which has the manifest alone."""
    folder = cache.parent / name / cache.name
    folder.mkdir(parents=True)
    manifest_file(folder).write_bytes(manifest_file(cache).read_bytes())
    return Staging(folder, Store(url, cache.name), limit)


def staged(stage: Staging) -> list[str]:
    return sorted(path.name for path in shard_folder(stage.folder).glob("*.safetensors"))


def counted(monkeypatch) -> list[str]:
    """The names of all shards fetched whole from now on."""
    fetched: list[str] = []
    real = Store.get

    def get(self: Store, name: str, local: Path) -> None:
        fetched.append(name)
        real(self, name, local)

    monkeypatch.setattr(Store, "get", get)
    return fetched


def largest(cache: Path) -> int:
    return max(entry.bytes for entry in read_manifest(cache).shards)


# ---- staging --------------------------------------------------------------------------------


def test_opening_a_reader_fetches_indexes_alone(cache: Path, monkeypatch):
    send_all(cache, MEMORY)
    fetched = counted(monkeypatch)
    stage = elsewhere(cache, "b", MEMORY)
    reader, local = ShardReader(stage.folder, stage=stage), ShardReader(cache)
    assert torch.equal(reader.lengths, local.lengths)
    assert fetched == [] and staged(stage) == []
    files = list((stage.folder / "staging").glob("*.index"))
    assert len(files) == len(local.manifest.shards)
    index = reader.train_indices[0]
    assert same(reader.read(index), local.read(index)) and len(fetched) == 1


@pytest.mark.parametrize("shards", [1, 3, None])
def test_batches_are_the_same_under_any_limit(cache: Path, shards: int | None, monkeypatch):
    """The bound holds while reading; without one each shard is fetched once."""
    send_all(cache, MEMORY)
    limit = None if shards is None else shards * largest(cache)
    stage = elsewhere(cache, "b", MEMORY, limit)
    fetched = counted(monkeypatch)
    reader = ShardReader(stage.folder, stage=stage)
    theirs = list(loader_of(ShardReader(cache)).windows())
    ours = []
    for window in loader_of(reader).windows():
        ours.append(window)
        if limit is not None:
            sizes = [one.bytes for one in stage._staged()]  # while threads read on
            assert sum(sizes) <= limit
    assert len(theirs) > 3 and same(ours, theirs)
    count = len(read_manifest(cache).shards)
    assert count > 3
    assert len(fetched) > count if limit is not None else sorted(set(fetched)) == sorted(fetched)
    assert not list((stage.folder / "staging").glob("*.part"))


def test_the_least_recently_used_goes_and_an_open_one_stays(cache: Path):
    send_all(cache, MEMORY)
    entries = read_manifest(cache).shards[:4]
    limit = sum(entry.bytes for entry in entries) - entries[2].bytes
    stage = elsewhere(cache, "b", MEMORY, limit)
    stage.stored.update(entry.name for entry in entries)
    for number, entry in enumerate(entries[:3]):
        stage.open(entry).close()
        os.utime(stage.path(entry), ns=(number, number))
    stage.open(entries[0]).close()  # used again: 1 is the oldest now
    with stage.open(entries[1]) as held:
        os.utime(held.fileno(), ns=(1, 1))
        stage.open(entries[3]).close()
        assert {entry.name for entry in entries} - set(staged(stage)) == {entries[2].name}


def test_a_limit_below_one_shard_is_refused_and_a_small_one_is_said(cache: Path, capsys):
    send_all(cache, MEMORY)
    small = elsewhere(cache, "b", MEMORY, largest(cache) - 1)
    with pytest.raises(ConfigError, match=r"capture\.stage_gib=.*must hold the largest shard"):
        ShardReader(small.folder, stage=small)
    note_once.cache_clear()  # other tests have said it
    some = elsewhere(cache, "c", MEMORY, largest(cache))
    ShardReader(some.folder, stage=some)
    assert "are fetched again each time" in capsys.readouterr().out


def test_what_is_damaged_here_is_fetched_again(cache: Path):
    send_all(cache, MEMORY)
    stage, local = elsewhere(cache, "b", MEMORY), ShardReader(cache)
    reader = ShardReader(stage.folder, stage=stage)
    for index in range(len(reader)):
        reader.read(index)
    for path in shard_folder(stage.folder).iterdir():
        data = bytearray(path.read_bytes())
        data[len(data) // 2 :] = bytes(len(data) - len(data) // 2)
        path.write_bytes(data)
    for path in (stage.folder / "staging").glob("*.index"):
        path.write_bytes(path.read_bytes()[:-1] if path.name < "00003" else b"x" * 99)
    reader = ShardReader(stage.folder, stage=stage)
    for index in range(len(reader)):
        assert same(reader.read(index), local.read(index))
    first = reader.manifest.shards[0]
    stage.path(first).write_bytes(stage.path(first).read_bytes()[:-1])
    assert same(reader.read(0), local.read(0))


def test_what_is_damaged_in_the_store_is_refused(cache: Path):
    """Negative control: nothing that differs from the manifest becomes a staged shard."""
    send_all(cache, MEMORY)
    stage, entry = elsewhere(cache, "b", MEMORY), read_manifest(cache).shards[1]
    data = bytearray((shard_folder(cache) / entry.name).read_bytes())
    data[len(data) // 2] ^= 1
    stage.store.write(bytes(data), f"shards/{entry.name}")
    reader = ShardReader(stage.folder, stage=stage)
    with pytest.raises(ConfigError, match=rf"{entry.name} has sha256 .*capture\.verify=full"):
        for index in range(len(reader)):
            reader.read(index)
    assert entry.name not in staged(stage)
    stage.store.remove(f"shards/{entry.name}")
    with pytest.raises(ConfigError, match=f"{entry.name} is missing"):
        stage.open(entry)


# ---- the connection -------------------------------------------------------------------------


def failing(monkeypatch, error: Exception, times: int) -> list[int]:
    """The next ``times`` reads of the memory backend fail."""
    seen = [0]
    kind = type(fsspec.filesystem("memory"))
    real = kind.cat_file

    def cat_file(self, path: str, start=None, end=None) -> bytes:
        seen[0] += 1
        if seen[0] <= times:
            raise error
        return real(self, path, start, end)

    monkeypatch.setattr(kind, "cat_file", cat_file)
    return seen


@pytest.mark.parametrize("error", [ConnectionResetError("reset"), TimeoutError("slow")])
def test_a_lost_connection_is_tried_again(monkeypatch, error: Exception):
    store = Store(MEMORY, "x")
    store.write(b"abc", "name")
    seen = failing(monkeypatch, error, 3)
    assert store.read("name") == b"abc" and seen == [4]
    seen = failing(monkeypatch, error, 99)
    with pytest.raises(JobError) as raised:
        store.read("name")
    assert seen == [4] and str(raised.value).count(";") == 1
    assert f"capture.store={MEMORY}: reading name failed 4 times" in str(raised.value)


def test_what_waiting_does_not_mend_is_not_tried_again(monkeypatch):
    store = Store(MEMORY, "x")
    seen = failing(monkeypatch, PermissionError("no"), 99)
    with pytest.raises(JobError, match="failed once"):
        store.read("name")
    assert seen == [1]
    with pytest.raises(ConfigError, match="must be a URL that fsspec knows"):
        Store("nonsense://x", "x")


def test_a_missing_package_is_named(monkeypatch):
    def url_to_fs(_url: str) -> None:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(fsspec, "url_to_fs", url_to_fs)
    with pytest.raises(ConfigError, match=r"Install s3fs to access S3\); install it with pip"):
        Store("s3://bucket/prefix", "x")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"store": "bucket/prefix"}, "must be a URL"),
        ({"store": MEMORY, "mode": CaptureMode.online}, "has no effect with capture.mode=online"),
        ({"stage_gib": 8.0}, "has no effect without capture.store"),
        ({"store": MEMORY, "stage_gib": 0.5}, "must hold one shard of capture.shard_mib=1024"),
        ({"store": MEMORY, "stage_gib": float("nan")}, "must hold one shard"),
        ({"store": MEMORY, "stage_gib": 1.0}, None),
    ],
)
def test_rules(change: dict, sentence: str | None):
    cfg = RunConfig()
    found = list(stores(replace(cfg, capture=replace(cfg.capture, **change)), []))
    assert len(found) == (sentence is not None)
    assert sentence is None or sentence in found[0]


# ---- capture --------------------------------------------------------------------------------


def stored_in(cfg: RunConfig, tmp_path: Path, machine: str, **more: object) -> RunConfig:
    there = replace(cfg.capture, store=f"file://{tmp_path / 'mounted'}", **more)
    return replace(cfg, capture=there, run=replace(cfg.run, cache=str(tmp_path / machine)))


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in shard_folder(folder).glob("*.safetensors")}


def test_another_machine_finds_the_capture(cfg, prepared: PreparedData, tmp_path, monkeypatch):
    plain = bytes_of(capture(cfg, prepared, ALONE))
    first = capture(stored_in(cfg, tmp_path, "a"), prepared, ALONE)
    assert bytes_of(tmp_path / "mounted" / first.name) == plain

    def load(*_: object) -> None:
        raise AssertionError("the verifier is not needed")

    monkeypatch.setattr(Verifier, "load", load)
    second = stored_in(cfg, tmp_path, "b", stage_gib=1.0)
    folder = capture(second, prepared, ALONE)
    assert read_manifest(folder) == read_manifest(first) and not bytes_of(folder)
    reader = ShardReader(folder, stage=Staging.of(second, folder))
    assert same(reader.read(3), ShardReader(first).read(3)) and len(bytes_of(folder)) == 1
    third = capture(stored_in(cfg, tmp_path, "a"), prepared, ALONE)  # and at home it is complete
    assert third == first


def test_a_capture_goes_on_elsewhere(cfg, prepared: PreparedData, tmp_path, monkeypatch):
    """What one machine has sent before it failed is not computed again by another."""
    sent: list[str] = []
    with monkeypatch.context() as patch:
        patch.setattr("data.writer.written", writing(sent, 5))
        with pytest.raises(OSError, match="the machine fails"):
            capture(stored_in(cfg, tmp_path, "a"), prepared, ALONE)
    made: list[str] = []
    monkeypatch.setattr("data.writer.written", writing(made, 99))
    folder = capture(stored_in(cfg, tmp_path, "b"), prepared, ALONE)
    names = [entry.name for entry in read_manifest(folder).shards]
    assert len(sent) == 6 and made == names[5:]  # the sixth was not written
    assert bytes_of(tmp_path / "mounted" / folder.name) == bytes_of(capture(cfg, prepared, ALONE))


def writing(names: list[str], limit: int) -> Callable:
    def write(folder: Path, span: ShardSpan, *rest):
        names.append(span.name)
        if len(names) > limit:
            raise OSError("the machine fails")
        return written(folder, span, *rest)

    return write


def test_a_cache_that_is_there_is_sent_and_a_damaged_object_again(cfg, prepared, tmp_path):
    here = replace(cfg, run=replace(cfg.run, cache=str(tmp_path / "a")))
    folder = capture(here, prepared, ALONE)
    with_store = stored_in(cfg, tmp_path, "a")
    capture(with_store, prepared, ALONE)
    there = tmp_path / "mounted" / folder.name
    whole = bytes_of(folder)
    assert bytes_of(there) == whole
    victim = shard_folder(there) / "00002.safetensors"
    data = bytearray(victim.read_bytes())
    data[-1] ^= 1
    victim.write_bytes(data)
    capture(with_store, prepared, ALONE)
    assert bytes_of(there) != whole  # sampled looks at sizes alone, and reading finds it
    for name in ("a", "b"):  # mended from the disk, and from nothing
        victim.write_bytes(data)
        full = stored_in(cfg, tmp_path, name, verify=Verify.full)
        capture(full, prepared, ALONE)
        assert bytes_of(there) == whole and manifest_file(there).is_file()


def test_a_store_that_may_not_be_written_is_said_before_anything_is_computed(
    cfg, prepared: PreparedData, tmp_path: Path, monkeypatch
):
    def put(*_: object) -> None:
        raise PermissionError("read only")

    monkeypatch.setattr(LocalFileSystem, "pipe_file", put)
    monkeypatch.setattr(Verifier, "load", put)
    with pytest.raises(JobError, match=r"capture\.store=.*writing probe failed once"):
        capture(stored_in(cfg, tmp_path, "a"), prepared, ALONE)


def test_a_capture_keeps_to_the_limit(cfg, prepared: PreparedData, tmp_path: Path):
    """Under one of two shards no more are left, and the store has all."""
    small = stored_in(cfg, tmp_path, "a")
    sizes = [len(data) for data in bytes_of(capture(cfg, prepared, ALONE)).values()]
    small.capture.stage_gib = 2 * max(sizes) / GIB
    folder = capture(small, prepared, ALONE)
    assert sum(map(len, bytes_of(folder).values())) <= 2 * max(sizes)
    assert len(bytes_of(tmp_path / "mounted" / folder.name)) == len(sizes) > 5
    assert capture(small, prepared, ALONE) == folder


# ---- kills and several processes ------------------------------------------------------------


def forked(run: Callable[[], None]) -> int:
    """The process, which touches files alone: torch's threads do not live in a fork."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            run()
            status = 0
        finally:
            os._exit(status)
    return child


def dies_at(call: int) -> None:
    """In this process the copy number ``call`` ends in the middle, by kill -9."""
    seen = [0]

    def copy(self, source: str, target: str, *_: object, **__: object) -> None:
        data = Path(source).read_bytes()
        seen[0] += 1
        half = len(data) // 2 if seen[0] == call else len(data)
        Path(target).write_bytes(data[:half])
        if seen[0] == call:
            os.kill(os.getpid(), signal.SIGKILL)

    LocalFileSystem.put_file = LocalFileSystem.get_file = copy  # pyright: ignore


def test_kills_while_sending_lose_nothing_and_tear_nothing(cache: Path, tmp_path: Path):
    url = f"file://{tmp_path / 'mounted'}"
    manifest, spans = read_manifest(cache), spans_of(cache)
    stage = Staging(cache, Store(url, cache.name), None)
    there = tmp_path / "mounted" / cache.name
    done: dict[str, int] = {}

    def run() -> None:
        dies_at(3)
        send_all(cache, url)

    for _ in range(len(spans)):
        dead = os.waitpid(forked(run), 0)[1] == signal.SIGKILL
        inodes = {p.name: p.stat().st_ino for p in shard_folder(there).glob("*.safetensors")}
        assert done.items() <= inodes.items(), "a shard that was there was sent again"
        found = [stored_entry(stage, span, None, manifest.source, Verify.full) for span in spans]
        assert [e for e in found if e] == manifest.shards[: len(inodes)]
        done = inodes
        if not dead:
            break
        assert not is_published(stage)
    assert not dead and is_published(stage) and bytes_of(there) == bytes_of(cache)
    assert {p.suffix for p in shard_folder(there).iterdir()} == {".safetensors", ".json"}


def test_kills_while_fetching_leave_no_torn_shard_and_no_lost_room(cache: Path, tmp_path: Path):
    url = f"file://{tmp_path / 'mounted'}"
    send_all(cache, url)
    entries = read_manifest(cache).shards
    stage = elsewhere(cache, "b", url, 2 * largest(cache))
    stage.stored.update(entry.name for entry in entries)

    def run(number: int) -> None:
        dies_at(2)
        for entry in (entries[number], entries[(number + 1) % len(entries)]):
            stage.open(entry).close()

    whole = bytes_of(cache)
    for number in range(len(entries)):
        stage.path(entries[(number + 1) % len(entries)]).unlink(missing_ok=True)
        assert os.waitpid(forked(lambda number=number: run(number)), 0)[1] == signal.SIGKILL
        assert bytes_of(stage.folder).items() <= whole.items()
    for entry in entries:  # the rooms that the dead had reserved are free again
        with stage.open(entry) as file:
            assert file.readall() == whole[entry.name]


def test_processes_of_one_machine_fetch_a_shard_once(cache: Path, tmp_path: Path, monkeypatch):
    url = f"file://{tmp_path / 'mounted'}"
    send_all(cache, url)
    entries, whole = read_manifest(cache).shards, bytes_of(cache)
    stage, log = elsewhere(cache, "b", url), tmp_path / "log"
    real = Store.get

    def get(self: Store, name: str, local: Path) -> None:
        with log.open("a") as file:
            file.write(name + "\n")
        real(self, name, local)

    monkeypatch.setattr(Store, "get", get)

    def run() -> None:
        for entry in entries:
            with stage.open(entry) as file:
                assert file.readall() == whole[entry.name]

    children = [forked(run) for _ in range(4)]
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * 4
    names = log.read_text().split()
    assert sorted(names) == sorted(f"shards/{entry.name}" for entry in entries)


def test_processes_share_a_limit(cache: Path, tmp_path: Path):
    """Four that read everything with room for two shards: all end, none reads a wrong byte."""
    url = f"file://{tmp_path / 'mounted'}"
    send_all(cache, url)
    entries, whole = read_manifest(cache).shards, bytes_of(cache)
    limit = 2 * largest(cache)
    stage = elsewhere(cache, "b", url, limit)
    stage.stored.update(entry.name for entry in entries)

    def run(turn: int) -> None:
        for entry in entries[turn:] + entries[:turn]:
            with stage.open(entry) as file:
                assert file.readall() == whole[entry.name]

    children = [forked(lambda turn=turn: run(turn)) for turn in range(4)]
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * 4
    assert sum(map(len, bytes_of(stage.folder).values())) <= limit


def test_a_mark_of_another_span_or_capture_is_none_of_ours(cache: Path):
    send_all(cache, MEMORY)
    stage, manifest = elsewhere(cache, "b", MEMORY), read_manifest(cache)
    span, entry = spans_of(cache)[1], manifest.shards[1]
    mark = mark_of(stage, entry.name)
    assert mark is not None and (mark.entry, mark.span) == (entry, span_text(span))
    sampled = Verify.sampled
    assert stored_entry(stage, span, None, manifest.source, sampled) == entry
    assert stored_entry(stage, span, None, "another capture", sampled) is None
    other = replace(span, count=span.count + 1)
    assert stored_entry(stage, other, None, manifest.source, sampled) is None
    stage.store.write(b"{cut", "shards/00001.json")
    assert stored_entry(stage, span, None, manifest.source, sampled) is None
