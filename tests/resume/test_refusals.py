"""Which checkpoint a run resumes from, what is refused, and how to go on all the same."""

import logging
import os
import shutil
from datetime import date

import pytest
from trl import GRPOConfig, GRPOTrainer

from benchmarks.replay import RecordedRollouts, lognormal, recorded, token_reward, uniform
from grpo_ext import GRPOExtTrainer
from grpo_ext.resume.choice import View, fault
from grpo_ext.resume.state import read_state, write_state
from tests.resume.runs import MIDDLE, train
from tests.tiny import config_kwargs, sums

SHORT = {"max_steps": 4}


@pytest.fixture(scope="module")
def saved(models, tmp_path_factory):
    """A folder with checkpoints 1 to 4, each of them in the middle of a generation batch or at its end, and its run."""
    out = tmp_path_factory.mktemp("saved")
    return out, train(models("qwen2"), out, **SHORT)


@pytest.fixture
def folder(saved, tmp_path):
    """A copy to do damage to."""
    return shutil.copytree(saved[0], tmp_path / "run")


def state_file(checkpoint):
    return checkpoint / "grpo_ext_state_0.safetensors"


def changed(checkpoint, change):
    state = read_state(state_file(checkpoint))
    change(state)
    write_state(state_file(checkpoint), state)


def cut(path):
    path.write_bytes(path.read_bytes()[:-100])


DAMAGE = {
    "cut short": (lambda c: cut(state_file(c)), r"grpo_ext_state_0\.safetensors is damaged"),
    "other ranks": (
        lambda c: changed(c, lambda s: s["settings"].update(ranks=2)),
        r"grpo_ext_state_0\.safetensors belongs to another run: ranks=2 there, 1 here",
    ),
    "other rank": (lambda c: changed(c, lambda s: s.update(rank=1)), r"rank=1 there, 0 here"),
    "other step": (lambda c: changed(c, lambda s: s.update(global_step=7)), r"global_step=7 there, 2 here"),
    "other settings": (
        lambda c: changed(c, lambda s: s["settings"].update(num_iterations=1, temperature=0.5)),
        r"num_iterations=1 there, 2 here; temperature=0\.5 there, 1\.0 here",
    ),
    "no RNG state": (lambda c: (c / "rng_state.pth").unlink(), r"rng_state\.pth of rank 0 is missing"),
    "no optimizer": (lambda c: (c / "optimizer.pt").unlink(), r"optimizer\.pt of rank 0 is missing"),
    "no step": (
        lambda c: (c / "trainer_state.json").write_text("{}"),
        r"trainer_state\.json of rank 0 is missing or cut short",
    ),
    "no state of a run": (
        lambda c: write_state(state_file(c), [1]),
        r"grpo_ext_state_0\.safetensors is not the state of a run",
    ),
    "part of another version": (
        lambda c: changed(c, lambda s: s["parts"]["anchors"].pop("tokens")),
        r"grpo_ext_state_0\.safetensors: its 'anchors' was written by another version \(KeyError\('tokens'\)\)",
    ),
    "no end": (lambda c: (c / "trainer_state.json").unlink(), r"trainer_state\.json of rank 0 is missing"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_or_foreign_is_refused_by_name(model, folder, tmp_path, name):
    damage, message = DAMAGE[name]
    damage(folder / "checkpoint-2")
    with pytest.raises(ValueError, match=message) as error:
        train(model, tmp_path / "b", resume=str(folder / "checkpoint-2"), **SHORT)
    assert "checkpoint-2" in str(error.value) and "resume_rollouts=False" in str(error.value)


@pytest.mark.parametrize("name", ["checkpoint-77", "checkpoint-2/trainer_state.json"])
def test_what_is_no_checkpoint_is_refused_with_one_that_is(model, saved, tmp_path, name):
    with pytest.raises(ValueError, match=rf"{name}: there is no such directory\. .*resume_from_checkpoint=True"):
        train(model, tmp_path, resume=str(saved[0] / name), **SHORT)


def test_resume_rollouts_false_goes_on_with_fresh_ones(model, folder, saved, tmp_path):
    cut(state_file(folder / "checkpoint-2"))
    shutil.rmtree(folder / "checkpoint-3")
    shutil.rmtree(folder / "checkpoint-4")
    part = train(model, folder, resume=True, resume_rollouts=False, **SHORT)
    assert part["step"] == 4 and part["weights"] != saved[1]["weights"]
    assert part["logs"][2]["old_logps/rows_free"] == 8  # the first micro-steps after a generation


@pytest.mark.parametrize("lost", ["trainer_state.json", "rng_state.pth"])
def test_true_passes_over_what_is_half_written(model, folder, saved, lost, caplog):
    shutil.rmtree(folder / "checkpoint-4")
    (folder / "checkpoint-3" / lost).unlink()
    (folder / "checkpoint-9-old").mkdir()  # somebody's copy
    with caplog.at_level(logging.WARNING, logger="grpo_ext"):
        part = train(model, folder, resume=True, **SHORT)
    assert part["weights"] == saved[1]["weights"]
    assert [r.message for r in caplog.records if "checkpoint-3, which is not complete" in r.message and lost in r.message]
    assert not [r.message for r in caplog.records if "checkpoint-2" in r.message]


def test_true_where_nothing_is_complete(model, folder, tmp_path):
    for checkpoint in folder.glob("checkpoint-*"):
        (checkpoint / "trainer_state.json").write_text('{"global_st')
    with pytest.raises(ValueError, match=r"newest being checkpoint-4: trainer_state\.json of rank 0 is missing or cut short"):
        train(model, folder, resume=True, **SHORT)
    with pytest.raises(ValueError, match="No valid checkpoint"):
        train(model, tmp_path / "empty", before=lambda trainer: os.makedirs(tmp_path / "empty", exist_ok=True), resume=True)


def test_views_of_several_ranks():
    whole, stock = View((), True), View((), False)
    assert fault([whole, whole]) is None and fault([stock, stock]) is None
    assert fault([whole, stock]) == "grpo_ext_state_1.safetensors is missing, while other ranks have theirs"
    assert fault([whole, View(("rng_state_1.pth",), True)]) == "rng_state_1.pth of rank 1 is missing or cut short"


def test_a_checkpoint_of_stock_trl(model, tmp_path, caplog):
    rollouts = RecordedRollouts(vocab=98, completion=lognormal(6, 0.8, 24), prompt=uniform(2, 6))
    steps = {"max_steps": 2, "save_strategy": "steps", "save_steps": 2}
    config = config_kwargs(tmp_path, use_vllm=True, per_device_train_batch_size=4, **MIDDLE, **steps)
    recorded(GRPOTrainer)(model, token_reward, GRPOConfig(**config), sums(), rollout_func=rollouts).train()
    with caplog.at_level(logging.WARNING, logger="grpo_ext"):
        part = train(model, tmp_path, resume=True, **SHORT)
    assert part["step"] == 4 and part["logs"][2]["old_logps/rows_free"] == 8
    assert len([r.message for r in caplog.records if "holds no state of grpo_ext" in r.message]) == 1


def test_a_buffer_that_cannot_be_saved(model, tmp_path, caplog):
    from PIL import Image

    class Pictures(GRPOExtTrainer):
        def _generate_and_score_completions(self, inputs):
            rows = super()._generate_and_score_completions(inputs)
            rows["pictures"] = [Image.new("RGB", (1, 1))] * len(rows["prompt_ids"])
            return rows

    with caplog.at_level(logging.WARNING, logger="grpo_ext"):
        train(model, tmp_path, trainer=Pictures, **{**SHORT, "max_steps": 2})
    told = [r.message for r in caplog.records if "Checkpoints hold no buffered rollouts" in r.message]
    assert len(told) == 1 and "['pictures'][0] is a PIL.Image.Image" in told[0]
    part = train(model, tmp_path, trainer=Pictures, resume=True, **SHORT)
    assert part["step"] == 4 and part["logs"][2]["old_logps/rows_free"] == 8


def test_a_column_that_cannot_be_saved(model, tmp_path, caplog):
    """What a reward function logs beside the completions may be anything; training goes on."""

    class Odd(GRPOExtTrainer):
        def _calculate_rewards(self, *args, **kwargs):
            self._logs["extra"]["odd"].extend([date(2026, 1, 1)] * 16)
            return super()._calculate_rewards(*args, **kwargs)

    with caplog.at_level(logging.WARNING, logger="grpo_ext"):
        whole = train(model, tmp_path / "a", trainer=Odd, log_completions=True, logging_steps=9, **SHORT)
    assert (
        len([r.message for r in caplog.records if "hold no completions: ['extra']['odd'][0] is a datetime.date" in r.message])
        == 1
    )
    part = train(
        model, tmp_path / "b", resume=f"{tmp_path}/a/checkpoint-2", trainer=Odd, log_completions=True, logging_steps=9, **SHORT
    )
    assert part["weights"] == whole["weights"]
