"""The GPU benchmark: its whole path on tiny shapes, on whatever device is here, and its traps."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).resolve().parent))  # the benchmark's modules import each other

import gpu
from gpu_decoding import DECODE_SHAPES
from gpu_report import Case, Figure, Taken, bars_of
from machine import peak_flops
from problem import Place, Problem
from workload import TINY

from models.attention import Gradients, Kernel, Question
from models.kernels import CPU_FLASH, PLAIN

BF16 = Place(torch.device("cpu"), torch.bfloat16)
SMALL = Problem(replace(TINY, batch=1, tokens=32))


def test_the_path_runs_and_every_printed_figure_is_in_the_json(tmp_path: Path):
    target = tmp_path / "gpu.json"
    run = subprocess.run(
        [
            sys.executable,
            Path(__file__).with_name("gpu.py"),
            "--tiny",
            "--shares",
            "40",
            "--json",
            target,
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    figures = json.loads(target.read_text())
    cases = figures["cases"]
    kernels = {case["kernel"] for case in cases}
    assert PLAIN.name in kernels and len(kernels) >= 2
    assert [case["shape"]["tokens"] for case in cases] == [32] * len(kernels) + [64] * len(kernels)
    for case in cases:
        assert case["tokens_per_s"] > 0 and case["extra_bytes"] >= 0 and not case["error"]
        assert 0 < case["loss"] < 100
        assert 0 < case["mfu_without_attention"] < case["mfu"] < 1
        assert case["flops"] > case["attention_flops"] > 0
    assert len(figures["gradient_errors"]) == 2 * len(kernels)  # each recomputed, too
    assert all(0 < error <= 1e-2 for error in figures["gradient_errors"].values())
    assert figures["matrix_product_flops"] > 0
    decoding = figures["decoding"]
    assert {one["tokens"] for one in decoding["steps"]} == {1, 5, 16}
    assert all(one["median_seconds"] > 0 and one["error"] < 0.1 for one in decoding["steps"])
    assert {one["shape"] for one in decoding["exact"]} == {"plain", *DECODE_SHAPES}
    for one in (*decoding["answers"], *decoding["exact"]):
        assert one["tokens_per_second"] > 0
    assert all(one["same"] for one in decoding["exact"])
    assert "MFU" in run.stdout and "Bars" in run.stdout


def dropping_key_gradients(asked: Question, whole, grad) -> Gradients:
    grads = CPU_FLASH.backward(asked, whole, grad)
    return replace(grads, key=torch.zeros_like(grads.key))


def test_a_wrong_kernel_is_far_from_parity(monkeypatch: pytest.MonkeyPatch):
    wrong = Kernel("wrong", CPU_FLASH.forward, dropping_key_gradients)
    monkeypatch.setattr(gpu, "kernels_of", lambda device, tokens: [wrong])
    errors = gpu.parity(torch.device("cpu"))
    assert not any(bar.reached for bar in bars_of([], errors, goal=False))


def figures(budget: gpu.Budget) -> list[Figure]:
    return list(gpu.Bench(BF16, 1e11, budget).figures_of("tiny", [SMALL], compiled=False))


def test_what_does_not_fit_is_tried_recomputed_and_said(monkeypatch: pytest.MonkeyPatch):
    def measure(module, batch):
        if module.kernel is PLAIN or not module.recompute:
            raise torch.OutOfMemoryError("no room")
        return Taken([0.5], 1, 1.0)

    monkeypatch.setattr(gpu, "measure", measure)
    found = figures(gpu.Budget(60, 1e11))
    tried = [(f.case.kernel, f.case.problem.recompute, f.error) for f in found]
    assert tried == [
        (CPU_FLASH.name, False, "does not fit"),
        (CPU_FLASH.name, True, ""),
        (PLAIN.name, False, "does not fit"),
        (PLAIN.name, True, "does not fit"),
    ]


def test_it_stops_when_the_minutes_are_over():
    assert [figure.error for figure in figures(gpu.Budget(0, 1e11))] == ["no time left"]


def test_the_goal_is_held_against_the_best_kernel_at_8k():
    long = Problem(replace(gpu.LLAMA_8B, tokens=8192))
    flops = long.flops + long.attention_flops
    taken = [Figure(Case("8B", long, "slow"), 1e15, Taken([flops / 0.3e15], 1, 1.0))]
    assert [bar.reached for bar in bars_of(taken, {}, goal=True)] == [False]
    taken.append(Figure(Case("8B", long, "fast"), 1e15, Taken([flops / 0.6e15], 1, 1.0)))
    assert [bar.reached for bar in bars_of(taken, {}, goal=True)] == [True]
    assert not bars_of(taken, {}, goal=False)


def test_the_peak_is_that_of_the_device_at_hand():
    assert peak_flops("NVIDIA H200") == peak_flops("NVIDIA H100 80GB HBM3") == 989e12
    assert peak_flops("NVIDIA A100-SXM4-80GB") == 312e12
    assert peak_flops("NVIDIA H100 PCIe") == 756e12
    assert peak_flops("NVIDIA GB200") is None
