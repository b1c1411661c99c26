"""Phase times of a run with the real engine add up to the step, checkpoints and evaluation included."""

import pytest

from grpo_ext.timing import PHASES

pytestmark = pytest.mark.engine


def logs(trainer):
    return [entry for entry in trainer.state.log_history if "timing_s/step" in entry]


@pytest.mark.parametrize("every", [1, 3])
def test_phases_add_up_to_the_step(train, every):
    trainer = train(
        max_steps=6, gradient_accumulation_steps=2, steps_per_generation=4, beta=0.1, per_device_train_batch_size=8, evaluate=True,
        eval_strategy="steps", eval_steps=2, save_strategy="steps", save_steps=2, logging_steps=every, max_completion_length=64,
        per_device_eval_batch_size=8, model_config={"num_hidden_layers": 4, "hidden_size": 128},
    )  # fmt: skip
    entries = logs(trainer)
    assert len(entries) == 6 // every
    phases = {name for entry in entries for name in entry if name.startswith("timing_s/")} - {"timing_s/step"}
    assert {f"timing_s/{name}" for name in PHASES} <= phases
    total = sum(entry["timing_s/step"] for entry in entries)
    assert sum(entry.get(name, 0.0) for entry in entries for name in phases) == pytest.approx(total, rel=0.05)
    for name in ("gen", "sync_weights", "old_logps", "ref_logps", "reward", "forward_backward", "optimizer"):
        assert sum(entry[f"timing_s/{name}"] for entry in entries) > 0, name
    if every == 1:
        assert entries[2]["timing_s/checkpoint"] > 0  # that of step 2
        assert entries[2]["timing_s/evaluate"] > 0
    for entry in entries:
        assert 0 < entry["perf/real_token_share"] <= 1
        assert entry["perf/tokens_per_s"] >= 0
    assert any(entry.get("perf/rollout_tokens_per_s", 0) > 0 for entry in entries)
