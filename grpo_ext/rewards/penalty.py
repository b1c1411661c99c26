"""KL in the reward: one more reward function, whose reward is minus the coefficient times the KL of the row. Knows the trainer.

As a reward function among the others, with weight 1, it is summed before TRL normalises the group, it is gathered, logged and put
into the table of completions like them. What it needs passes by while TRL scores a generation (`Passes.scoring`): the reference
pass, which TRL makes as for `beta > 0`, and the arguments of that pass, with which the actor's is made. The actor's log-probs
then serve as old log-probs, so that nothing is computed twice; with old_logps="rollout" the engine's serve here, too.
"""

from typing import Any

import torch
from trl.models.utils import disable_gradient_checkpointing

from grpo_ext import _trl
from grpo_ext.rewards.kl import KLCoefficient, sequence_kl

NAME = "kl_in_reward"


class KLInReward:
    """Registers itself with the trainer; one per trainer that has `kl_in_reward=True`."""

    def __init__(self, trainer: Any):
        self._trainer = trainer
        start, target, horizon = (trainer._setting(f"{NAME}_{name}") for name in ("coef", "target", "horizon"))
        self.coefficient = KLCoefficient(start, target, horizon)
        _trl.add_reward(trainer, self._penalties, NAME)

    def _penalties(self, completions: list, **kwargs: Any) -> list[float]:
        """One for each of this rank's rows, on which all ranks' KL then moves the coefficient (a collective)."""
        scoring = self._trainer.anchors.passes.scoring
        mask = scoring.loss_mask()
        kl = sequence_kl(self._old_logps(scoring), scoring.reference, mask)
        penalties = (-self.coefficient.value * kl).tolist()
        self._observe(kl, mask.any(dim=1))
        return penalties

    def _old_logps(self, scoring: Any) -> torch.Tensor:
        """(B, T): log-probs of the policy that generated, which is the actor as it stands."""
        trainer = self._trainer
        if trainer._setting("old_logps") == "rollout":
            return scoring.rollout_logps()
        with (
            torch.no_grad(),
            disable_gradient_checkpointing(trainer.model, trainer.args.gradient_checkpointing_kwargs),
            trainer.phase_times.phase("old_logps"),
        ):
            score = trainer._get_per_token_logps_and_entropies
            scoring.actor = score(trainer.model, *scoring.arguments, **scoring.keywords)[0]
        return scoring.actor

    def _observe(self, kl: torch.Tensor, has_tokens: torch.Tensor) -> None:
        trainer, mode = self._trainer, self._trainer._mode
        counted = has_tokens & torch.isfinite(kl)
        sums = torch.stack([torch.where(counted, kl, 0.0).sum(), counted.sum().to(kl.dtype), kl.new_tensor(len(kl))])
        total, rows, rollouts = trainer.accelerator.reduce(sums, reduction="sum").tolist()
        mean = total / rows if rows else 0.0
        trainer._metrics[mode][f"{NAME}/kl"].append(mean)
        trainer._metrics[mode][f"{NAME}/coef"].append(self.coefficient.value)
        if mode == "train" and rows:
            self.coefficient.update(mean, int(rollouts))

    def state_dict(self) -> dict[str, Any]:
        return self.coefficient.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.coefficient.load_state_dict(state)
