"""The monitor and the callback in training: what is logged and dumped, what is decided, and that no forward is spent on it."""

import logging
import math
import os

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from trl import GRPOTrainer

from grpo_ext import GRPOExtTrainer, ProbDiffCallback
from grpo_ext.consistency import keys
from grpo_ext.consistency.dump import write_pair
from tests.trainer.replay import both, rollouts, train

LOOPS = [
    dict(gradient_accumulation_steps=a, steps_per_generation=s, num_iterations=i)
    for a, s, i in ((2, 2, 1), (2, 4, 1), (2, 1, 2), (3, 2, 1))
]


@pytest.mark.parametrize("loop", LOOPS, ids=str)
def test_every_rollout_is_counted_once_whatever_the_log_interval(model, tmp_path, loop):
    def logged(every):
        run = train(GRPOExtTrainer, model, tmp_path / str(every), max_steps=6, logging_steps=every, **loop)
        return run, [entry for entry in run.history if keys.TOKENS in entry]

    (fine, each), (coarse, all_of_it) = logged(1), logged(6)
    expected = sum(report.metrics[keys.TOKENS] for report in fine.monitor.reports)
    assert sum(entry[keys.TOKENS] for entry in each) == all_of_it[-1][keys.TOKENS] == expected
    weighed = sum(entry[keys.MEAN] * entry[keys.TOKENS] for entry in each) / expected
    assert all_of_it[-1][keys.MEAN] == pytest.approx(weighed, rel=1e-9)
    assert all_of_it[-1][keys.MAX] == max(entry[keys.MAX] for entry in each)
    versions = [report.version for report in fine.monitor.reports]
    assert versions == sorted(set(versions)) == [report.version for report in coarse.monitor.reports]


def test_no_forward_is_spent(model, tmp_path):
    kwargs = dict(max_steps=3, gradient_accumulation_steps=2, steps_per_generation=2)
    plain = train(GRPOExtTrainer, model, tmp_path / "a", prob_diff_warn=None, **kwargs)
    full = train(
        GRPOExtTrainer, model, tmp_path / "b", enable_token_level_prob_diff=True, prob_diff_save_dir=str(tmp_path / "d"),
        prob_diff_save_tokens=True, prob_diff_warn=None, **kwargs,
    )  # fmt: skip
    assert full.forwards.counts == plain.forwards.counts


def test_the_aggregates_are_those_of_the_dumped_tokens(model, tmp_path):
    run = train(
        GRPOExtTrainer, model, tmp_path, max_steps=3, gradient_accumulation_steps=2, steps_per_generation=2,
        enable_token_level_prob_diff=True, prob_diff_save_dir=str(tmp_path / "dumps"), prob_diff_save_tokens=True,
        func=rollouts(unscored=0.1, tools=True), learning_rate=1e-5, prob_diff_warn=None,
    )  # fmt: skip
    for entry in run.history:
        step = entry["step"]
        diff = np.load(tmp_path / f"dumps/prob_diff_step_{step}.npy", allow_pickle=False)
        mask = np.load(tmp_path / f"dumps/prob_mask_step_{step}.npy", allow_pickle=False)
        assert (diff.dtype, mask.dtype, diff.shape) == (np.float32, bool, mask.shape)
        assert len(diff) == 8
        assert not diff[~mask].any()
        assert mask.sum() == entry[keys.TOKENS]
        assert np.isnan(diff[mask]).sum() == entry[keys.UNSCORED] > 0
        assert np.nanmean(diff[mask]) == pytest.approx(entry[keys.MEAN], rel=1e-5)
        assert np.nanmax(diff[mask]) == pytest.approx(entry[keys.MAX], rel=1e-6)
        cells = {name: value for name, value in entry.items() if name.startswith("training/rollout_probs_diff/s")}
        expected = {
            keys.CELL.format(sample=i, position=j): diff[i, j]
            for i in range(8) for j in range(min(10, diff.shape[1])) if mask[i, j] and not math.isnan(diff[i, j])
        }  # fmt: skip
        assert cells == pytest.approx(expected)
        tokens = pq.read_table(tmp_path / f"dumps/prob_tokens_step_{step}.parquet").to_pydict()
        recomputed = np.abs(np.exp(tokens["rollout_log_prob"]) - np.exp(tokens["old_log_prob"]))
        np.testing.assert_allclose(recomputed, diff[mask], atol=1e-6)
        assert set(tokens["policy_version"]) == {step - 1}


def test_rows_are_in_the_order_of_generation(model, tmp_path):
    """Grouping by length deals rows out anew; the dump has them as the engine returned them."""
    func = rollouts()
    train(
        GRPOExtTrainer, model, tmp_path, max_steps=1, gradient_accumulation_steps=4, steps_per_generation=4, func=func,
        enable_token_level_prob_diff=True, prob_diff_save_dir=str(tmp_path / "dumps"),
    )  # fmt: skip
    again = rollouts()
    made = again([None] * 16, _AsIfTraining())
    mask = np.load(tmp_path / "dumps/prob_mask_step_1.npy", allow_pickle=False)
    assert mask.sum(1).tolist() == [len(ids) for ids in made["completion_ids"]]


class _AsIfTraining:
    class model:
        training = True

    class accelerator:
        process_index = 0

    num_generations = 4


def test_stops_with_a_checkpoint_after_patience(model, tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        run = train(
            GRPOExtTrainer, model, tmp_path, max_steps=9, func=rollouts(noise=3.0), prob_diff_warn=None, prob_diff_stop=1e-4,
            prob_diff_patience=3,
        )  # fmt: skip
    assert run.state.global_step == 3
    assert (tmp_path / "checkpoint-3/model.safetensors").exists()
    said = [r.getMessage() for r in caplog.records if "Training stops" in r.getMessage()]
    assert len(said) == 1
    assert "above prob_diff_stop=0.0001" in said[0]


def test_patience_counts_versions_from_before_a_resume(model, tmp_path):
    sick = {"prob_diff_warn": None, "prob_diff_stop": 1e-4, "prob_diff_patience": 4, "save_strategy": "steps", "save_steps": 1}
    train(GRPOExtTrainer, model, tmp_path, max_steps=2, func=rollouts(noise=3.0), **sick)
    resumed = str(tmp_path / "checkpoint-2")
    run = train(GRPOExtTrainer, model, tmp_path, max_steps=9, func=rollouts(noise=3.0), resume=resumed, **sick)
    assert run.state.global_step == 4


def test_warns_once_for_an_illness(model, tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        run = train(GRPOExtTrainer, model, tmp_path, max_steps=4, func=rollouts(noise=3.0), prob_diff_warn=1e-4)
    assert run.state.global_step == 4
    said = [r.getMessage() for r in caplog.records if "above prob_diff_warn" in r.getMessage()]
    assert len(said) == 1
    assert "Step 1: rollouts of policy version 0" in said[0]


def test_where_no_engine_can_be_asked_the_settings_are_named(model, tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        train(GRPOExtTrainer, model, tmp_path, max_steps=1, func=rollouts(noise=3.0), prob_diff_warn=1e-4, top_k=5)
    assert "Likely cause: truncated sampling. Evidence: top_k=5 is set" in caplog.text


def test_health_is_silent(model, tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        train(GRPOExtTrainer, model, tmp_path, max_steps=2, prob_diff_warn=0.02)
    assert not [r for r in caplog.records if "prob_diff" in r.getMessage()]


@pytest.mark.parametrize("asked", [True, False])
def test_without_the_engines_log_probs_one_message(model, tmp_path, caplog, asked):
    class Unscored:
        def __init__(self):
            self.inner = rollouts()

        def __call__(self, *args):
            made = self.inner(*args)
            made["logprobs"] = None
            return made

    with caplog.at_level(logging.WARNING):
        run = train(
            GRPOExtTrainer, model, tmp_path, max_steps=3, func=Unscored(), enable_token_level_prob_diff=asked, use_vllm=False
        )
    assert run.state.global_step == 3
    assert len([r for r in caplog.records if "cannot be compared with the actor" in r.getMessage()]) == asked


def test_one_of_your_own_takes_the_place_of_the_automatic_one(model, tmp_path):
    class Keeping(GRPOExtTrainer):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, callbacks=[ProbDiffCallback(prob_diff_stop=0.0, prob_diff_warn=None)], **kwargs)

    run = train(Keeping, model, tmp_path / "given", max_steps=3)
    assert run.state.global_step == 1

    def add(trainer):
        trainer.add_callback(ProbDiffCallback(prob_diff_stop=0.0, prob_diff_warn=None))

    run = train(GRPOExtTrainer, model, tmp_path / "added", max_steps=3, before=add)
    assert run.state.global_step == 1
    assert sum(isinstance(c, ProbDiffCallback) for c in run.callback_handler.callbacks) == 1


def test_on_a_trainer_without_a_monitor_it_says_so(model, tmp_path, caplog):
    def add(trainer):
        trainer.add_callback(ProbDiffCallback())

    with caplog.at_level(logging.WARNING):
        run = train(GRPOTrainer, model, tmp_path, max_steps=2, before=add)
    assert run.state.global_step == 2
    assert len([r for r in caplog.records if "Use GRPOExtTrainer" in r.getMessage()]) == 1


def test_a_run_in_the_directory_of_a_longer_one_keeps_its_own_dumps(model, tmp_path, caplog):
    run = dict(enable_token_level_prob_diff=True, prob_diff_save_dir=str(tmp_path / "dumps"), prob_diff_keep_last=3)
    for step in (8, 9):
        for path in write_pair(tmp_path / "dumps", step, np.zeros((1, 1)), np.ones((1, 1))):
            os.utime(path, (0, 0))
    with caplog.at_level(logging.WARNING):
        train(GRPOExtTrainer, model, tmp_path / "out", max_steps=4, **run)
    assert sorted(path.name for path in (tmp_path / "dumps").glob("*diff*")) == [f"prob_diff_step_{i}.npy" for i in (2, 3, 4)]
    (said,) = [r.getMessage() for r in caplog.records if "earlier run" in r.getMessage()]
    assert "dumps of 2 step(s) after step 0, up to 9" in said


@pytest.mark.parametrize(
    "idle",
    [{"prob_diff_save_dir": "dumps"}, {"enable_token_level_prob_diff": True, "prob_diff_save_tokens": True}],
    ids=["a directory", "tokens"],
)
def test_a_setting_without_effect_is_named_once(model, tmp_path, caplog, idle):
    with caplog.at_level(logging.WARNING):
        train(GRPOExtTrainer, model, tmp_path, max_steps=1, **idle)
    (said,) = [r.getMessage() for r in caplog.records if "without effect" in r.getMessage()]
    name, value = list(idle.items())[-1]
    assert f"{name}={value!r} without effect" in said


@pytest.mark.parametrize(
    "wrong",
    [
        {"prob_diff_patience": 0},
        {"prob_diff_patience": 1001},
        {"prob_diff_keep_last": 0},
        {"prob_diff_token_max_print": -1},
        {"prob_diff_warn": math.nan},
    ],
)
def test_by_hand_it_is_checked_as_the_config_is(wrong):
    (name,) = wrong
    with pytest.raises(ValueError, match=name):
        ProbDiffCallback(**wrong)


def test_a_directory_that_cannot_be_written_is_refused_before_training(model, tmp_path):
    with pytest.raises(ValueError, match=r"prob_diff_save_dir='.*typo/dumps': its parent .* does not exist"):
        train(
            GRPOExtTrainer, model, tmp_path / "out", enable_token_level_prob_diff=True,
            prob_diff_save_dir=str(tmp_path / "typo/dumps"),
        )  # fmt: skip


def test_a_full_disk_costs_the_dump_and_not_the_run(model, tmp_path, caplog, monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("grpo_ext.consistency.callback.write_pair", full)
    with caplog.at_level(logging.WARNING):
        run = train(
            GRPOExtTrainer, model, tmp_path, max_steps=3, enable_token_level_prob_diff=True,
            prob_diff_save_dir=str(tmp_path / "dumps"),
        )  # fmt: skip
    assert run.state.global_step == 3
    assert len([r for r in caplog.records if "No space left on device" in r.getMessage()]) == 1


def test_evaluation_has_aggregates_of_its_own(model, tmp_path):
    run = train(
        GRPOExtTrainer, model, tmp_path, max_steps=2, evaluate=True, eval_strategy="steps", eval_steps=1,
        per_device_eval_batch_size=4,
    )  # fmt: skip
    assert all(entry[f"eval_{keys.MEAN}"] > 0 for entry in run.evaluations)
    assert len(run.evaluations) == 2
    assert [report.version for report in run.monitor.reports] == [0, 1]


def test_metrics_only(model, tmp_path):
    """Whatever is watched, the training is stock TRL's."""
    stock, ours = both(
        model, tmp_path, max_steps=3, gradient_accumulation_steps=2, steps_per_generation=2, learning_rate=1e-3,
    )  # fmt: skip
    torch.testing.assert_close(
        *(torch.tensor([entry["grad_norm"] for entry in run.history]) for run in (stock, ours)), rtol=1e-5, atol=0
    )


def test_tensorboard_shows_what_was_logged(model, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = train(
        GRPOExtTrainer, model, tmp_path, max_steps=3, report_to="tensorboard", enable_token_level_prob_diff=True,
    )  # fmt: skip
    (folder,) = {path.parent for path in tmp_path.rglob("events.out.tfevents.*")}
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    for name in (keys.MEAN, keys.MAX, keys.P99, keys.KL, keys.CELL.format(sample=0, position=0)):
        read = {event.step: event.value for event in events.Scalars(f"train/{name}")}
        assert read == pytest.approx({entry["step"]: entry[name] for entry in run.history}, rel=1e-6), name
        assert len(read) == 3
