"""Killed by SIGKILL and resumed, with the real engine, on one rank and on two under ZeRO-3, full and LoRA."""

import json

import pytest

from tests.distributed.launch import kill_ranks, run_ranks

pytestmark = [pytest.mark.engine, pytest.mark.distributed]

# The newest checkpoint at the kill, 6, stands in the middle of the second generation batch (4 optimizer steps each).
RUN = {"engine": True, "save_steps": 2, "rollout_seed": 1}
STALL = 7
SLOW = pytest.mark.slow
ONE = [
    pytest.param({}, id="full"),
    pytest.param({"adapter": "lora", "beta": 0.1}, id="lora", marks=SLOW),
    pytest.param({"rollout_seed": None}, id="the engine's own generator", marks=SLOW),
    pytest.param({"evaluate": True, "eval_strategy": "steps", "eval_steps": 2}, id="evaluated", marks=SLOW),
]
TWO = [
    pytest.param({"engine": False}, id="recorded rollouts"),
    pytest.param({"beta": 0.1}, id="full", marks=SLOW),
    pytest.param({"adapter": "lora"}, id="lora", marks=SLOW),
    pytest.param({"vllm_tensor_parallel_size": 2}, id="one engine", marks=SLOW),
]


def killed_and_resumed(models, tmp_path, *, zero3, processes, **config):
    """Reports of a run that was left alone, and of one that was killed and resumed in new processes, by rank."""
    launch = {"zero3": zero3, "processes": processes, "model": models("qwen2")}
    run, whole, stopped = {**RUN, "ranks": zero3, **config}, tmp_path / "whole", tmp_path / "stopped"
    stopped.mkdir()
    runs = [{**run, "out": str(whole)}, {**run, "out": str(stopped), "stall": STALL}]
    signs = [stopped / f"stalled{rank}" for rank in range(processes)]
    kill_ranks("tests.resume.runs:in_turn", tmp_path / "a", signs, runs=runs, **launch)
    assert sorted(path.name for path in stopped.glob("checkpoint-*")) == ["checkpoint-2", "checkpoint-4", "checkpoint-6"]
    again = [{**run, "out": str(stopped), "resume": True}]
    run_ranks("tests.resume.runs:in_turn", tmp_path / "b", runs=again, **launch)
    return [[json.loads((out / f"report{r}.json").read_text()) for r in range(processes)] for out in (whole, stopped)]


def assert_same(whole, resumed):
    for a, b in zip(whole, resumed, strict=True):
        assert a["step"] == b["step"] == 12
        assert a["weights"] == b["weights"] == whole[0]["weights"]
        assert a["logs"] == b["logs"]


@pytest.mark.parametrize("config", ONE)
def test_one_rank(models, tmp_path, config):
    assert_same(*killed_and_resumed(models, tmp_path, zero3=False, processes=1, **config))


@pytest.mark.parametrize("config", TWO)
def test_two_ranks_under_zero3(models, tmp_path, config):
    config = {"per_device_train_batch_size": 2, **config}
    whole, resumed = killed_and_resumed(models, tmp_path, zero3=True, processes=2, **config)
    assert all(report["distributed_type"] == "DEEPSPEED" and report["partitioned"] > 0 for report in [*whole, *resumed])
    assert_same(whole, resumed)


@SLOW
def test_one_rank_and_two_sample_the_same(models, tmp_path):
    """12 rollouts in groups of 4: with two ranks the second group lies on both."""
    run = {"rollout_seed": 1, "gradient_accumulation_steps": 2, "steps_per_generation": 2, "num_iterations": 1}
    found = []
    for ranks in (1, 2):
        reports = run_ranks(
            "tests.resume.runs:sampled", tmp_path / f"{ranks}", zero3=ranks == 2, processes=ranks, model=models("qwen2"),
            out=str(tmp_path / f"out{ranks}"), ranks=ranks == 2, per_device_train_batch_size=6 // ranks, **run,
        )  # fmt: skip
        found.append(sorted(rollout for report in reports for rollout in report))
    assert len(found[0]) == 12 and len({tuple(completion) for _, completion in found[0]}) > 6
    assert found[0] == found[1]
