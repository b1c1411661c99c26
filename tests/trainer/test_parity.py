"""The same run by stock TRL and by us, on recorded rollouts: losses, gradient norms and weights agree, for less work.

SGD, so that a rounding error stays one (Adam divides by it). Float32, one thread.
"""

import pytest
import torch
from trl import GRPOTrainer
from trl.trainer import grpo_trainer

from grpo_ext import GRPOExtTrainer
from tests.tiny import sums
from tests.trainer.replay import both, rollouts, series, train, weight_difference, worst_relative

SGD = {"optim": "sgd", "learning_rate": 0.05, "max_grad_norm": 0.0}


def assert_same(stock, ours, tolerance=1e-5):
    assert len(stock.history) == len(ours.history) > 1
    assert worst_relative(stock, ours, "grad_norm") <= tolerance
    assert float((series(stock, "loss") - series(ours, "loss")).abs().max()) <= 1e-5
    assert weight_difference(stock, ours) <= 1e-5


@pytest.mark.parametrize("grouped", [True, False])
@pytest.mark.parametrize(
    ("accumulation", "slices", "iterations"),
    [(4, 4, 1), (2, 4, 1), (2, 2, 2), (3, 2, 1), (2, 3, 2), (1, 3, 1), (4, 1, 2)],
)
def test_accumulation_slices_iterations(model, tmp_path, accumulation, slices, iterations, grouped):
    shape = dict(gradient_accumulation_steps=accumulation, steps_per_generation=slices, num_iterations=iterations)
    stock, ours = both(model, tmp_path, max_steps=6, group_rollouts_by_length=grouped, **shape, **SGD)
    assert_same(stock, ours)
    assert ours.forwards.counts["no_grad"]["rows"] <= stock.forwards.counts["no_grad"]["rows"]
    assert ours.forwards.counts["grad"]["rows"] == stock.forwards.counts["grad"]["rows"]
    assert ours.forwards.counts["grad"]["tokens"] <= stock.forwards.counts["grad"]["tokens"]


@pytest.mark.parametrize("old_logps", ["window", "always"])
def test_short_windows_at_an_epochs_end(model, tmp_path, old_logps):
    """6 micro-steps an epoch, updates after 3, 5, 9 and 11, and what is due changes with the epoch's end."""
    shape = dict(gradient_accumulation_steps=4, steps_per_generation=3, max_steps=-1, num_train_epochs=2)
    stock, ours = both(model, tmp_path, prompts=sums(6), old_logps=old_logps, **shape, **SGD)
    assert len(ours.history) == 4
    assert_same(stock, ours)
    # The second and the fourth generation batch have a step after their first slice: two slices of four rows are due.
    assert [entry["old_logps/rows_due"] for entry in ours.history] == [8.0, 0.0, 8.0, 0.0]


@pytest.mark.parametrize("beta", [0.0, 0.1])
@pytest.mark.parametrize("adapter", [False, True])
def test_reference_and_adapter(model, tmp_path, beta, adapter):
    from peft import LoraConfig

    peft = {"peft_config": LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)} if adapter else {}
    stock, ours = both(model, tmp_path, beta=beta, gradient_accumulation_steps=2, steps_per_generation=4, **peft, **SGD, seed=3)
    assert_same(stock, ours)
    for run in (stock, ours):
        assert run.forwards.counts["reference"]["rows"] == (32 if beta else 0)
    if beta:
        assert series(ours, "kl").max() > 1e-4


@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo", "cispo", "sapo", "vespo", "luspo", "bnpo"])
def test_loss_types(model, tmp_path, loss_type):
    mode = {"vllm_importance_sampling_mode": "token_truncate"} if loss_type == "vespo" else {}
    stock, ours = both(
        model, tmp_path, loss_type=loss_type, gradient_accumulation_steps=2, steps_per_generation=4, **mode, **SGD
    )
    assert_same(stock, ours)


@pytest.mark.parametrize("mode", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])
@pytest.mark.parametrize("bounds", [(None, 2.0), (0.5, 2.0), (0.5, None)])
def test_engine_correction(model, tmp_path, mode, bounds):
    correction = {
        "vllm_importance_sampling_mode": mode,
        "vllm_importance_sampling_clip_min": bounds[0],
        "vllm_importance_sampling_clip_max": bounds[1],
    }
    stock, ours = both(
        model,
        tmp_path,
        func=lambda: rollouts(unscored=0.1),
        gradient_accumulation_steps=2,
        steps_per_generation=2,
        group_rollouts_by_length=False,
        **correction,
        **SGD,
    )
    assert_same(stock, ours)
    # One rank, so that TRL's mean of rank means is exact too; one generation a step, so that its list has one entry.
    for name in (
        "sampling_logp_difference/mean",
        "sampling_logp_difference/max",
        "importance_sampling_ratio/min",
        "importance_sampling_ratio/mean",
        "importance_sampling_ratio/max",
    ):
        theirs, mine = series(stock, f"sampling/{name}"), series(ours, f"sampling/{name}")
        torch.testing.assert_close(mine, theirs, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize(
    "setting",
    [
        {"importance_sampling_level": "sequence", "loss_type": "grpo"},
        {"off_policy_mask_threshold": 0.5},
        {"mask_truncated_completions": True},
        {"pad_to_multiple_of": 8},
        {"delta": 2.0, "epsilon_high": 0.3},
        {"use_bias_correction_kl": True, "beta": 0.1},
        {"top_entropy_quantile": 0.5},
        {"entropy_coef": 0.01},
        {"use_vllm": False},
        {"vllm_importance_sampling_correction": False},
        {"logps_micro_batch_size": 3, "ref_logps_micro_batch_size": 2, "beta": 0.1},
        {"logps_max_tokens": 20, "beta": 0.1},
        {"old_logps_budget": 3},
        {"gradient_checkpointing": True, "beta": 0.1},
        {"scale_rewards": "batch"},
        {"cast_lm_head_to_fp32": True},
    ],
    ids=lambda setting: ",".join(setting),
)
def test_settings(model, tmp_path, setting):
    arguments = dict(gradient_accumulation_steps=2, steps_per_generation=4, **SGD) | setting
    stock, ours = both(model, tmp_path, func=lambda: rollouts(truncated=0.3, tools=True, unscored=0.05), **arguments)
    assert_same(stock, ours)


def test_evaluation_in_the_middle_changes_nothing(model, tmp_path, monkeypatch):
    # An evaluation draws from the global generator, and with it changes TRL's shuffle: keep the order of generation.
    monkeypatch.setattr(grpo_trainer, "shuffle_sequence_dict", lambda rows: rows)
    shape = dict(gradient_accumulation_steps=2, steps_per_generation=4, **SGD)
    evaluations = dict(evaluate=True, eval_strategy="steps", eval_steps=1, per_device_eval_batch_size=4, num_generations_eval=4)
    without = train(GRPOExtTrainer, model, tmp_path / "without", **shape)
    stock, ours = both(model, tmp_path, **shape, **evaluations)
    assert_same(stock, ours)
    assert_same(without, ours, tolerance=0)
    for theirs, mine in zip(stock.evaluations, ours.evaluations, strict=True):
        assert mine["eval_loss"] == pytest.approx(theirs["eval_loss"], abs=1e-5)
    assert ours.forwards.counts["no_grad"]["rows"] < stock.forwards.counts["no_grad"]["rows"]


def test_a_users_own_loss_and_log_prob_method_are_used(model, tmp_path):
    class Own:
        losses = scores = 0

        def _compute_loss(self, model, inputs):
            self.losses += 1
            return 2 * super()._compute_loss(model, inputs)

        def _get_per_token_logps_and_entropies(self, *args, **kwargs):
            self.scores += 1
            logps, *rest = super()._get_per_token_logps_and_entropies(*args, **kwargs)
            return (0.5 * logps if logps is not None else None, *rest)

    class Stock(Own, GRPOTrainer):
        pass

    class Ours(Own, GRPOExtTrainer):
        pass

    stock, ours = both(model, tmp_path, Stock, Ours, gradient_accumulation_steps=2, steps_per_generation=4, **SGD)
    assert_same(stock, ours)
    assert ours.losses == 8 and ours.scores > ours.losses


def test_taking_the_due_pass_out_is_seen(model, tmp_path):
    """The negative of all of the above: without the due pass, parity is lost."""
    shape = dict(gradient_accumulation_steps=1, steps_per_generation=4, optim="sgd", learning_rate=0.5, max_grad_norm=0.0)
    stock, ours = both(model, tmp_path / "right", **shape)
    assert_same(stock, ours)

    class Broken(GRPOExtTrainer):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.anchors._compute = lambda parts: None

    stock, broken = both(model, tmp_path / "wrong", GRPOTrainer, Broken, **shape)
    assert worst_relative(stock, broken, "grad_norm") > 1e-3


def test_neutral_settings_are_stock_trl_to_1e_6(model, tmp_path):
    """Nothing of ours at work but the seam (old log-probs always, no grouping): five steps, losses and gradient norms to 1e-6."""
    neutral = dict(old_logps="always", group_rollouts_by_length=False)
    stock, ours = both(model, tmp_path, max_steps=5, gradient_accumulation_steps=2, beta=0.1, **neutral, **SGD)
    loss = float((series(stock, "loss") - series(ours, "loss")).abs().max())
    norm = float((series(stock, "grad_norm") - series(ours, "grad_norm")).abs().max())
    print(
        f"\nneutral, five steps: losses within {loss:.1e}, gradient norms within {norm:.1e} ({worst_relative(stock, ours, 'grad_norm'):.1e} relative)"
    )
    assert len(ours.history) == 5 and loss <= 1e-6 and worst_relative(stock, ours, "grad_norm") <= 1e-6
