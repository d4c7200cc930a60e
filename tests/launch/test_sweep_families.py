"""The families sweep: what its points run, and its table over made-up reports."""

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from conf.compose import load_config
from conf.runtime import RankInfo
from conf.schema import EvalSection, Phrases
from eval.acceptance import Counters, Interval, total
from eval.report import (
    DataOrigin,
    Differing,
    EvalReport,
    EvalSettings,
    Floor,
    Intervals,
    Lossless,
    PromptCounts,
    TrainingEstimate,
    to_json,
)
from eval.speed_report import PLAIN, Baselines, Latency, ShapeSpeed, TimeSplit, Timing
from launch import sweep, sweep_points
from launch.sweep_plan import stages_word
from launch.sweep_shapes import figures_of, tau_interval
from models.facts import load_facts
from models.phrases import PhraseConfig
from models.start import config_to_train
from train.spent import FILE, Spent

ROOT = Path(__file__).resolve().parents[2]
DRAFTS = ["tiny", "eagle1", "tiny_medusa", "tiny_model", "ngram", "prompt_lookup"]
STATIC, DYNAMIC = "[[0],[1],[0,0]]", "dynamic:nodes=12,depth=4,top_k=3"
WIDE = Interval(1.1, 1.9)


def speed_of(shape: str, n: int, nodes: int, speedup: float) -> ShapeSpeed:
    return ShapeSpeed(
        *(shape, n, nodes, 1.75, 1.06, 0.2, 0.2 / n, 1.5, 1.0, speedup),
        speedup_decode_interval=WIDE,
        speedup_end_to_end=speedup,
        speedup_end_to_end_interval=WIDE,
        **{"tokens_per_second_decode": 30.0, "tokens_per_second_end_to_end": 28.0},
        latency=Latency(1.0, 1.5),
        split=TimeSplit(0.2, 0.7, 0.1),
    )


def timing(method: str, digest: str, rounds: int = 0, accepted: int = 0) -> Timing:
    return Timing(1, method, ["p"], digest, 20, 1, 0.1, 1.0, 0.1, 0.5, rounds, accepted)


def made_report(fastest: int = 4, differing: int = 0) -> EvalReport:
    """Chains of 2 and 4 and two trees; two prompts with ten rounds each."""
    one = Counters.of_chains([4, 0, 2, 1, 0, 0, 3, 0, 1, 0], 22, 4)
    prompts = [
        PromptCounts(
            *(f"p{i}", "t", f"d{i}", False, one.rounds, one.drafted, one.tested, one.tokens),
            *(one.accepted_by_depth, one.reached_by_depth, 0.0, 0),
        )
        for i in range(2)
    ]
    whole = total([prompt.counters for prompt in prompts])
    shapes = [speed_of("2", 2, 2, 1.3), speed_of("4", 4, 4, 1.4)]
    trees = [speed_of(STATIC, 2, 3, 1.45), speed_of(DYNAMIC, 4, 12, 1.2)]
    section = EvalSection(n_draft=4, bootstrap=50)
    spread = [Interval(0.1, 0.9)] * 4
    return EvalReport(
        *(whole.tau, whole.alpha, whole.alpha_by_depth, whole.survival_by_depth, 0.5, 2.0),
        ngram_floor=Floor(4, 1.0, Counters()),
        **{"c": 0.1, "speedup_decode": 1.4, "speedup_end_to_end": 1.3},
        **{"speedup_vs_generate": 1.5, "predicted_speedup": 1.6},
        by_n={speed.n: speed for speed in shapes},
        by_tree={speed.shape: speed for speed in trees},
        **{"by_batch": {}, "costs": []},
        baselines=Baselines(2, 44, 0.02, 50.0, 45.0, 0.1, Latency(2.0, 2.4), "eager"),
        lossless=Lossless(2, 2 - differing, [Differing("p0", 3, 0.1)] * differing, ""),
        counters=whole,
        intervals=Intervals(WIDE, WIDE, spread, spread, WIDE, WIDE, WIDE),
        **{"tasks": {}, "position_ranges": [], "absolute_ranges": [], "beyond_training": None},
        **{"rank_hits": None, "by_temperature": []},
        training_estimate=TrainingEstimate(None, None, whole.tau, 2.0, ""),
        **{"prompts": 2, "by_prompt": prompts},
        timings=[timing(PLAIN, "a"), timing("4", "a", 10, 6), timing(STATIC, "a", 10, 10)],
        settings=EvalSettings(
            *(section, "s", "v", "best", [2, 4, 5], "greedy", "float32", "CPU", 1, "sdpa"),
            *(fastest, STATIC),
        ),
        data=DataOrigin(["p"], 2, {}, 2, 0, ["t"], 90, 10, 512, 1.7),
        **{"provenance": {}, "warnings": []},
    )


@pytest.fixture
def words(tiny_verifier: Path, tmp_path: Path) -> list[str]:
    """What keeps a job inside ``tmp_path``."""
    (tmp_path / "answers.jsonl").write_text('{"id": "a", "conversations": []}\n')
    (tmp_path / "prompts.jsonl").write_text("{}\n")
    return [
        f"verifier.path={tiny_verifier}",
        f"data.path={tmp_path}/answers.jsonl",
        f"eval.prompts={tmp_path}/prompts.jsonl",
        f"run.root={tmp_path}/runs",
        f"run.cache={tmp_path}/cache",
    ]


class FakeJobs:
    """Stands for torchrun: notes the words of each job, and leaves what the job would leave."""

    def __init__(self, words: list[str], drafts: list[str], unreported: str = "", lossy: str = ""):
        self.unreported, self.lossy = unreported, lossy
        self.jobs: list[list[str]] = []
        plan = sweep.make_plan(["sweep=families", *words], 1)
        every = [*plan.fixed, stages_word(plan.stages)]  # judged as the jobs would judge them
        self.configs = {name: load_config([*every, f"draft={name}"]) for name in drafts}
        self.folder = plan.folder

    def __call__(self, command: list[str]) -> int:
        self.jobs.append(command[6:])
        draft = next((w.partition("=")[2] for w in command if w.startswith("draft=")), None)
        if draft is None:
            return 0
        cfg, folder = self.configs[draft], self.folder / f"draft-{draft.replace('_', '-')}"
        (folder / "best").mkdir(parents=True)
        config = config_to_train(cfg.draft, load_facts(cfg.verifier, folder), cfg.ttt.depth)
        (folder / "best" / "draft.json").write_text(config.to_json())
        held_out = {"tau": 1.5, "alpha_by_depth": [0.5], "survival_by_depth": [0.5], "counters": {}}
        (folder / "best" / "acceptance.json").write_text(json.dumps(held_out))
        Spent(7_000_000, 990, 2.4e13, 90.0, 495).save(folder, RankInfo.from_env())
        if draft != self.unreported:
            (folder / "eval").mkdir()
            report = made_report(differing=int(draft == self.lossy))
            (folder / "eval" / "report.json").write_text(to_json(report))
        return 0


def swept(monkeypatch: pytest.MonkeyPatch, words: list[str], fake: FakeJobs) -> int:
    monkeypatch.setattr(sweep_points, "run", fake)
    return sweep.main(["--nproc-per-node", "1", "sweep=families", *words])


def cells(page: str) -> dict[tuple[str, str], list[str]]:
    """The table of drafts and shapes, by both."""
    rows = [line.strip("|").split(" | ") for line in page.splitlines() if line.startswith("| ")]
    wide = [[cell.strip() for cell in row] for row in rows if len(row) == len(rows[0])]
    return {(row[0], row[1]): row for row in wide}


def test_every_family_is_judged_and_every_shape_has_its_row(
    monkeypatch: pytest.MonkeyPatch, words: list[str], tmp_path: Path, capsys
):
    fake = FakeJobs(words, DRAFTS, lossy="tiny_medusa")
    assert swept(monkeypatch, words, fake) == 0
    shared, *points = fake.jobs
    assert "stages=[prepare,capture]" in shared
    assert [f"draft={name}" for name in DRAFTS] == [
        next(word for word in job if word.startswith("draft=")) for job in points
    ]
    for job in points:
        assert "stages=[prepare,capture,train,eval]" in job
        assert any(word.startswith("optim.flops=") for word in job)
    page = (tmp_path / "runs" / "families" / "sweep.md").read_text()
    found = cells(page)
    for draft in ("EAGLE-3", "EAGLE-1", "Medusa", "small model", "prompt lookup"):
        assert (draft, "N = 4") in found and (draft, STATIC) in found
    assert ("n-gram table + prompt lookup", "N = 4") in found
    assert ("EAGLE-2", DYNAMIC) in found and ("EAGLE-1", DYNAMIC) not in found
    assert ("EAGLE-3", DYNAMIC) in found and ("EAGLE-2", "N = 4") not in found
    chain, tree = found["EAGLE-3", "N = 4"], found["EAGLE-3", STATIC]
    assert chain[2:6] == ["7,000,000", "3.0", "990", "2.4e+13"]  # twice the half that was timed
    assert chain[-1] == "yes, 2 of 2" and tree[-1] == ""
    assert found["Medusa", "N = 4"][-1] == "NO, 1 of 2"
    assert chain[6] == "2.100 [1.100, 1.900]" and tree[6] == ""
    assert tree[-2] == "1.450 [1.100, 1.900]"
    assert "(families.png)" in page and "EAGLE-2" in capsys.readouterr().out
    check_files(tmp_path / "runs" / "families")


def check_files(folder: Path) -> None:
    found = json.loads((folder / "sweep.json").read_text())["points"]
    assert [point["training"]["flops"] for point in found] == [2.4e13] * len(DRAFTS)
    first = found[1]["shapes"]
    assert [one["draft"] for one in first] == ["EAGLE-1", "EAGLE-1", "EAGLE-2"]
    assert first[0]["alpha_by_depth"] == [0.5, 0.6, pytest.approx(2 / 3), 0.5]
    assert first[1]["tau"] is None and first[1]["timed_tau"] == 1.75
    assert (folder / "families.png").read_bytes().startswith(b"\x89PNG")


def test_a_point_without_its_report_has_failed(
    monkeypatch: pytest.MonkeyPatch, words: list[str], tmp_path: Path
):
    two = ["tiny", "eagle1"]
    fake = FakeJobs(words, two, unreported="eagle1")
    assert swept(monkeypatch, [*words, f"draft={','.join(two)}"], fake) == 1
    page = (tmp_path / "runs" / "families" / "sweep.md").read_text()
    assert "draft-eagle1: " in page and "no report there" in page
    assert "EAGLE-1" not in page and "EAGLE-3" in page


def test_the_fastest_chain_has_a_row_when_another_was_counted(tmp_path: Path):
    (tmp_path / "draft.json").write_text(PhraseConfig(32, 4, Phrases.table.value).to_json())
    one = [shape.shape for shape in figures_of(made_report(fastest=4), tmp_path)]
    two = figures_of(made_report(fastest=2), tmp_path)
    assert one == ["N = 4", STATIC, DYNAMIC]
    assert [shape.shape for shape in two] == ["N = 4", "N = 2", STATIC, DYNAMIC]
    assert {shape.draft for shape in two} == {"n-gram table"}
    assert math.isnan(two[1].tau) and two[1].speedup == 1.3


def test_intervals_of_timed_rounds():
    """Groups that agree leave no doubt; the smallest batch alone counts."""
    same = [timing("4", "a", 10, 6), timing("4", "b", 20, 12)]
    assert tau_interval(same, 50) == Interval(1.6, 1.6)
    other = replace(timing("4", "c", 10, 0), batch=4)
    assert tau_interval([*same, other], 50) == Interval(1.6, 1.6)
    apart = tau_interval([timing("4", "a", 10, 0), timing("4", "b", 10, 30)], 500)
    assert apart == Interval(1.0, 4.0)
    assert math.isnan(tau_interval([], 50).low)


def test_training_that_left_no_note_is_no_failure(tmp_path: Path):
    assert sweep_points.read_training(tmp_path) is None
    (tmp_path / FILE).write_text('{"trained": "many"}')
    with pytest.raises(ValueError, match="not what training writes"):
        sweep_points.read_training(tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_three_families_from_answers_to_the_table(words: list[str], tmp_path: Path):
    """Real jobs on the tiny verifier: EAGLE-1 reads other states than the shared cache has."""
    rows = []
    for i in range(24):
        answer = " ".join(str(n) for n in range(5 + i % 7)) + " done"
        turns = [{"role": "user", "content": f"count to {i % 7}"}]
        turns.append({"role": "assistant", "content": answer})
        rows.append({"id": f"c{i}", "messages": turns, "greedy": True})
    (tmp_path / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    prompts = [{"id": f"p{i}", "task": "count", "turns": [f"count to {i}"]} for i in (3, 4)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    small = [
        *("draft=tiny,eagle1,ngram", "verifier.dtype=float32", "data.max_length=96"),
        *("data.valid_share=0.2", "capture.min_agreement=0", "engine.threads=1", "run.device=cpu"),
        *("optim.max_steps=6", "log.every=4", "log.valid_every=6", "log.save_every=6"),
        *("eval.max_prompts=2", "eval.max_new_tokens=8", "eval.speed_prompts=1"),
        *("eval.n_sweep=[4]", "eval.bootstrap=20"),
    ]
    command = [sys.executable, "-m", "launch.sweep", "sweep=families", *words, *small]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    folder = tmp_path / "runs" / "families"
    points = json.loads((folder / "sweep.json").read_text())["points"]
    assert [point["failure"] for point in points] == [None] * 3
    for point in points:
        chain = point["shapes"][0]
        assert chain["checked"] == chain["identical"] == 2
        assert point["training"]["seconds"] > 0
    eagle3, eagle1, ngram = (point["training"] for point in points)
    assert eagle3["steps"] == eagle1["steps"] == 6 and ngram["trained"] == 0
    assert eagle3["flops"] > 0 and eagle1["flops"] > 0
    assert {shape["draft"] for shape in points[1]["shapes"]} == {"EAGLE-1", "EAGLE-2"}
