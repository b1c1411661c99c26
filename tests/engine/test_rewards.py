"""The KL in the reward and a look at the batch with the real engine: its anchors are the actor's, so that nothing seems to differ."""

import pytest

pytestmark = [pytest.mark.engine]


def test_kl_in_the_reward(train, capfd):
    trainer = train(
        gradient_accumulation_steps=1, steps_per_generation=2, max_steps=4, learning_rate=1e-3, kl_in_reward=True,
        kl_in_reward_coef=0.1, debug_batch=True,
    )  # fmt: skip
    entries = [entry for entry in trainer.state.log_history if "kl_in_reward/kl" in entry]
    assert [entry["old_logps/rows_recomputed"] for entry in entries] == [16.0, 16.0]
    assert entries[0]["kl_in_reward/kl"] == pytest.approx(0.0, abs=1e-5) and abs(entries[1]["kl_in_reward/kl"]) > 1e-4
    assert all(entry["training/rollout_probs_diff_mean"] < 1e-6 for entry in entries)
    assert capfd.readouterr().out.count("What the first loss is given") == 1
