"""DeepSpeed in real processes: stages, ranks and a partial last window give one curve."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from conf.schema import ConfigError
from train.engine import LossScaler, ZeroStageEnum, read_weights

RUN = Path(__file__).with_name("engine_run.py")
GOLDEN = Path(__file__).parents[1] / "golden" / "loss.json"
STEPS = "20"
FLOAT32 = [f"{stage}:float32" for stage in range(4)]
BFLOAT16 = [f"{stage}:bfloat16" for stage in range(4)]
IDLE = [f"{stage}:float32:2:6,1:other" for stage in range(4)]  # every other step leaves ranks idle
AVERAGE = "1:bfloat16:2:6:average"
MUON = [f"0:{precision}:2:6:muon" for precision in ("float32", "bfloat16")]
TEN_SAMPLES = ["1:float32:1:4,4,2", "1:float32:4:4,4,2"]  # accumulation 4, and whole batches


def curves(folder: Path, ranks: int, jobs: list[str]) -> dict:
    out = folder / f"{ranks}.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={ranks}", str(RUN), STEPS, str(out), *jobs]
    env = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=env) as process:
        try:
            _, errors = process.communicate(timeout=280)
        except BaseException:  # the test's own time limit, too: ranks may wait without end
            process.terminate()  # torchrun ends its ranks
            raise
    assert process.returncode == 0, errors[-3000:]
    return json.loads(out.read_text())


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict:
    jobs = [*FLOAT32, *BFLOAT16, "1:float32:1", IDLE[1], *TEN_SAMPLES, *MUON, AVERAGE]
    return curves(tmp_path_factory.mktemp("alone"), 1, jobs)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> dict:
    jobs = [*FLOAT32, BFLOAT16[1], BFLOAT16[3], *IDLE, TEN_SAMPLES[0]]
    return curves(tmp_path_factory.mktemp("pair"), 2, jobs)


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> dict:
    jobs = ["1:float32", "3:float32", TEN_SAMPLES[0]]
    return curves(tmp_path_factory.mktemp("four"), 4, jobs)


def assert_one_curve(runs: list[dict], reference: dict) -> None:
    for other in runs:
        assert other["curve"] == pytest.approx(reference["curve"], rel=1e-5)
        assert other["norms"] == pytest.approx(reference["norms"], rel=1e-4)
        assert other["checksum"] == pytest.approx(reference["checksum"], rel=1e-5)


def test_the_curve_is_the_golden_one(alone: dict):
    """A refactor is finished when the loss curve is the same; 1e-4 leaves room for other CPUs."""
    assert alone["1:float32"]["curve"] == pytest.approx(json.loads(GOLDEN.read_text()), rel=1e-4)


@pytest.mark.parametrize("job", IDLE)
def test_a_rank_without_samples_changes_nothing(alone: dict, pair: dict, job: str):
    """Its pack is another one: other rows, no loss. Weights must still be gathered and gradients
    reduced in one order, or stage 3 waits without end and stage 2 adds up the wrong ones."""
    assert_one_curve([pair[job]], alone[IDLE[1]])


@pytest.mark.parametrize("job", FLOAT32)
def test_stages_and_ranks_give_one_curve(alone: dict, pair: dict, four: dict, job: str):
    reference = alone["1:float32"]
    assert reference["curve"][-1] < reference["curve"][0]
    assert_one_curve([ranks[job] for ranks in (alone, pair, four) if job in ranks], reference)


def test_windows_of_any_number_of_micro_batches_give_one_curve(alone: dict):
    """One sample at a time: six micro-batches a window and three in the partial one."""
    assert_one_curve([alone["1:float32:1"]], alone["1:float32"])


def test_the_last_window_weighs_what_it_holds(alone: dict, pair: dict, four: dict):
    """Ten samples, four a step: the third step has the gradient of one batch of the last two."""
    reference = alone[TEN_SAMPLES[1]]
    assert_one_curve([ranks[TEN_SAMPLES[0]] for ranks in (alone, pair, four)], reference)


@pytest.mark.parametrize("job", [*FLOAT32, *BFLOAT16, *IDLE, *MUON, AVERAGE])
def test_a_loaded_engine_goes_on_bit_for_bit(alone: dict, pair: dict, four: dict, job: str):
    for ranks in (alone, pair, four):
        if job in ranks:
            curve = ranks[job]["curve"]
            assert ranks[job]["resumed"] == curve[len(curve) // 2 :]
            assert ranks[job]["same_weights"]


@pytest.mark.parametrize("job", BFLOAT16)
def test_bfloat16_with_float32_masters_stays_close(alone: dict, pair: dict, job: str):
    """Adam's first step, counted twice, is eight times as far off; without masters it is more."""
    for ranks in (alone, pair):
        if job in ranks:
            assert ranks[job]["curve"] == pytest.approx(alone["1:float32"]["curve"], rel=2e-3)


def test_muon_is_another_curve_and_stays_close_in_bfloat16(alone: dict):
    """Masters keep their shape at stage 0, or Muon would refuse them."""
    exact, rounded = (alone[job]["curve"] for job in MUON)
    assert rounded == pytest.approx(exact, rel=1e-3)
    assert exact[:3] != pytest.approx(alone["1:float32"]["curve"][:3], rel=1e-3)


@pytest.mark.parametrize("job", [*FLOAT32, *BFLOAT16, *MUON])
def test_a_window_without_supervision_leaves_the_weights(alone: dict, pair: dict, job: str):
    for ranks in (alone, pair):
        if job in ranks:
            assert ranks[job]["nothing"] == {"loss": 0.0, "norm": 0.0, "kept": True}


@pytest.mark.parametrize("job", FLOAT32)
def test_only_the_draft_is_trained(alone: dict, job: str):
    counts = alone[job]["counts"]
    assert counts["frozen"] == ["draft.embed_tokens.weight"]
    assert counts["trainable"] == counts["all"] - counts["embedding"] > 0
    if job[0] != "3":  # stage 3 gives its optimizer the weights for the time of a step alone
        assert counts["optimizer"] == counts["trainable"]
    if job[0] == "0":  # ZeRO takes gradients away from the parameters
        assert set(counts["with_gradient"]) == set(counts["names"]) - set(counts["frozen"])


@pytest.mark.parametrize("job", FLOAT32)
def test_a_checkpoint_cannot_run_code(alone: dict, job: str):
    tampered = alone[job]["tampered"]
    assert tampered["trap"] and not tampered["ran"]
    kinds = ("model",) if job[0] == "0" else ("model", "optim")
    tricks = {"code": "asks to run", "pickle": "cannot be read", "zeros": "cannot be read"}
    assert set(tampered["said"]) == {f"{kind} {trick}" for kind in kinds for trick in tricks}
    for case, said in tampered["said"].items():
        assert tricks[case.split()[1]] in said and "_states.pt" in said and "\n" not in said
        assert "delete" in said


def test_what_old_pythons_pickle_of_a_zero_stage_is_read_and_no_other_attribute(tmp_path: Path):
    """Python before 3.11.4 pickles an enum's member as getattr(class, name)."""

    class Attribute:
        def __init__(self, owner: type, name: str):
            self.words = (owner, name)

        def __reduce__(self) -> tuple:
            return getattr, self.words

    path = tmp_path / "state.pt"
    torch.save({"stage": Attribute(ZeroStageEnum, "weights")}, path)
    assert read_weights(str(path))["stage"] is ZeroStageEnum.weights
    for owner, name in ((ZeroStageEnum, "mro"), (LossScaler, "__init__"), (torch.Tensor, "numpy")):
        torch.save({"stage": Attribute(owner, name)}, path)
        with pytest.raises(ConfigError, match=r"was refused|cannot be read"):
            read_weights(str(path))
