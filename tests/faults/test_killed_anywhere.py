"""SIGKILL at a random point of a run, with a checkpoint at every step: resumed, it ends as the run that was left alone."""

import multiprocessing
import random
import time

import pytest

from tests.distributed.launch import forget_launcher
from tests.faults.signs import Sign
from tests.resume.runs import train

NORMAL, MORE = 5, 20
SEEDS = [pytest.param(n, marks=[pytest.mark.slow] if n >= NORMAL else []) for n in range(NORMAL + MORE)]


@pytest.fixture(scope="module")
def whole(models, tmp_path_factory):
    """The run that is left alone, and the seconds it takes from its first complete checkpoint on."""
    out = tmp_path_factory.mktemp("whole")
    train(models("qwen2"), out / "warm", max_steps=1)
    run = train(models("qwen2"), out)
    first, last = (out / f"checkpoint-{step}" / "trainer_state.json" for step in (1, 12))
    return run, last.stat().st_mtime - first.stat().st_mtime


def child(arguments):
    forget_launcher()
    train(before=lambda trainer: trainer.add_callback(Sign(arguments["out"], stay=True)), **arguments)


def killed_after(delay, model, out, resume=None):
    """Start the run in a process of its own and kill it `delay` seconds after its first complete checkpoint."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.faults.test_killed_anywhere"])
    process = context.Process(target=child, args=({"model": model, "out": str(out), "resume": resume},))
    process.start()
    deadline = time.monotonic() + 120
    while not (out / "checkpoint-1" / "trainer_state.json").exists() or (resume and not (out / "step0").exists()):
        assert process.is_alive() and time.monotonic() < deadline
        time.sleep(0.005)
    time.sleep(delay)
    process.kill()
    process.join()
    assert process.exitcode == -9
    step = (out / "step0").read_text()
    (out / "step0").unlink()
    return int(step)


def assert_same(run, part):
    pairs = zip(run["logs"], part["logs"], strict=True)
    different = {a["step"]: sorted(key for key in {*a, *b} if a.get(key) != b.get(key)) for a, b in pairs if a != b}
    assert (different, part["weights"]) == ({}, run["weights"])


@pytest.mark.parametrize("seed", SEEDS)
def test_resumed_from_anywhere(model, whole, tmp_path, seed):
    run, seconds = whole
    out = tmp_path / "run"
    step = killed_after(random.Random(seed).uniform(0, seconds), model, out)
    complete = [int(path.parent.name.rpartition("-")[2]) for path in out.glob("checkpoint-*/trainer_state.json")]
    print(f"\nkilled about step {step}, newest checkpoint {max(complete)}")
    part = train(model, out, resume=True)
    assert_same(run, part)
    assert not list(out.glob("checkpoint-*/*.unfinished"))


@pytest.mark.slow
def test_killed_again_and_again(model, whole, tmp_path):
    run, seconds = whole
    out, resume = tmp_path / "run", None
    for delay in (0.2, 0.3, 0.25):
        killed_after(delay * seconds, model, out, resume)
        resume = True
    assert_same(run, train(model, out, resume=True))
