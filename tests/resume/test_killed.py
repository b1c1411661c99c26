"""SIGKILL at every point of a save: the old checkpoint or the new one is there, and the run ends as if nothing had happened."""

import json
import shutil
import signal

import pytest

from tests.resume import killed
from tests.resume.runs import train

SHORT = {"max_steps": 4}


@pytest.fixture(scope="module")
def whole(models, tmp_path_factory):
    out = tmp_path_factory.mktemp("whole")
    return out, train(models("qwen2"), out, **SHORT)


@pytest.mark.parametrize("point", killed.POINTS)
def test_in_the_third_save(model, whole, tmp_path, point):
    survives(model, whole, tmp_path / "run", point)


@pytest.mark.parametrize("point", killed.POINTS)
def test_over_the_checkpoint_of_a_run_that_had_come_further(model, whole, tmp_path, point):
    shutil.copytree(whole[0], tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoint-4")
    survives(model, whole, tmp_path / "run", point, resume=str(tmp_path / "run" / "checkpoint-2"))


def survives(model, whole, folder, point, resume=None):
    assert killed.run(point, step=3, model=model, out=str(folder), resume=resume, **SHORT) == -signal.SIGKILL
    last = folder / "checkpoint-3" / "trainer_state.json"
    assert (last.exists() and last.read_text().rstrip().endswith("}")) == (point == "after the last file")
    part = train(model, folder, resume=True, **SHORT)
    assert (part["weights"], part["logs"][:4]) == (whole[1]["weights"], whole[1]["logs"][:4])
    assert not list(folder.rglob("*.unfinished"))
    assert json.loads((folder / "checkpoint-4" / "trainer_state.json").read_text())["global_step"] == 4
