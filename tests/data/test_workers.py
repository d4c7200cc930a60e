"""Worker processes: order, bounded memory, and the death of one of them or of their parent."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from conf.runtime import ROOT
from conf.schema import ConfigError, DataSection, JobError, VerifierSection
from data.encoder import Chunk, Encoder, EncoderJob
from data.rows import Row
from data.workers import AHEAD, encode_chunks


@pytest.fixture
def encoder(tiny_verifier: Path, tmp_path: Path) -> Encoder:
    verifier = VerifierSection(path=str(tiny_verifier))
    return Encoder.load(EncoderJob(verifier, DataSection(), tmp_path, 128))


def chunk(number: int) -> Chunk:
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": str(number)}]
    raw = json.dumps({"id": f"p{number}", "messages": turns}).encode()
    return Chunk(number, 1.0, [Row(f"a:{number}", raw)])


class Bomb:
    """Kills the process that reads it from its pipe, as an out-of-memory killer would."""

    def __reduce__(self) -> tuple:
        return os._exit, (9,)


@pytest.mark.timeout(120)
def test_results_come_in_order_and_few_chunks_wait(encoder: Encoder):
    drawn = []

    def chunks() -> Iterator[Chunk]:
        for number in range(40):
            drawn.append(number)
            yield chunk(number)

    results = encode_chunks(chunks(), encoder, 2)
    assert next(results).source == 0
    assert len(drawn) <= 2 * AHEAD
    assert [result.source for result in results] == [*range(1, 40)]


@pytest.mark.timeout(120)
def test_a_dead_worker_is_one_sentence(encoder: Encoder):
    deadly = replace(chunk(3), rows=[Row("a:3", value=Bomb())])
    with pytest.raises(JobError, match=r"data\.workers=2: a worker process died.*workers=1"):
        list(encode_chunks([chunk(0), chunk(1), deadly, *map(chunk, range(4, 20))], encoder, 2))


@pytest.mark.timeout(120)
def test_what_a_worker_cannot_load_is_told_as_it_is(encoder: Encoder):
    job = replace(encoder.job, verifier=VerifierSection(path="no/such/folder"))
    with pytest.raises(ConfigError, match=r"no/such/folder"):
        list(encode_chunks(map(chunk, range(4)), Encoder(job, encoder.template), 2))


def test_few_chunks_need_no_process(encoder: Encoder, monkeypatch):
    monkeypatch.setattr("data.workers.ProcessPoolExecutor", None)  # no worker can be started
    found = list(encode_chunks(map(chunk, range(7)), encoder, None))
    assert [result.source for result in found] == list(range(7))
    with pytest.raises(TypeError):
        list(encode_chunks(map(chunk, range(8)), encoder, None))


ENDLESS = """
import itertools, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
if __name__ == "__main__":
    from conf.schema import DataSection, VerifierSection
    from data.encoder import Chunk, Encoder, EncoderJob
    from data.rows import Row
    from data.workers import encode_chunks
    job = EncoderJob(VerifierSection(path=sys.argv[1]), DataSection(), Path("cache"), 128)
    chunks = (Chunk(n, 1.0, [Row("a", b"{}")]) for n in itertools.count())
    for result in encode_chunks(chunks, Encoder.load(job), 2):
        if result.source == 5:
            print("working", flush=True)
"""


@pytest.mark.slow
def test_workers_end_with_a_killed_parent(tiny_verifier: Path, tmp_path: Path):
    script = tmp_path / "endless.py"
    script.write_text(ENDLESS)
    command = [sys.executable, str(script), str(tiny_verifier), str(ROOT)]
    with subprocess.Popen(
        command, cwd=tmp_path, start_new_session=True, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "working\n"
        assert len(session(parent.pid)) >= 4  # itself, the fork server, two workers
        os.kill(parent.pid, signal.SIGKILL)
        until = time.monotonic() + 20
        while session(parent.pid) - {parent.pid} and time.monotonic() < until:
            time.sleep(0.05)
        left = session(parent.pid) - {parent.pid}
        for process in left:
            os.kill(process, signal.SIGKILL)  # a failure leaves nothing behind
        assert not left


def session(leader: int) -> set[int]:
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if os.getsid(int(process.name)) == leader:
                found.add(int(process.name))
        except OSError:
            continue
    return found
