"""A cache in a bucket of a local S3-compatible server, where s3fs and moto are installed."""

from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from conf.schema import JobError
from data import store as store_module
from data.manifest import manifest_file, read_manifest, shard_folder
from data.publish import publish, send
from data.reader import ShardReader
from data.records import TokenizedSample
from data.shard_plan import ShardSpan
from data.staging import Staging
from data.store import Store

pytest.importorskip("s3fs")
server = pytest.importorskip("moto.server")
pytestmark = pytest.mark.slow


@pytest.fixture
def bucket(monkeypatch) -> Iterator[str]:
    """The URL of an empty bucket; the server ends with the test."""
    monkeypatch.setattr(store_module, "PAUSES", (0.0, 0.0, 0.0))
    threaded = server.ThreadedMotoServer(port=0)
    threaded.start()
    host, port = threaded.get_host_and_port()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    files = fsspec.filesystem("s3", skip_instance_cache=True)
    files.mkdir(f"states-{port}")  # moto keeps buckets from server to server
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    yield f"s3://states-{port}/some/prefix"
    threaded.stop()
    fsspec.get_filesystem_class("s3").clear_instance_cache()


def test_a_cache_goes_there_and_comes_back(
    bucket: str, write_cache, some_samples: list[TokenizedSample], tmp_path: Path
):
    cache = write_cache(tmp_path / "capture-0", some_samples)
    manifest, first = read_manifest(cache), 0
    stage = Staging(cache, Store(bucket, cache.name), None)
    for number, entry in enumerate(manifest.shards):
        send(stage, entry, ShardSpan(number, first, entry.samples, 0, 0), manifest.source)
        first += entry.samples
    stage.store.write(b"stray", "shards/99999.safetensors")
    publish(stage, manifest)
    names = [entry.name for entry in manifest.shards]
    marks = [name.replace(".safetensors", ".json") for name in names]
    assert sorted(stage.store.names("shards")) == sorted(names + marks)
    folder = tmp_path / "b" / cache.name
    folder.mkdir(parents=True)
    manifest_file(folder).write_bytes(stage.store.read("manifest.json"))
    limit = max(entry.bytes for entry in manifest.shards)
    there = Staging(folder, Store(bucket, cache.name), limit)
    reader, local = ShardReader(folder, stage=there), ShardReader(cache)
    for index in range(len(local)):
        ours, theirs = reader.read(index), local.read(index)
        assert ours.aux.equal(theirs.aux) and ours.last.equal(theirs.last)
    assert sum(path.stat().st_size for path in shard_folder(folder).iterdir()) <= limit
    assert there.store.size("nowhere") is None and there.store.names("nowhere") == []


def test_no_bucket_and_no_server_end_in_a_sentence(bucket: str, monkeypatch):
    with pytest.raises(JobError, match="make the bucket"):
        Store("s3://no-such-bucket/prefix", "x").write(b"abc", "name")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    with pytest.raises(JobError, match=r"reading name failed 4 times .*; mend connection"):
        Store(bucket, "x").read("name")
