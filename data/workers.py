"""The processes that encode chunks of rows: results in the order of the chunks, memory flat.

Workers are started by a fork server that has imported this module and done nothing else. Never
by a fork of the caller, whose threads (torch, tokenizers) would leave locks behind that nobody
opens: a known cause of data sets that hang with more than one worker.
"""

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from functools import cache
from itertools import chain, islice
from multiprocessing.connection import wait
from typing import Any

from conf.runtime import hold_lines
from conf.schema import JobError
from data.encoder import Chunk, EncodedChunk, Encoder, EncoderJob

MOST = 16  # workers by default: beyond, the one process that reads and writes is the limit
AHEAD = 2  # chunks a worker that wait or are done: what bounds the memory
FEW = 8  # chunks that one process encodes before workers would have started


def encode_chunks(
    chunks: Iterable[Chunk], encoder: Encoder, workers: int | None
) -> Generator[EncodedChunk]:
    """Encode ``chunks`` in ``workers`` processes and yield the results in order.

    With one it happens in this process, by ``encoder`` itself. None: one a core that this process
    may use, MOST at most; or this process alone when there are fewer than FEW chunks. Raises
    JobError when a worker dies.
    """
    waiting = iter(chunks)
    if workers is None:
        head = list(islice(waiting, FEW))
        waiting = chain(head, waiting)
        workers = 1 if len(head) < FEW else min(len(os.sched_getaffinity(0)), MOST)
    if workers == 1:
        yield from map(encoder.encode, waiting)
        return
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    pool = ProcessPoolExecutor(workers, context, initializer=begin, initargs=(encoder.job,))
    try:
        yield from in_order(pool, waiting, workers * AHEAD)
    except BrokenProcessPool as error:
        raise JobError(
            f"data.workers={workers}: a worker process died, for want of memory perhaps; run the "
            "same command with fewer of them, data.workers=1 needs none"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def in_order(
    pool: ProcessPoolExecutor, chunks: Iterator[Chunk], most: int
) -> Iterator[EncodedChunk]:
    """At most ``most`` chunks are under way at once."""
    under_way: deque[Future[EncodedChunk]] = deque()
    for chunk in chunks:
        under_way.append(pool.submit(encode_here, chunk))
        if len(under_way) == most:
            yield under_way.popleft().result()
    while under_way:
        yield under_way.popleft().result()


class Here:
    """What a worker process keeps between two chunks."""

    job: EncoderJob
    said: list[str]


def begin(job: EncoderJob) -> None:
    """Make this process a worker: silent, with one thread, and gone when its parent is."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears it too and ends the workers
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a core each: the workers are the parallelism
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=follow, args=(parent.sentinel,), daemon=True).start()
    Here.said = hold_lines()
    Here.job = job


@cache
def own_encoder() -> Encoder:
    """Loaded with the first chunk, whose caller then hears why it cannot be. The pool would only
    say that a process had died."""
    return Encoder.load(Here.job)


def follow(parent: Any) -> None:
    """A parent that was killed cannot end its workers."""
    wait([parent])
    os._exit(1)


def encode_here(chunk: Chunk) -> EncodedChunk:
    result = own_encoder().encode(chunk)
    said = list(Here.said)
    Here.said.clear()
    return replace(result, said=said)
