"""A report that was edited or damaged is refused in one sentence, whichever tool reads it."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from conf.schema import ConfigError
from eval.report import to_json
from eval.report_file import read_report

Edit = Callable[[dict[str, Any]], object]


def zeros(one: dict[str, Any]) -> None:
    one.update(verify=dict.fromkeys(one["verify"], 0.0))


EDITS: list[tuple[str, Edit]] = [
    ("counters: counts are 0 or more", lambda r: r["counters"].update(rounds=-5, tested=-1)),
    ("counters: no depth is reached", lambda r: r["counters"].update(rounds=1)),
    ("counters: accepted_by_depth", lambda r: r["counters"].update(accepted_by_depth=[])),
    ("counters: are not the sum of by_prompt", lambda r: r.update(by_prompt=[])),
    ("by_prompt.1: ", lambda r: r["by_prompt"][1].update(tested=999)),
    ("costs.0: verify needs", lambda r: r["costs"][0].update(verify={})),
    ("costs.0: verify needs", lambda r: r["costs"][0].update(draft_next={})),
    ("costs.0: times are above 0", lambda r: zeros(r["costs"][0])),
    ("costs.0: times are above 0", lambda r: r["costs"][0].update(draft_first=None)),
    ("rank_hits: ", lambda r: r["rank_hits"].update(hits=[[1]])),
    ("by_n: a key", lambda r: r.update(by_n={"0": r["by_n"]["1"]})),
    ("tau=1000", lambda r: r.update(tau=10**400)),
    (
        "timings.0: the plain loop has none",
        lambda r: r.update(timings=[one for one in r["timings"] if one["method"] != "plain"]),
    ),
]


@pytest.mark.parametrize(("says", "edit"), EDITS)
def test_an_edited_report_is_refused(tmp_path: Path, made: SimpleNamespace, says: str, edit: Edit):
    value = json.loads(to_json(made.report()))
    file = tmp_path / "report.json"
    file.write_text(json.dumps(value))
    read_report(file)  # as it was
    edit(value)
    file.write_text(json.dumps(value))
    with pytest.raises(ConfigError) as refused:
        read_report(file)
    message = str(refused.value)
    assert message.startswith(f"{file}: {says}") and "eval.main" in message and "\n" not in message
    assert len(message) < 400


@pytest.mark.parametrize("text", ["[" * 100_000, '{"tau": ' + "9" * 5000 + "}"])
def test_json_that_python_does_not_read(tmp_path: Path, text: str):
    (tmp_path / "report.json").write_text(text)
    with pytest.raises(ConfigError, match="not JSON"):
        read_report(tmp_path)
