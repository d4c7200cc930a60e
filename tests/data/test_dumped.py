"""States that others left in files: packed as our own, and refused with the reason."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from conf.runtime import RankInfo
from conf.schema import (
    CaptureSection,
    ConfigError,
    Device,
    JobError,
    MissingStates,
    Precision,
    RunConfig,
    StateBackend,
    StateDtype,
    VerifierSection,
)
from data.capture import capture
from data.fp8 import quantise
from data.reader import ShardReader
from data.records import PreparedData, TokenizedSample

ALONE = RankInfo(0, 1, 0)
AUX = [2, 4, 5]


@pytest.fixture
def cfg(tiny_verifier: Path, tmp_path: Path) -> RunConfig:
    cfg = RunConfig()
    cfg.run.cache = str(tmp_path / "cache")
    cfg.run.device = Device.cpu
    cfg.verifier = VerifierSection(path=str(tiny_verifier), dtype=Precision.float32)
    cfg.capture = CaptureSection(dtype=StateDtype.float32, batch_tokens=128)
    return cfg


@pytest.fixture
def streams(tiny_verifier: Path, prepared: PreparedData) -> list[list[Tensor]]:
    """By sample: the stream [T, D] after n = 0..8 layers, all before the final norm."""
    model = AutoModelForCausalLM.from_pretrained(tiny_verifier, dtype=torch.float32)
    kept: list[Tensor] = []
    model.model.norm.register_forward_pre_hook(lambda _module, args: kept.append(args[0][0]))
    found = []
    for sample in prepared.samples:
        with torch.no_grad():
            states = model(sample.input_ids[None], output_hidden_states=True).hidden_states
        found.append([*(state[0] for state in states[:-1]), kept.pop()])
    return found


def dump(
    folder: Path,
    samples: list[TokenizedSample],
    streams: list[list[Tensor]],
    layers: list[int],
    name: str = "hs_{}.safetensors",
) -> Path:
    """What vLLM's connector and speculators write, the files in another order than the samples."""
    folder.mkdir(exist_ok=True)
    for place, (sample, known) in enumerate(reversed(list(zip(samples, streams, strict=True)))):
        tensors = {
            "token_ids": sample.input_ids.clone(),
            "hidden_states": torch.stack([known[n] for n in layers], 1),
        }
        save_file(tensors, folder / name.format(place))
    return folder


def reading(cfg: RunConfig, folder: Path, **changes) -> RunConfig:
    section = replace(cfg.capture, backend=StateBackend.dumped, dumped=str(folder), **changes)
    return replace(cfg, capture=section)


def test_packed_states_are_our_own(cfg, prepared, streams, tmp_path: Path, monkeypatch, capsys):
    own = ShardReader(capture(cfg, prepared, ALONE))
    folder = dump(tmp_path / "dump", prepared.samples, streams, [*AUX, 8])
    capsys.readouterr()
    found = ShardReader(capture(reading(cfg, folder), prepared, ALONE))
    assert "20 samples have states there, 0 have none" in capsys.readouterr().out
    assert found.folder.name != own.folder.name  # another engine's kernels, another capture
    assert found.manifest.backend == "dumped" and own.manifest.backend == "transformers"
    for index in range(len(own)):
        a, b = own.read(index), found.read(index)
        assert a.sample.id == b.sample.id
        torch.testing.assert_close(a.aux, b.aux, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(a.last, b.last, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(a.lse, b.lse, atol=1e-5, rtol=1e-5)
        assert torch.equal(a.argmax, b.argmax)


def test_layers_are_not_run_for_packing(cfg, prepared, streams, tmp_path: Path, monkeypatch):
    folder = dump(tmp_path / "dump", prepared.samples, streams, [*AUX, 8])
    monkeypatch.setattr("data.backends.check_streams", lambda *_: None)
    monkeypatch.setattr(LlamaDecoderLayer, "forward", None)  # would fail
    capture(reading(cfg, folder), prepared, ALONE)


def test_float8_files_with_scales(cfg, prepared, streams, tmp_path: Path):
    """As speculators' connector writes them: one scale a token for all of its states."""
    folder = dump(tmp_path / "dump", prepared.samples, streams, [*AUX, 8])
    for path in folder.iterdir():
        tensors = load_file(path)
        values, scales = quantise(tensors["hidden_states"].flatten(1), 1)
        tensors["hidden_states"] = values.view_as(tensors["hidden_states"])
        tensors["hidden_states_scales"] = scales[..., None]
        save_file(tensors, path)
    found = ShardReader(capture(reading(cfg, folder), prepared, ALONE))
    own = ShardReader(capture(cfg, prepared, ALONE))
    for index in range(len(own)):
        a, b = own.read(index), found.read(index)
        assert (a.aux - b.aux).norm() < 0.05 * a.aux.norm()


# ---- wrong states are refused ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([3, 5, 6, 8], r"capture\.dumped=.*after 2 layers is the one after 3"),
        ([1, 3, 4, 8], r"after 2 layers is the one after 1"),
        ([2, 5, 4, 8], r"after 4 layers is the one after 5"),  # not ascending
        ([2, 4, 5, 7], r"logits from its last state are .* 8 layers, before the final norm"),
    ],
)
def test_layers_that_are_off_are_refused(layers, message, cfg, prepared, streams, tmp_path):
    folder = dump(tmp_path / "dump", prepared.samples, streams, layers)
    with pytest.raises(JobError, match=message):
        capture(reading(cfg, folder, tolerance=0.02), prepared, ALONE)
    assert not list(Path(cfg.run.cache).glob("capture-*/shards/*"))


def test_a_normed_last_state_is_refused(cfg, prepared, streams, tmp_path: Path, tiny_verifier):
    """The library's own last hidden state is after the norm; applied twice it is not the same."""
    model = AutoModelForCausalLM.from_pretrained(tiny_verifier, dtype=torch.float32)
    model.model.norm.weight.data.copy_(torch.linspace(0.2, 3, 64))
    shutil.copytree(tiny_verifier, tmp_path / "gain")
    model.save_pretrained(tmp_path / "gain")
    cfg.verifier.path = str(tmp_path / "gain")
    normed = [[*known[:8], model.model.norm(known[8]).detach()] for known in streams]
    folder = dump(tmp_path / "dump", prepared.samples, normed, [*AUX, 8])
    with pytest.raises(JobError, match="before the final norm"):
        capture(reading(cfg, folder), prepared, ALONE)
    capture(
        reading(cfg, dump(tmp_path / "raw", prepared.samples, streams, [*AUX, 8])), prepared, ALONE
    )


def test_states_of_another_sample_are_refused(cfg, prepared, streams, tmp_path: Path):
    """One sequence's ids beside states that were sliced from the batch at another place."""
    cut = [*streams]
    cut[0] = [rows.roll(3, 0) for rows in streams[0]]
    folder = dump(tmp_path / "dump", prepared.samples, cut, [*AUX, 8])
    with pytest.raises(JobError, match=r"is .* away from the verifier's own"):
        capture(reading(cfg, folder), prepared, ALONE)


def test_states_that_are_not_finite_are_refused(cfg, prepared, streams, tmp_path: Path):
    """In the one sample of twenty that nobody compares."""
    spoilt = [*streams]
    spoilt[7] = [rows * float("inf") for rows in streams[7]]
    folder = dump(tmp_path / "dump", prepared.samples, spoilt, [*AUX, 8])
    with pytest.raises(
        ConfigError, match=r"hs_12\.safetensors: the states of sample sample-7 are not fin"
    ):
        capture(reading(cfg, folder), prepared, ALONE)


@pytest.mark.parametrize(
    ("layers", "change", "message"),
    [
        ([2, 4, 8], lambda x: x, r"3 states a token, must be 4: verifier\.aux_layers=\[2, 4, 5\]"),
        ([*AUX, 8], lambda x: x[..., :32], r"width 32, must be 64"),
        ([*AUX, 8], lambda x: x.bfloat16(), r"are bfloat16, must be float32"),
    ],
)
def test_another_layout_is_named_with_both_values(
    layers, change, message, request: pytest.FixtureRequest, cfg, tmp_path: Path
):
    prepared, streams = (request.getfixturevalue(name) for name in ("prepared", "streams"))
    changed = [[change(rows).contiguous() for rows in known] for known in streams]
    folder = dump(tmp_path / "dump", prepared.samples, changed, layers)
    with pytest.raises(ConfigError, match=message):
        capture(reading(cfg, folder), prepared, ALONE)


# ---- files that are missing or unusable -----------------------------------------------------


def spoil(folder: Path, samples: list[TokenizedSample], streams: list[list[Tensor]]) -> None:
    """Sample 0 lacks a state, sample 1's file is torn, sample 2 was cut, sample 3 has none."""
    dump(folder, samples, streams, [*AUX, 8])
    files = [folder / f"hs_{len(samples) - 1 - place}.safetensors" for place in range(4)]
    states = torch.stack([streams[0][n] for n in (*AUX, 8)], 1)
    save_file({"token_ids": samples[0].input_ids, "hidden_states": states[:-1].clone()}, files[0])
    files[1].write_bytes(files[1].read_bytes()[:-100])
    states = torch.stack([streams[2][n] for n in (*AUX, 8)], 1)
    cut = {"token_ids": samples[2].input_ids[:-5].clone(), "hidden_states": states[:-5].clone()}
    save_file(cut, files[2])
    files[3].unlink()


def test_missing_states_are_found_at_open_time(cfg, prepared, streams, tmp_path: Path, monkeypatch):
    spoil(tmp_path / "dump", prepared.samples, streams)
    monkeypatch.setattr("data.backends.check_streams", None)  # it never comes to that
    message = (
        r"4 of 20 samples have no usable states there, the first is sample-0 with 5 tokens "
        r"\(1 with not a whole safetensors file \(first hs_18.*1 with fewer or more states"
    )
    with pytest.raises(ConfigError, match=message):
        capture(reading(cfg, tmp_path / "dump"), prepared, ALONE)


def test_missing_states_may_be_computed(cfg, prepared, streams, tmp_path: Path, capsys):
    own = ShardReader(capture(cfg, prepared, ALONE))
    spoil(tmp_path / "dump", prepared.samples, streams)
    part = reading(cfg, tmp_path / "dump", missing=MissingStates.compute)
    found = ShardReader(capture(part, prepared, ALONE))
    assert "16 samples have states there, 4 have none" in capsys.readouterr().out
    assert len(found) == len(own) == 20
    for index in range(20):
        torch.testing.assert_close(own.read(index).aux, found.read(index).aux, atol=1e-5, rtol=1e-5)


def again(folder: Path) -> None:
    """The same sequences, files and sizes, other states: another dtype's rounding, say."""
    for path in folder.iterdir():
        tensors = load_file(path)
        save_file({**tensors, "hidden_states": tensors["hidden_states"] * 1.001}, path)


def test_another_dump_of_equal_sizes_is_told(cfg, prepared, streams, tmp_path: Path):
    folder = dump(tmp_path / "dump", prepared.samples, streams, [*AUX, 8])
    capture(reading(cfg, folder), prepared, ALONE)
    again(folder)
    with pytest.raises(JobError, match=r"its files give \w{12} and the cache was packed from"):
        capture(reading(cfg, folder), prepared, ALONE)


def test_shards_of_another_dump_are_not_taken_over(cfg, prepared, streams, tmp_path: Path):
    """The capture was killed, so there is no manifest; those of the same dump are."""
    folder = dump(tmp_path / "dump", prepared.samples, streams, [*AUX, 8])
    made = capture(reading(cfg, folder), prepared, ALONE)

    def written() -> dict[str, int]:
        (made / "manifest.json").unlink()
        capture(reading(cfg, folder), prepared, ALONE)
        return {path.name: path.stat().st_ino for path in (made / "shards").iterdir()}

    before = {path.name: path.stat().st_ino for path in (made / "shards").iterdir()}
    assert written() == before
    states = ShardReader(made).read(0).aux
    again(folder)
    written()
    assert torch.equal(ShardReader(made).read(0).aux, states * 1.001)


def test_a_folder_that_is_not_there_is_named(cfg, prepared, tmp_path: Path):
    with pytest.raises(
        ConfigError, match=r"capture\.dumped=.*nowhere: no such folder; .*token_ids"
    ):
        capture(reading(cfg, tmp_path / "nowhere"), prepared, ALONE)


def test_another_dump_in_the_same_folder_is_told(cfg, prepared, streams, tmp_path: Path):
    folder = dump(tmp_path / "dump", prepared.samples, streams, [*AUX, 8])
    made = capture(reading(cfg, folder), prepared, ALONE)
    (folder / "hs_0.safetensors").rename(folder / "other.safetensors")
    with pytest.raises(JobError, match=r"give \w{12} and the cache was packed from \w{12}"):
        capture(reading(cfg, folder), prepared, ALONE)
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    assert capture(reading(cfg, folder), prepared, ALONE) == made  # packed is packed
