"""A run with the KL in the reward, and stock TRL on the same rollouts, given reward minus penalty as its reward."""

from typing import Any

import torch
from trl import GRPOTrainer

from grpo_ext import GRPOExtTrainer
from tests.trainer import replay


class Watched(GRPOExtTrainer):
    """Keeps, by generation, the summed reward of this rank's rows, and (reward, penalty, tokens in the loss) of all ranks' rows."""

    def __init__(self, *args: Any, **kwargs: Any):
        self.sums: list[list[float]] = []
        self.rewards: list[list[list[float]]] = []
        super().__init__(*args, **kwargs)

    def _calculate_rewards(self, inputs: list, *args: Any, **kwargs: Any) -> torch.Tensor:
        rewards = super()._calculate_rewards(inputs, *args, **kwargs)
        start = len(inputs) * self.accelerator.process_index
        tokens = self.accelerator.gather(self.anchors.passes.scoring.loss_mask().sum(dim=1))
        self.rewards.append(torch.cat([rewards, tokens[:, None]], dim=1).tolist())
        self.sums.append(rewards.nansum(dim=1)[start : start + len(inputs)].tolist())
        return rewards


def against_stock(
    model: Any, out: Any, stock: type = GRPOTrainer, ours: type = Watched, rollouts: dict[str, Any] | None = None, **config: Any
) -> tuple[Any, Any]:
    """(stock TRL's run, ours)."""
    torch.manual_seed(0)
    watched = replay.train(ours, model, f"{out}/ours", func=replay.rollouts(**(rollouts or {})), **config)
    recorded = iter(watched.sums)

    def judge(made: Any) -> None:
        made.reward_funcs = [lambda completions, **kwargs: next(recorded)]

    theirs = {k: v for k, v in config.items() if not k.startswith((*replay.OWN, "kl_in_reward"))}
    torch.manual_seed(0)
    plain = replay.train(stock, model, f"{out}/stock", func=replay.rollouts(**(rollouts or {})), before=judge, **theirs)
    return plain, watched
