"""One of two ZeRO-3 ranks is killed: the other ends within a time limit, and what is printed says why. Nothing hangs."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import psutil
import pytest

from tests.distributed import launch
from tests.distributed.launch import environment, free_port, kill_tree, start_ranks

pytestmark = pytest.mark.distributed

LIMIT = 60  # seconds; measured: see docs/reliability.md
RUN = {"per_device_train_batch_size": 2, "max_steps": 2000, "save_strategy": "no", "logging_steps": 1000}


def wait_for(sign, alive, seconds=240):
    deadline = time.monotonic() + seconds
    while not (sign.exists() and sign.read_text()):
        assert alive() and time.monotonic() < deadline, f"no {sign.name}"
        time.sleep(0.1)
    return int(sign.read_text())


@pytest.mark.parametrize("victim", [1, pytest.param(0, marks=pytest.mark.slow)])
@pytest.mark.parametrize("engine", [False, pytest.param(True, marks=[pytest.mark.engine, pytest.mark.slow])])
def test_under_a_launcher_all_end(models, tmp_path, victim, engine):
    arguments = {"model": models("qwen2"), "out": str(tmp_path), "engine": engine, **RUN}
    launcher = start_ranks("tests.faults.jobs:train_on", tmp_path, zero3=True, processes=2, arguments=arguments)
    try:
        pids = [wait_for(tmp_path / f"pid{rank}", lambda: launcher.poll() is None) for rank in (0, 1)]
        time.sleep(1)
        os.kill(pids[victim], signal.SIGKILL)
        start = time.monotonic()
        status = launcher.wait(LIMIT)
        print(f"\nthe launcher ended {time.monotonic() - start:.1f} s after rank {victim} was killed")
    finally:
        if launcher.poll() is None:
            kill_tree(launcher.pid)
    assert status != 0
    assert [pid for pid in pids if alive(pid)] == []
    output = (tmp_path / "output").read_text(errors="replace")
    assert f"Signal 9 (SIGKILL) received by PID {pids[victim]}" in output
    assert f"rank      : {victim} (local_rank: {victim})" in output


def test_without_one_the_other_notices_by_itself(models, tmp_path):
    """As on two hosts, where no launcher sees both: a rank whose neighbour closes its connections raises."""
    arguments = {"model": models("qwen2"), "out": str(tmp_path), **RUN}
    (tmp_path / "arguments.json").write_text(json.dumps(arguments))
    (tmp_path / "ds.json").write_text(json.dumps(launch.ZERO3))
    zero3 = {"USE_DEEPSPEED": "true", "DEEPSPEED_CONFIG_FILE": str(tmp_path / "ds.json"), "DEEPSPEED_ZERO3_INIT": "true"}
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = []
    try:
        for rank in (0, 1):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank), **shared}
            with open(tmp_path / f"output{rank}", "w") as output:
                ranks.append(
                    subprocess.Popen(
                        [sys.executable, launch.__file__, "tests.faults.jobs:train_on", str(tmp_path)],
                        cwd=launch.ROOT, env={**environment(), **own, **{f"ACCELERATE_{name}": value for name, value in zero3.items()}}, stdout=output, stderr=subprocess.STDOUT,
                    )
                )  # fmt: skip
        for rank in (0, 1):
            wait_for(tmp_path / f"pid{rank}", lambda: all(each.poll() is None for each in ranks))
        time.sleep(1)
        ranks[0].kill()
        start = time.monotonic()
        status = ranks[1].wait(LIMIT)
        print(f"\nrank 1 ended {time.monotonic() - start:.1f} s after rank 0 was killed")
    finally:
        for each in ranks:
            each.kill()
            each.wait()
    assert status != 0
    output = (tmp_path / "output1").read_text(errors="replace")
    assert re.search(r"Connection (closed|reset) by peer.*Check the logs of the remote worker", output)
    # Which of a step's collectives it is depends on when the neighbour died; all of them lie inside the training loop.
    assert "transformers/trainer.py" in output


@pytest.mark.slow
@pytest.mark.engine
def test_a_rank_of_a_tensor_parallel_engine_that_raises(models, tmp_path):
    """Its neighbour is inside the engine and cannot be told: the launcher ends it."""
    run = {
        "gradient_accumulation_steps": 2,
        "steps_per_generation": 2,
        "num_iterations": 1,
        "ranks": True,
        "save_strategy": "no",
    }
    run |= {"per_device_train_batch_size": 2, "vllm_tensor_parallel_size": 2, "fault": {"rank": 1, "batches": [1]}}
    arguments = {"model": models("qwen2"), "out": str(tmp_path), "runs": {"run": run}, "leave": True}
    launcher = start_ranks("tests.faults.jobs:engine_faults", tmp_path, zero3=True, processes=2, arguments=arguments)
    try:
        start = time.monotonic()
        status = launcher.wait(240)
        print(f"\nended {time.monotonic() - start:.1f} s after it was started")
    finally:
        if launcher.poll() is None:
            kill_tree(launcher.pid)
    output = (tmp_path / "output").read_text(errors="replace")
    assert status != 0 and "which have lost step with each other, so it cannot be asked again" in output


def alive(pid):
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
