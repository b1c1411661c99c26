"""The engine ratio and its metrics against TRL's own, on the very same inputs."""

import pytest
import torch
from trl import GRPOTrainer

from grpo_ext.batch.rollouts import loss_mask
from grpo_ext.logprobs.ratio import engine_ratio, ratio_metrics, ratio_stats
from tests.trainer.replay import rollouts, train

BOUNDS = [(None, 2.0), (0.5, 2.0), (0.5, None), (None, None)]
MODES = ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]


class Keeping(GRPOTrainer):
    def _generate_and_score_completions(self, inputs):
        rows = super()._generate_and_score_completions(inputs)
        self.generated = rows
        self.logged = {name: values[-1] for name, values in self._metrics["train"].items() if name.startswith("sampling/")}
        return rows


# TRL refuses to truncate without a bound.
@pytest.mark.parametrize(("mode", "bounds"), [(m, b) for m in MODES for b in BOUNDS if m.endswith("mask") or b != (None, None)])
def test_ratio_and_metrics_are_trls(model, tmp_path, mode, bounds):
    low, high = bounds
    stock = train(
        Keeping,
        model,
        tmp_path,
        max_steps=1,
        func=rollouts(unscored=0.2, tools=True, truncated=0.3),
        mask_truncated_completions=True,
        gradient_accumulation_steps=4,
        vllm_importance_sampling_mode=mode,
        vllm_importance_sampling_clip_min=low,
        vllm_importance_sampling_clip_max=high,
    )
    rows = stock.generated
    old, mu, mask = rows["old_per_token_logps"], rows["sampling_per_token_logps"], loss_mask(rows)
    assert mu.isnan().any() and (mask == 0).any()
    found = engine_ratio(old, mu, mask, mode, low, high)
    torch.testing.assert_close(found.ratio, rows["importance_sampling_ratio"], rtol=1e-6, atol=1e-6)
    metrics = ratio_metrics(ratio_stats(old, mu, mask, found), mode)
    assert len(stock.logged) == 5
    for name, value in stock.logged.items():
        assert metrics[name] == pytest.approx(value, rel=1e-6, abs=1e-6)
