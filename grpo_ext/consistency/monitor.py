"""Collects what rollouts and actor gave the same tokens, and yields exact aggregates over ranks, micro-batches and log intervals."""

from collections.abc import Callable
from typing import Any

import torch

from grpo_ext.consistency.prob_diff import prob_diff_metrics, prob_diff_sums


class ProbDiffMonitor:
    """Sums of probability differences by mode ("train" or "eval"), reduced over ranks as they come."""

    def __init__(self) -> None:
        self._sums: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}

    def observe(
        self,
        mode: str,
        mu_BT: torch.Tensor,
        pi_BT: torch.Tensor,
        mask_BT: torch.Tensor,
        reduce: Callable[..., torch.Tensor],
        gather: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        """Add rollouts. `reduce(tensor, "sum")` and `gather` are collectives: all ranks observe alike, whatever their masks."""
        sums, maximum = prob_diff_sums(mu_BT, pi_BT, mask_BT)
        sums, maximum = reduce(sums, reduction="sum"), gather(maximum.reshape(1)).max()
        if mode in self._sums:
            before, largest = self._sums[mode]
            sums, maximum = sums + before, torch.maximum(maximum, largest)
        self._sums[mode] = sums, maximum

    def drain(self, mode: str) -> dict[str, float]:
        """Metrics of all that was observed in `mode` since the last call; {} where nothing was."""
        if mode not in self._sums:
            return {}
        return prob_diff_metrics(*self._sums.pop(mode))

    def state_dict(self) -> dict[str, Any]:
        return {"sums": dict(self._sums)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._sums = dict(state["sums"])
