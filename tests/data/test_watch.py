"""No rank hangs in silence: who stands still is named, and who works is let be."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from data.watch import Others, Sign, whereabouts

RUN = Path(__file__).with_name("watch_run.py")
WAITS, WORKS = Sign(1, 90.0, True, "a.py:1"), Sign(1, 0.0, False, "b.py:2")


def run(fault: str, minutes: float) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    return subprocess.run(
        [*command, str(RUN), fault, str(minutes)],
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )


def said(done: subprocess.CompletedProcess[str], words: str) -> list[str]:
    return [line for line in done.stderr.splitlines() if words in line]


def test_a_rank_that_hangs_ends_the_job_in_one_sentence():
    done = run("hang", 0.2)
    assert done.returncode == 1
    (line,) = said(done, "rank 1 did not move from tests/data/watch_run.py")
    assert "engine.timeout_minutes=0.2" in line and "same command" in line


@pytest.mark.slow
def test_a_rank_that_refuses_is_heard_once():
    done = run("refuse", 1)
    assert done.returncode == 1
    assert said(done, "knob=1") == ["rank 1: knob=1: cannot be; try knob=2"]


@pytest.mark.slow
def test_ranks_may_wait_for_one_that_works_longer_than_the_timeout():
    done = run("alone", 0.1)
    assert done.returncode == 0, done.stderr[-3000:]


def judged(*signs: Sign, minutes: float = 1.0) -> str | None:
    others = Others(len(signs), minutes)
    others.signs = dict(enumerate(signs))
    return others.wrong()


def test_who_is_to_blame():
    hangs = Sign(1, 61.0, False, "c.py:3")
    assert judged(WAITS, WORKS) is None
    assert judged(WAITS, hangs) == "rank 1 did not move from c.py:3"
    assert judged(WAITS, WAITS) == "all ranks waited for one another at a.py:1"
    assert judged(WAITS, WAITS, minutes=2) is None
    assert judged(WAITS, hangs, hangs) == "ranks 1, 2 did not move from c.py:3"
    others = Others(2, 1.0)
    others.signs = {0: WORKS, 1: WORKS}
    others.heard[1] -= 61
    assert others.wrong() == "rank 1 gave no sign of life (stopped, or its machine is gone)"


def test_where_a_thread_is():
    ready, go = threading.Event(), threading.Event()

    def stand() -> None:
        ready.set()
        go.wait()

    thread = threading.Thread(target=stand)
    thread.start()
    ready.wait()
    place = whereabouts(sys._current_frames()[thread.ident or 0])
    go.set()
    thread.join()
    assert place.line.startswith("tests/data/test_watch.py:") and not place.waits
    assert whereabouts(None).line == "its start"
