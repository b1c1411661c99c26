"""Probability differences between rollout and actor, as sums that add up over micro-batches and ranks. Pure.

mu: the engine's log-probs, pi: the actor's, both (B, T) in nats. d = |exp(mu) - exp(pi)|, in [0, 1].
"""

import torch

METRIC_PREFIX = "training/"
# Layout of the vector that `prob_diff_sums` returns.
_COUNT, _D, _DD, _MU, _PI, _MUMU, _PIPI, _MUPI = range(8)


def prob_diff_sums(mu_BT: torch.Tensor, pi_BT: torch.Tensor, mask_BT: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums (8,) and maximum () over the masked tokens, in float64; tokens without a log-prob on either side (NaN) are left out.

    A log-prob of -inf is a probability of 0 and counts. Reduce the first with SUM and the second with MAX.
    """
    valid = mask_BT.bool() & ~torch.isnan(mu_BT) & ~torch.isnan(pi_BT)
    mu, pi = mu_BT[valid].double().exp(), pi_BT[valid].double().exp()
    d = (mu - pi).abs()
    sums = torch.stack([torch.ones_like(d), d, d * d, mu, pi, mu * mu, pi * pi, mu * pi]).sum(dim=1)
    return sums, d.max() if d.numel() else d.new_zeros(())


def prob_diff_metrics(sums: torch.Tensor, maximum: torch.Tensor) -> dict[str, float]:
    """Metrics of reduced sums: mean, maximum, sample standard deviation, Pearson correlation. {} where no token counted."""
    s = sums.double().tolist()
    n = s[_COUNT]
    if n == 0:
        return {}
    mean = s[_D] / n
    variance = max(s[_DD] - n * mean * mean, 0.0) / (n - 1) if n > 1 else 0.0
    metrics = {
        "rollout_probs_diff_max": float(maximum),
        "rollout_probs_diff_mean": mean,
        "rollout_probs_diff_std": variance**0.5,
    }
    spread = (n * s[_MUMU] - s[_MU] ** 2) * (n * s[_PIPI] - s[_PI] ** 2)
    if spread > 0:
        metrics["rollout_actor_probs_pearson_corr"] = (n * s[_MUPI] - s[_MU] * s[_PI]) / spread**0.5
    return {METRIC_PREFIX + name: value for name, value in metrics.items()}
