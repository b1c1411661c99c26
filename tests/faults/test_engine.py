"""The engine raises in `generate`: once, and training goes on; always, and there is a checkpoint before the error."""

import re

import pytest

from grpo_ext.rollout.retry import EngineFailed, tried_twice
from tests.distributed.launch import run_ranks

# A generation batch of 4 slices is 2 optimizer steps.
RUN = {"gradient_accumulation_steps": 2, "steps_per_generation": 4, "num_iterations": 1, "rollout_seed": 1, "max_steps": 6}
RUN["save_steps"] = 9  # no checkpoint but the last one
RETRIES = "rollout/generate_retries"


# ---- agreement, without an engine ------------------------------------------------------------------------------------
class Asked:
    """Raises at the calls named, else answers."""

    def __init__(self, *fails):
        self.fails, self.calls = fails, 0

    def __call__(self):
        self.calls += 1
        if self.calls in self.fails:
            raise OSError(f"call {self.calls}")
        return "rollouts"


def alone(fault):
    return [fault]


def test_one_fault_costs_one_more_try():
    attempt, recovered = Asked(1), []
    assert tried_twice(attempt, lambda: recovered.append(attempt.calls), alone, True) == ("rollouts", 1)
    assert (attempt.calls, recovered) == (2, [1])
    assert tried_twice(attempt, recovered.clear, alone, True) == ("rollouts", 0)
    assert recovered == [1]


def test_two_faults_end_it():
    with pytest.raises(EngineFailed, match=r"twice: OSError: call 2\.") as error:
        tried_twice(Asked(1, 2), lambda: None, alone, False)
    assert not error.value.together and isinstance(error.value.__cause__, OSError)


def test_a_rank_that_did_well_keeps_what_it_has_and_stops_with_the_others():
    attempt, answers = Asked(), iter([[None, "OSError: full"], [None, None]])
    assert tried_twice(attempt, lambda: None, lambda fault: next(answers), True) == ("rollouts", 1)
    assert attempt.calls == 1
    answers = iter([[None, "OSError: full"], [None, "OSError: full"]])
    with pytest.raises(EngineFailed, match=r"twice: rank 1: OSError: full\.") as error:
        tried_twice(attempt, lambda: None, lambda fault: next(answers), True)
    assert attempt.calls == 2 and error.value.together


# ---- the real one ----------------------------------------------------------------------------------------------------
def logs(run, *without):
    return [{key: value for key, value in entry.items() if key not in without} for entry in run["logs"]]


def assert_checkpointed(run, out, step):
    assert (run["error"], run["step"]) == ("EngineFailed", step)
    assert re.search(rf"the engine is out of order\. .*checkpoint-{step} holds the run up to here", run["text"]), run["text"]
    assert (out / f"checkpoint-{step}" / "trainer_state.json").exists()


def on_one_rank(models, tmp_path, runs):
    arguments = {"model": models("qwen2"), "out": str(tmp_path), "runs": runs}
    return run_ranks("tests.faults.jobs:engine_faults", tmp_path, zero3=False, processes=1, **arguments)[0]


@pytest.mark.engine
def test_one_rank(models, tmp_path):
    runs = {
        "whole": RUN,
        "once": {**RUN, "fault": {"rank": None, "batches": [1]}},
        "always": {**RUN, "fault": {"rank": None, "batches": [1], "always": True}},
        "resumed": {**RUN, "folder": "always", "resume": True},
    }
    told = on_one_rank(models, tmp_path, runs)
    assert told["once"]["weights"] == told["whole"]["weights"]
    assert logs(told["once"], RETRIES) == logs(told["whole"])
    assert [entry.get(RETRIES) for entry in told["once"]["logs"]] == [None, None, 1.0, None, None, None, None]
    assert_checkpointed(told["always"], tmp_path / "always", 2)
    assert told["resumed"]["weights"] == told["whole"]["weights"]
    assert logs(told["resumed"]) == logs(told["whole"])


@pytest.mark.slow
@pytest.mark.engine
def test_where_a_checkpoint_is_there_or_cannot_be(models, tmp_path):
    middle = {
        **RUN,
        "gradient_accumulation_steps": 3,
        "steps_per_generation": 2,
    }  # the second batch begins within the first window
    always = {"rank": None, "batches": [1], "always": True}
    runs = {
        "saved already": {**RUN, "save_steps": 2, "fault": always},
        "nothing to save": {**middle, "fault": always},
        "whole": middle,
        "within a window": {**middle, "fault": {**always, "batches": [2]}},
        "within, resumed": {**middle, "folder": "within a window", "resume": True},
    }
    told = on_one_rank(models, tmp_path, runs)
    assert_checkpointed(told["saved already"], tmp_path / "saved already", 2)
    assert told["nothing to save"]["step"] == 0 and "No optimizer step was taken" in told["nothing to save"]["text"]
    assert_checkpointed(told["within a window"], tmp_path / "within a window", 1)
    assert told["within, resumed"]["weights"] == told["whole"]["weights"]
    assert logs(told["within, resumed"]) == logs(told["whole"])


@pytest.mark.engine
@pytest.mark.distributed
def test_two_ranks_decide_alike(models, tmp_path):
    run = {**RUN, "ranks": True, "per_device_train_batch_size": 2}
    runs = {
        "whole": run,
        "once": {**run, "fault": {"rank": 1, "batches": [1, 2]}},
        "always": {**run, "fault": {"rank": 1, "batches": [1], "always": True}},
        "resumed": {**run, "folder": "always", "resume": True},
    }
    told = run_ranks("tests.faults.jobs:engine_faults", tmp_path, model=models("qwen2"), out=str(tmp_path), runs=runs)
    for ours in told:
        assert ours["once"]["weights"] == ours["resumed"]["weights"] == told[0]["whole"]["weights"]
        assert_checkpointed(ours["always"], tmp_path / "always", 2)
        assert "twice: rank 1: RuntimeError" in ours["always"]["text"]
    assert [entry.get(RETRIES) for entry in told[0]["once"]["logs"]] == [None, None, 1.0, None, 1.0, None, None]
    assert logs(told[0]["resumed"]) == logs(told[0]["whole"])


@pytest.mark.engine
@pytest.mark.distributed
def test_a_tensor_parallel_engine_is_not_asked_again(models, tmp_path):
    run = {**RUN, "ranks": True, "per_device_train_batch_size": 2, "vllm_tensor_parallel_size": 2}
    runs = {"always": {**run, "fault": {"rank": None, "batches": [1]}}}
    for told in run_ranks("tests.faults.jobs:engine_faults", tmp_path, model=models("qwen2"), out=str(tmp_path), runs=runs):
        assert (told["always"]["error"], told["always"]["step"]) == ("EngineFailed", 2)
        assert "spans 2 ranks, which have lost step with each other, so it cannot be asked again" in told["always"]["text"]
