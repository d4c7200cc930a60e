"""The writer of shards: it works behind the forward pass, one shard at a time."""

from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch

from data.manifest import ShardEntry, shard_folder
from data.publish import send
from data.shard_file import describe, read_back, write_shard
from data.shard_plan import ShardSpan
from data.shards import HiddenStateShard
from data.staging import Staging


class ShardWriter:
    """Takes full shards, writes each in a thread of its own, reads it back and sends it to a store.

    Two shards are in memory at most: one that is written and one that is filled. What goes wrong
    in the thread, a full disk above all, is raised by the next ``put`` or by ``finish``; whole
    shards stay. Hashing and writing let the interpreter go, so the forward pass does not wait.
    """

    def __init__(self, folder: Path, capture: str, stage: Staging | None = None):
        self.folder = folder
        self.capture = capture
        self.stage = stage
        shard_folder(folder).mkdir(parents=True, exist_ok=True)  # rank 0's disk may be another
        self._entries: list[ShardEntry] = []
        self._flight: Future[ShardEntry] | None = None
        # One torch thread: workers of its own would take the cores that compute.
        self._pool = ThreadPoolExecutor(1, "writer", torch.set_num_threads, (1,))

    def __enter__(self) -> "ShardWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()  # the shard in flight becomes whole

    def put(self, span: ShardSpan, shard: HiddenStateShard) -> None:
        """Write ``shard``, which must not change any more; waits while another one is written."""
        self._land()
        self._flight = self._pool.submit(self._make, span, shard)

    def finish(self) -> list[ShardEntry]:
        """Wait for the last shard -> all of them as the manifest is to know them."""
        self._land()
        return self._entries

    def _make(self, span: ShardSpan, shard: HiddenStateShard) -> ShardEntry:
        entry = written(self.folder, span, shard, self.capture)
        if self.stage is not None:
            send(self.stage, entry, span, self.capture)
        return entry

    def _land(self) -> None:
        if self._flight is not None:
            self._entries.append(self._flight.result())
            self._flight = None


def written(folder: Path, span: ShardSpan, shard: HiddenStateShard, capture: str) -> ShardEntry:
    sums = write_shard(folder, span, shard, capture)
    read_back(shard_folder(folder) / span.name, sums)
    return describe(folder, span.name, sums.sha256)
