"""Files that cannot be written or read end in one sentence, and nothing but files is replaced."""

import os
import stat
from pathlib import Path

import pytest

from conf.compose import sentence_on_error
from conf.runtime import write_atomically


def said(write: Path, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as ended, sentence_on_error():
        write_atomically(write, "x")
    assert ended.value.code == 1
    return capsys.readouterr().err


def test_a_place_that_cannot_be_written_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "file").write_text("x")
    (tmp_path / "folder").mkdir()
    for path, why in (
        (tmp_path / "file" / "below", "File exists"),
        (tmp_path / "folder", "Is a directory"),
        (Path("/proc/x"), "No such file or directory"),
    ):
        message = said(path, capsys)
        assert why in message and message.count("\n") == 1, message
        assert str(path.parent) in message
    assert sorted(one.name for one in tmp_path.iterdir()) == ["file", "folder"]


def test_a_pipe_or_device_is_written_to_and_not_replaced(tmp_path: Path):
    """Root may rename a file over /dev/null, and every program of the machine would find it."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reading = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_atomically(pipe, "text")
    assert os.read(reading, 10) == b"text"
    os.close(reading)
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_other_errors_keep_their_traceback():
    with pytest.raises(ValueError, match="mine"), sentence_on_error():
        raise ValueError("mine")
