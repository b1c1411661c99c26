"""How far apart engine and actor are on fresh rollouts, measured by a forward of its own after every generation."""

from typing import Any

import torch
from trl import GRPOTrainer


class FloorMixin:
    """Put before a trainer: `floor` gets one dict per generation, with the differences over all real completion tokens."""

    def __init__(self, *args: Any, **kwargs: Any):
        self.floor: list[dict[str, float]] = []
        super().__init__(*args, **kwargs)

    def _generate_and_score_completions(self, inputs: list) -> dict:
        rows = super()._generate_and_score_completions(inputs)
        ids = torch.cat([rows["prompt_ids"], rows["completion_ids"]], dim=1)
        mask = torch.cat([rows["prompt_mask"], rows["completion_mask"]], dim=1)
        width = rows["completion_ids"].size(1)
        with torch.no_grad():
            actor = GRPOTrainer._get_per_token_logps_and_entropies(self, self.model, ids, mask, width)[0]
        real = rows["completion_mask"].bool()
        mu, pi = rows["sampling_per_token_logps"][real].double(), actor[real].double()
        self.floor.append(
            {
                "mean_prob": (mu.exp() - pi.exp()).abs().mean().item(),
                "max_logp": (mu - pi).abs().max().item(),
                "version": self.state.global_step,
                "tokens": int(real.sum()),
            }
        )
        return rows


def worst(floor: list[dict[str, float]]) -> dict[str, float]:
    return {key: max(entry[key] for entry in floor) for key in ("mean_prob", "max_logp")}
