"""A run that ends within an optimizer window or an evaluation: what those had collected is neither lost nor counted twice."""

import pytest
from transformers import TrainerCallback
from transformers.trainer_jit_checkpoint import JITCheckpointCallback

from grpo_ext.resume.state import read_state
from grpo_ext.rollout.retry import EngineFailed
from tests.resume.runs import Replayed, make, report, train

# A window is two generation batches, so the second of them fails with half of the window's losses and counts collected.
WINDOWS = {"gradient_accumulation_steps": 4, "steps_per_generation": 2, "num_iterations": 1, "logging_steps": 3, "max_steps": 5}
EVALUATED = {"evaluate": True, "eval_strategy": "steps", "eval_steps": 2, "max_steps": 8, "logging_steps": 3}


class Failing(Replayed):
    """Recorded rollouts whose engine fails, on all ranks, at one generation batch."""

    def __init__(self, recorded, mode, batch):
        vars(self).update(vars(recorded))
        self.at = mode, batch

    def __call__(self, prompts, trainer):
        mode = "train" if trainer.model.training else "eval"
        if (mode, trainer.generations.number(mode)) == self.at:
            raise EngineFailed("The engine is out of order.", together=True)
        return super().__call__(prompts, trainer)


class At(TrainerCallback):
    """Does something at an event of an optimizer step (the step that is about to be over)."""

    def __init__(self, event, step, do):
        self.step, self.do = step, do
        setattr(self, event, self._event)

    def _event(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            self.do()


def fails(model, out, mode, batch, **config):
    trainer = make(model, out, **config)
    trainer.rollout_func = Failing(trainer.rollout_func, mode, batch)
    with pytest.raises(EngineFailed, match=r"holds the run up to here"):
        trainer.train()
    return trainer


LATER = {"save_steps": 9}  # than anything fails: no checkpoint but the last one
RUNS = {
    "first of its window": ({**WINDOWS, "kl_in_reward": True, "kl_in_reward_target": 1e-3, "kl_in_reward_horizon": 64}, 4),
    "second": ({**WINDOWS, "kl_in_reward": True, "kl_in_reward_target": 1e-3, "kl_in_reward_horizon": 64}, 5),
    # Micro-steps 6, 7 and 8 are a window: the last two uses of a batch, and the first of the next.
    "last uses before it": ({"gradient_accumulation_steps": 3, "adapter": "lora", "dropout": 0.3, "max_steps": 4}, 1),
}


@pytest.mark.parametrize("name", RUNS)
def test_the_engine_fails_within_a_window(model, tmp_path, name):
    config, batch = RUNS[name]
    whole = train(model, tmp_path / "whole", **config)
    assert fails(model, tmp_path / "cut", "train", batch, **{**config, **LATER}).state.global_step == 2
    assert train(model, tmp_path / "cut", resume=True, **config) == whole


def test_the_engine_fails_within_an_evaluation(model, tmp_path):
    """At step 4, in the second of four batches: nothing of it stays."""
    fails(model, tmp_path / "cut", "eval", 5, **{**EVALUATED, **LATER})
    state = read_state(tmp_path / "cut" / "checkpoint-4" / "grpo_ext_state_0.safetensors")
    assert state["loop"]["metrics"]["eval"] == {} and state["parts"]["generations"]["eval"] == 4
    part = train(model, tmp_path / "cut", resume=True, **EVALUATED)
    assert [entry["step"] for entry in part["logs"]] == [2, 3, 6, 6, 8, 8]


@pytest.mark.parametrize("event", ["on_step_begin", "on_substep_end", "on_pre_optimizer_step", "on_step_end"])
def test_a_checkpoint_asked_for_amid_a_step(model, tmp_path, event):
    """As transformers asks for one after SIGTERM: it is written at the step's end, its log among the others."""
    config = {"logging_steps": 2, "max_steps": 6, "save_strategy": "no"}
    whole = train(model, tmp_path / "whole", **config)

    def terminated(trainer):
        callbacks = trainer.callback_handler.callbacks
        (jit,) = (each for each in callbacks if isinstance(each, JITCheckpointCallback))

        def request():
            jit.jit_manager.is_checkpoint_requested = True

        callbacks.insert(0, At(event, 2 + (event == "on_step_end"), request))

    cut = train(model, tmp_path / "cut", before=terminated, enable_jit_checkpoint=True, **config)
    assert cut["step"] == (2 if event == "on_step_begin" else 3)
    assert train(model, tmp_path / "cut", resume=True, **config) == whole


@pytest.mark.parametrize("event", ["on_substep_end", "on_pre_optimizer_step", "on_step_end"])
def test_interrupted_and_resumed_by_the_same_trainer(model, tmp_path, event):
    def interrupt():
        raise KeyboardInterrupt

    config = {"logging_steps": 2, "max_steps": 6, "enable_token_level_prob_diff": True}
    whole = train(model, tmp_path / "whole", **config)
    trainer = make(model, tmp_path / "cut", **config)
    callback = At(event, 4 + (event == "on_step_end"), interrupt)  # in a window that compares new rollouts
    trainer.callback_handler.callbacks.insert(0, callback)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    trainer.remove_callback(callback)
    trainer.train(resume_from_checkpoint=True)
    assert report(trainer) == whole


def test_a_checkpoint_of_the_users_after_an_interrupt(model, tmp_path):
    def interrupt():
        raise KeyboardInterrupt

    config = {"max_steps": 4}
    whole = train(model, tmp_path / "whole", **config)
    trainer = make(model, tmp_path / "cut", **{**config, **LATER})
    trainer.add_callback(At("on_substep_end", 2, interrupt))
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    trainer._save_checkpoint(trainer.model, trial=None)
    assert train(model, tmp_path / "cut", resume=True, **config) == whole


def test_every_train_has_its_own_reports(model, tmp_path):
    trainer = make(model, tmp_path, max_steps=1, save_strategy="no")
    for _ in range(2):
        trainer.train()
        assert [report.step for report in trainer.monitor.reports] == [1]
