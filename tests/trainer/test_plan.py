"""The rows that `grpo-ext plan` foretells are those the trainer counts."""

from types import SimpleNamespace

import pytest

from grpo_ext import GRPOExtTrainer
from grpo_ext.plan.arithmetic import make_plan
from tests.contract.test_plan import DEFAULTS
from tests.trainer.replay import train


@pytest.mark.parametrize(
    "settings, updates",
    [
        ({"gradient_accumulation_steps": 3, "steps_per_generation": 2}, 2),
        ({"gradient_accumulation_steps": 2, "steps_per_generation": 4}, 2),
        ({"gradient_accumulation_steps": 4, "steps_per_generation": 3, "num_iterations": 2}, 3),
        ({"gradient_accumulation_steps": 1, "steps_per_generation": 4, "old_logps_max_age": 1}, 4),
        ({"gradient_accumulation_steps": 1, "steps_per_generation": 2, "num_iterations": 3, "old_logps_max_age": 2}, 6),
        (
            {
                "gradient_accumulation_steps": 1,
                "steps_per_generation": 2,
                "num_iterations": 3,
                "old_logps_max_age": 2,
                "old_logps": "rollout",
            },
            6,
        ),
        ({"gradient_accumulation_steps": 2, "steps_per_generation": 4, "old_logps": "always"}, 2),
        ({"gradient_accumulation_steps": 2, "steps_per_generation": 4, "old_logps": "rollout"}, 2),
    ],
    ids=str,
)
def test_rows_over_a_cycle(model, tmp_path, settings, updates):
    """updates: optimizer steps of a cycle; the run is longer, for its end spares what a cycle does not."""
    given = {"use_vllm": True, "num_generations": 4, "per_device_train_batch_size": 4, **settings}
    foretold = make_plan(SimpleNamespace(**{**DEFAULTS, **given}), 1).old_logps
    run = train(GRPOExtTrainer, model, tmp_path, max_steps=2 * updates + 1, **settings)
    logs = run.history[:updates]
    for name, mean in {
        "free": foretold.rows_free, "recomputed": foretold.rows_computed, "reanchored": foretold.rows_reanchored
    }.items():  # fmt: skip
        assert sum(log[f"old_logps/rows_{name}"] for log in logs) == pytest.approx(mean * foretold.generations_per_cycle), name
