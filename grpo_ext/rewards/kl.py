"""KL divergence from the reference as a part of the reward: the estimate of a sequence, and its coefficient. Pure.

The objective is E[r - coef * KL(pi || ref)] over whole completions. By the chain rule the KL of a sequence is a sum over its
tokens, and log pi - log ref of the sampled tokens (k1) estimates it without bias, so that r - coef * sum(k1) is a reward whose
policy gradient is that of the objective. The estimators that are better in a loss (k3, low variance, never negative) are biased
in this place: a reward is not differentiated. B rows, T completion tokens, nats.
"""

from dataclasses import dataclass
from typing import Any

import torch

# Bounds of the relative error by which the coefficient moves (Ziegler et al. 2019, section 2.2).
CLIP = 0.2


def sequence_kl(old_BT: torch.Tensor, reference_BT: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    """(B,): sum of log pi_old - log ref over the tokens under the mask, 0 for a row without any. Not finite where a summand is
    not; a NaN in `old_BT`, a token that the engine did not score, adds nothing."""
    difference = old_BT.double() - reference_BT.double()
    counts = mask_BT.bool() & ~torch.isnan(old_BT)
    return torch.where(counts, difference, 0.0).sum(dim=1)


@dataclass
class KLCoefficient:
    """The coefficient, fixed, or moved so that the KL of a sequence comes to `target` nats.

    horizon: rollouts in which it moves by a factor of up to about e^0.2. Ziegler et al. 2019, "Fine-Tuning Language Models from
    Human Preferences"; their horizon is 10,000.
    """

    value: float
    target: float | None = None
    horizon: int = 10_000

    def update(self, kl: float, rollouts: int) -> None:
        """After `rollouts` of mean `kl` nats a sequence, all ranks' together."""
        if self.target is not None and rollouts:
            error = min(max(kl / self.target - 1, -CLIP), CLIP)
            self.value *= 1 + error * rollouts / self.horizon

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """A fixed coefficient is that of the configuration."""
        if self.target is not None:
            self.value = state["value"]
