"""Phases that nest, steps that add up, and what a device could have done."""

import time

import pytest
import torch

from grpo_ext.flops import peak_flops, training_flops_per_token
from grpo_ext.timing import PHASES, PhaseTimes, StepTotals, timing_metrics


def test_an_inner_phase_is_not_the_outer_ones():
    times = PhaseTimes()
    with times.phase("forward_backward"):
        time.sleep(0.02)
        with times.phase("gen"):
            time.sleep(0.05)
    seconds = times.drain()
    assert 0.05 <= seconds["gen"] < 0.2
    assert 0.02 <= seconds["forward_backward"] < 0.05
    assert times.drain() == {}


def test_a_whole_phase_swallows_what_is_inside():
    times = PhaseTimes()
    with times.phase("evaluate", whole=True):
        with times.phase("gen"):
            time.sleep(0.01)
    with times.phase("gen"):
        pass
    seconds = times.drain()
    assert seconds["evaluate"] >= 0.01 > seconds["gen"]


def test_an_exception_leaves_the_nesting_right():
    times = PhaseTimes()
    with pytest.raises(KeyError), times.phase("a"), times.phase("b", whole=True):
        raise KeyError
    with times.phase("c"):
        pass
    assert set(times.drain()) == {"a", "b", "c"}


def test_metrics_are_per_step_and_a_step_holds_what_lies_between():
    totals = StepTotals(steps=2, seconds=8.0, tokens=1000, rollout_tokens=600, flops=4e12)
    metrics = timing_metrics({"gen": 3.0, "forward_backward": 5.0, "checkpoint": 2.0}, totals, peak_flops=1e12)
    assert metrics["timing_s/gen"] == 1.5
    assert metrics["timing_s/step"] == 5.0  # (8 + 2) / 2
    assert metrics["timing_s/old_logps"] == 0.0
    assert {f"timing_s/{name}" for name in PHASES} <= set(metrics)
    assert metrics["perf/tokens_per_s"] == 100.0
    assert metrics["perf/rollout_tokens_per_s"] == 200.0
    assert metrics["perf/mfu"] == pytest.approx(0.4)  # 4e12 in 10 s of 1e12 a second
    assert "perf/mfu" not in timing_metrics({}, totals)
    assert timing_metrics({"gen": 1.0}, StepTotals()) == {}


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989), ("NVIDIA H100 PCIe", 756), ("NVIDIA H200", 989), ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA L40S", 362), ("NVIDIA L4", 121), ("NVIDIA GeForce RTX 4090", 165), ("AMD Instinct MI300X", 1307),
        ("Quadro P400", None), ("NVIDIA A1000", None), ("", None),
    ],
)  # fmt: skip
def test_peak_by_device_name(name, tflops):
    assert peak_flops(name) == (tflops * 1e12 if tflops else None)


def test_frozen_weights_take_less():
    trained, frozen = torch.nn.Parameter(torch.zeros(10)), torch.nn.Parameter(torch.zeros(100), requires_grad=False)
    assert training_flops_per_token([trained, frozen]) == 6 * 10 + 4 * 100
