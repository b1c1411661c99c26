"""What the window check does, slice by slice: whose ratio is 1, what is recomputed, and when."""

import logging

import pytest
import torch
from datasets import Dataset

from grpo_ext import GRPOExtConfig, GRPOExtTrainer
from tests.tiny import config_kwargs, sums
from tests.trainer.replay import both, rollouts, series, train, weight_difference, worst_relative

SGD = {"optim": "sgd", "max_grad_norm": 0.0}


class Watching(GRPOExtTrainer):
    """Notes for every micro-step: the largest |log ratio|, rows forwarded without gradient just before it, rows by number."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.seen, self._logps, self._rows = [], None, 0

    def _get_per_token_logps_and_entropies(self, model, input_ids, *args, **kwargs):
        result = super()._get_per_token_logps_and_entropies(model, input_ids, *args, **kwargs)
        if result[0] is not None and torch.is_grad_enabled():
            self._logps = result[0].detach()
        elif result[0] is not None and self.model.training:
            self._rows += input_ids.size(0)
        return result

    def compute_loss(self, model, inputs, *args, **kwargs):
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        if self.model.training:
            apart = (self._logps - inputs["old_per_token_logps"]) * inputs["completion_mask"]
            self.seen.append(
                {
                    "apart": float(apart.abs().max()),
                    "no_grad_rows": self._rows,
                    "row_ids": sorted(inputs["row_id"].tolist()),
                    "version": self.state.global_step,
                    "anchor": int(inputs["anchor_version"]),
                    "ratio": inputs.get("importance_sampling_ratio"),
                    "rows": inputs,
                }
            )
            self._rows = 0
        return loss


def noted(run, name):
    return [entry[name] for entry in run.seen]


def test_the_second_iteration_uses_the_firsts_anchor(model, tmp_path):
    """Accumulation 2, one slice, two iterations: no forward beside the loss's, ratio exactly 1 at first use."""
    run = train(
        Watching, model, tmp_path, gradient_accumulation_steps=2, steps_per_generation=1, num_iterations=2, learning_rate=1e-2
    )
    assert noted(run, "no_grad_rows") == [0] * 8
    assert noted(run, "apart")[::2] == [0.0] * 4  # first uses; the second follows in the same window
    assert [entry["old_logps/rows_free"] for entry in run.history] == [4.0] * 4


@pytest.mark.parametrize("evaluate", [False, True])
def test_slices_after_the_step_are_off_policy_by_just_that_step(model, tmp_path, evaluate):
    """Accumulation 2, four slices. Slices 0 and 1 have ratio 1; 2 and 3 have not, unless the step changed nothing."""
    shape = dict(gradient_accumulation_steps=2, steps_per_generation=4, max_steps=4)
    if evaluate:
        shape |= dict(evaluate=True, eval_strategy="steps", eval_steps=1, per_device_eval_batch_size=4)
    run = train(Watching, model, tmp_path / "moving", learning_rate=1e-2, **shape)
    for first, second, third, fourth in (noted(run, "apart")[:4], noted(run, "apart")[4:]):
        assert first == second == 0.0
        assert third > 1e-3 and fourth > 1e-3
    still = train(Watching, model, tmp_path / "still", learning_rate=0.0, **shape)
    assert max(noted(still, "apart")) <= 1e-5
    assert noted(run, "no_grad_rows") == [0, 8, 0, 0, 0, 8, 0, 0]


def test_every_row_is_used_once_an_iteration_and_keeps_its_number(model, tmp_path):
    run = train(Watching, model, tmp_path, gradient_accumulation_steps=2, steps_per_generation=4, max_steps=2)
    assert sorted(row for entry in run.seen for row in entry["row_ids"]) == list(range(16))


def test_a_budget_spreads_the_work_over_the_window(model, tmp_path):
    """16 rows are due at the end of a window of four; with a budget of 5 rows: 5, 5, 5, 1, and 4 more where the deadline
    forces it."""
    shape = dict(gradient_accumulation_steps=4, steps_per_generation=8, max_steps=2)
    spread = train(Watching, model, tmp_path / "spread", old_logps_budget=5, **shape)
    assert noted(spread, "no_grad_rows") == [5, 5, 5, 1, 0, 0, 0, 0]
    forced = train(Watching, model, tmp_path / "forced", old_logps_budget=2, **shape)
    assert noted(forced, "no_grad_rows") == [2, 2, 2, 10, 0, 0, 0, 0]
    atonce = train(Watching, model, tmp_path / "at once", **shape)
    assert noted(atonce, "no_grad_rows") == [0, 0, 0, 16, 0, 0, 0, 0]
    assert worst_relative(atonce, spread, "grad_norm") <= 1e-5
    for run in (spread, forced, atonce):
        assert [entry["old_logps/rows_recomputed"] for entry in run.history] == [16.0, 0.0]
        assert [entry["old_logps/rows_due"] for entry in run.history] == [16.0, 0.0]


def test_nothing_is_computed_for_slices_that_the_run_will_not_use(model, tmp_path):
    """Eight slices, two to a step: three later pairs. The run ends after the second step, so only one pair is worth it."""
    shape = dict(gradient_accumulation_steps=2, steps_per_generation=8)
    assert noted(train(Watching, model, tmp_path / "2", max_steps=2, **shape), "no_grad_rows") == [0, 8, 0, 0]
    assert noted(train(Watching, model, tmp_path / "1", max_steps=1, **shape), "no_grad_rows") == [0, 0]


def test_old_rollouts_are_re_anchored_when_they_are_used(model, tmp_path):
    """One slice to a step, four slices, two iterations, maximum age 1: ages at use are 0 1 2 3 | 4 5 6 7."""
    run = train(
        Watching,
        model,
        tmp_path,
        gradient_accumulation_steps=1,
        steps_per_generation=4,
        num_iterations=2,
        max_steps=8,
        old_logps_max_age=1,
        vllm_importance_sampling_mode="token_truncate",
    )
    assert noted(run, "no_grad_rows") == [4, 0, 0, 0, 0, 0, 0, 0]  # slice 1 only: 2 and 3 are re-anchored at their first use
    assert noted(run, "anchor") == [0, 0, 2, 3, 4, 5, 6, 7]
    assert [apart == 0.0 for apart in noted(run, "apart")] == [True, False, True, True, True, True, True, True]
    counts = [[entry[f"old_logps/rows_{name}"] for entry in run.history] for name in ("free", "recomputed", "reanchored")]
    assert counts == [[4, 0, 0, 0, 0, 0, 0, 0], [4, 0, 0, 0, 0, 0, 0, 0], [0, 0, 4, 4, 4, 4, 4, 4]]
    for entry in run.seen:  # the engine's log-probs still lead back to what was sampled, from the new anchor
        rows = entry["rows"]
        expected = (rows["old_per_token_logps"] - rows["sampling_per_token_logps"]) * rows["completion_mask"]
        if entry is run.seen[-1]:
            torch.testing.assert_close(entry["ratio"], expected.exp().clamp(max=3.0))


def test_the_engines_log_probs_as_the_old_policys(model, tmp_path):
    """verl's bypass mode: no forward, old = mu, correction 1, unscored tokens anchored by the loss's own forward."""
    shape = dict(gradient_accumulation_steps=1, steps_per_generation=2, vllm_importance_sampling_mode="token_truncate")
    run = train(Watching, model, tmp_path, old_logps="rollout", func=rollouts(unscored=0.2), **shape)
    assert noted(run, "no_grad_rows") == [0] * 4
    for entry in run.seen:
        rows = entry["rows"]
        mu, old, mask = (rows[k] for k in ("sampling_per_token_logps", "old_per_token_logps", "completion_mask"))
        scored = ~mu.isnan()
        assert torch.equal(old[scored], mu[scored]) and old.isfinite().all()
        assert torch.equal(entry["ratio"], torch.ones_like(old))
        assert (~scored & mask.bool()).any()
    assert all(torch.isfinite(series(run, "loss")))


def test_always_recomputes_every_row_when_it_is_generated(model, tmp_path):
    shape = dict(gradient_accumulation_steps=4, steps_per_generation=4, max_steps=2, learning_rate=1e-2)
    always = train(Watching, model, tmp_path / "always", old_logps="always", **shape)
    assert noted(always, "no_grad_rows") == [16, 0, 0, 0] * 2
    assert [entry["old_logps/rows_due"] for entry in always.history] == [0.0, 0.0]  # none of it was necessary
    window = train(Watching, model, tmp_path / "window", **shape)
    assert worst_relative(always, window, "grad_norm") <= 1e-5


def test_rollouts_and_rewards_may_score_tokens_themselves(model, tmp_path):
    """Only TRL's own old pass is left out during generation; what a rollout_func or a reward asks for is computed."""
    asked = []

    class Scoring(GRPOExtTrainer):
        def _calculate_rewards(self, *args, **kwargs):
            ids = torch.arange(3, 13).reshape(1, 10)
            with torch.no_grad():
                asked.append(self._get_per_token_logps_and_entropies(self.model, ids, torch.ones_like(ids), 5)[0])
            return super()._calculate_rewards(*args, **kwargs)

    def func(prompts, trainer):
        ids = torch.arange(3, 13).reshape(1, 10)
        with torch.no_grad():
            asked.append(trainer._get_per_token_logps_and_entropies(trainer.model, ids, torch.ones_like(ids), 5)[0])
        return made(prompts, trainer)

    made = rollouts()
    train(Scoring, model, tmp_path, func=func, max_steps=1, gradient_accumulation_steps=1, steps_per_generation=2)
    assert len(asked) == 2 and all(logps.shape == (1, 5) for logps in asked)


def test_a_second_train_starts_with_fresh_rollouts(model, tmp_path):
    run = train(Watching, model, tmp_path, gradient_accumulation_steps=1, steps_per_generation=4, max_steps=2)
    run.seen.clear()
    run.train()
    assert noted(run, "apart")[0] == 0.0
    assert all(entry["anchor"] <= entry["version"] for entry in run.seen)


# ---- where the loop stands ---------------------------------------------------------------------------------------------


def test_a_stream_without_a_length(model, tmp_path):
    """16 prompts, four to a generation, slices of 4: 16 micro-steps to an epoch, accumulation 3, no step at the stream's
    end."""
    stream = Dataset.from_dict({"prompt": [f"{i}=" for i in range(16)]}).to_iterable_dataset()
    shape = dict(gradient_accumulation_steps=3, steps_per_generation=4, max_steps=8, learning_rate=0.05, **SGD)
    stock, ours = both(model, tmp_path, prompts=stream, shuffle_dataset=False, **shape)
    assert worst_relative(stock, ours, "grad_norm") <= 1e-5 and weight_difference(stock, ours) <= 1e-5
    assert 0 < ours.forwards.counts["no_grad"]["rows"] < stock.forwards.counts["no_grad"]["rows"]


@pytest.mark.parametrize("ignore_data_skip", [False, True])
def test_a_resume_in_the_middle_of_a_generation_batch_with_fresh_rollouts(model, tmp_path, ignore_data_skip):
    """Stopped after an update that falls into a generation batch of 3 slices: TRL generates anew, off its rhythm, and so do
    we where the state is not read."""
    shape = dict(gradient_accumulation_steps=2, steps_per_generation=3, learning_rate=0.05, **SGD)
    shape |= dict(prompts=sums(12), ignore_data_skip=ignore_data_skip)
    train(GRPOExtTrainer, model, tmp_path / "first", save_strategy="steps", save_steps=1, max_steps=1, **shape)
    checkpoint = str(tmp_path / "first" / "checkpoint-1")
    stock, ours = both(model, tmp_path, resume=checkpoint, resume_rollouts=False, max_steps=9, **shape)
    assert len(ours.history) == len(stock.history) == 9
    assert worst_relative(stock, ours, "grad_norm") <= 1e-5 and weight_difference(stock, ours) <= 1e-5
    assert ours.forwards.counts["no_grad"]["rows"] < stock.forwards.counts["no_grad"]["rows"]


# ---- bad input ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"old_logps": "never"}, r"old_logps='never'.*Set 'window'"),
        ({"old_logps_budget": 0}, r"old_logps_budget=0.*Set old_logps_budget=4"),
        ({"logps_micro_batch_size": -1}, r"logps_micro_batch_size=-1.*Set logps_micro_batch_size=4"),
        ({"ref_logps_micro_batch_size": 0}, r"ref_logps_micro_batch_size=0"),
        ({"logps_max_tokens": 0}, r"logps_max_tokens=0.*Set logps_max_tokens=12"),
        ({"old_logps_max_age": -1, "use_vllm": True}, r"old_logps_max_age=-1.*Set 0"),
        ({"old_logps_max_age": 2}, r"use_vllm=False.*Set both to True"),
        (
            {"old_logps_max_age": 2, "use_vllm": True, "vllm_importance_sampling_correction": False},
            r"vllm_importance_sampling_correction=False.*Set both",
        ),
    ],
)
def test_settings_that_cannot_work_are_refused(tmp_path, setting, message):
    with pytest.raises(ValueError, match=message):
        GRPOExtConfig(**config_kwargs(tmp_path, per_device_train_batch_size=4, **setting))


def test_log_probs_of_no_engine_cannot_serve(model, tmp_path):
    args = GRPOExtConfig(**config_kwargs(tmp_path, old_logps="rollout"))
    with pytest.raises(ValueError, match=r"use_vllm=False and no rollout_func.*old_logps='window'"):
        GRPOExtTrainer(model, lambda **kwargs: [], args, sums())


def test_rollouts_without_log_probs_cannot_serve(model, tmp_path):
    def silent(prompts, trainer):
        return {**rollouts()(prompts, trainer), "logprobs": None}

    silent.calls = None
    with pytest.raises(ValueError, match=r"came without any.*'logprobs'"):
        train(GRPOExtTrainer, model, tmp_path, func=silent, old_logps="rollout", use_vllm=False)


def test_a_row_over_the_token_budget_runs_alone_and_is_told_once(model, tmp_path, caplog):
    shape = dict(gradient_accumulation_steps=1, steps_per_generation=2, logps_max_tokens=8)
    with caplog.at_level(logging.WARNING, logger="grpo_ext"):
        run = train(Watching, model, tmp_path, **shape)
    told = [record.message for record in caplog.records if "logps_max_tokens=8" in record.message]
    assert len(told) == 1 and "Raise logps_max_tokens" in told[0]
    assert sum(noted(run, "no_grad_rows")) == 8
