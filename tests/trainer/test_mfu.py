"""`perf/mfu` on a device whose peak is known: a fake peak, since a CPU has none listed."""

import pytest

from benchmarks.replay import equal
from grpo_ext import GRPOExtTrainer
from grpo_ext.flops import training_flops_per_token
from tests.trainer.replay import rollouts, train

PEAK = 1e9
PROMPT, COMPLETION, ROWS, GROUPS = 20, 6, 8, 2  # rows of an optimizer step, four to a prompt


@pytest.mark.parametrize(
    "shared, tokens",
    [(False, ROWS * (PROMPT + COMPLETION)), (True, GROUPS * PROMPT + ROWS * COMPLETION - ROWS)],
    ids=["rows", "trees"],
)
def test_a_prompt_that_is_encoded_once_counts_once(model, tmp_path, monkeypatch, shared, tokens):
    """A tree holds neither a completion's last token, from which nothing is predicted, nor a prompt twice."""
    monkeypatch.setattr("grpo_ext.clock.peak_flops", lambda name: PEAK)
    trainer = train(
        GRPOExtTrainer, model, tmp_path, func=rollouts(prompt=equal(PROMPT), completion=equal(COMPLETION)), shared_prompt=shared,
        gradient_accumulation_steps=2,
    )  # fmt: skip
    flops = tokens * training_flops_per_token(trainer.model.parameters())
    assert len(trainer.history) == 4
    for entry in trainer.history:
        assert entry["perf/mfu"] == pytest.approx(flops / (PEAK * entry["timing_s/step"]), rel=1e-6)
