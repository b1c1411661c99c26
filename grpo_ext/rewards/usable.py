"""Rewards that cannot be used, taken out before group statistics are made of them. Pure.

N rollouts of all ranks, group by group; F reward functions. TRL writes None as NaN, leaves NaN out of sums, means and standard
deviations, and gives a row of nothing but NaN the advantage 0. An infinite reward it takes for a number: the group's mean
becomes infinite, and advantages infinite or 0. Here it is treated as None, too, and so is one of which float32 cannot take a variance.
"""

import torch

LARGEST = 1e16  # the squares of thousands of them add up to less than float32 holds


def infinite(rewards_NF: torch.Tensor) -> torch.Tensor:
    """(N, F): whether a value is infinite, or as good as that."""
    return rewards_NF.abs() > LARGEST


def usable(rewards_NF: torch.Tensor, judges: int) -> torch.Tensor:
    """(N, F): every value that is not finite as NaN. A row that none of the first `judges` functions has judged is NaN in every
    column: what the others would say of it (the KL penalty) is no reward by itself."""
    finite = torch.where(infinite(rewards_NF), torch.nan, rewards_NF)
    unjudged = torch.isnan(finite[:, :judges]).all(dim=1, keepdim=True)
    return torch.where(unjudged, torch.nan, finite)


def counts(raw_NF: torch.Tensor, rewards_NF: torch.Tensor, compared: torch.Tensor, group: int, judges: int) -> dict[str, float]:
    """What is odd about rewards, all ranks: see docs/rows.md.

    Args:
        raw_NF: as the functions gave them. rewards_NF: as `usable` left them.
        compared: (N, K), what is normalised in a group: the sums of rewards (K = 1), or each function's for itself.
        group: rollouts of a prompt. judges: as in `usable`.
    """
    grouped = compared.view(-1, group, compared.size(1))
    highest = grouped.nan_to_num(nan=-torch.inf).amax(dim=1)
    lowest = grouped.nan_to_num(nan=torch.inf).amin(dim=1)
    return {
        "rewards/missing": float(torch.isnan(raw_NF[:, :judges]).sum()),
        "rewards/infinite": float(infinite(raw_NF[:, :judges]).sum()),
        "rewards/none": float(torch.isnan(rewards_NF).all(dim=1).sum()),
        "groups/equal_rewards": float((highest <= lowest).all(dim=1).sum()) if group > 1 else 0.0,  # 1: in evaluation only
    }


def weighted_sums(rewards_NF: torch.Tensor, weights_F: torch.Tensor) -> torch.Tensor:
    """(N, 1): the reward of every row over the functions that judged it; NaN where none did."""
    sums = (rewards_NF * weights_F).nansum(dim=1, keepdim=True)
    return torch.where(torch.isnan(rewards_NF).all(dim=1, keepdim=True), torch.nan, sums)
