"""The importance ratio between the actor's old policy and the engine that sampled: pi_old / mu, as TRL 1.16 defines it. Pure.

Source: `GRPOTrainer._generate_and_score_completions` (truncated importance sampling, "Your Efficient RL Framework Secretly
Brings You Off-Policy RL Training", and masked importance sampling, IcePop). old: log pi_old, mu: the engine's log-probs, both
(B, T) in nats; mask (B, T) is 1 on the tokens that count (completion mask times tool mask).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
PREFIX = "sampling/"


@dataclass(frozen=True)
class EngineRatio:
    """ratio: what multiplies the loss; raw: before clipping; outside: where raw left the bounds. (B, T) in token modes, (B, 1)
    in sequence modes. Tokens without a mask, or that the engine did not score, have log-ratio 0."""

    mode: str
    ratio: torch.Tensor
    raw: torch.Tensor
    outside: torch.Tensor


def engine_ratio(
    old_BT: torch.Tensor, mu_BT: torch.Tensor, mask_BT: torch.Tensor, mode: str, low: float | None, high: float | None
) -> EngineRatio:
    """Ratio per token, or per sequence (product over its tokens); outside [low, high] clamped ("truncate") or 0 ("mask")."""
    if mode not in MODES:
        raise ValueError(
            f"Importance sampling mode {mode!r} is none of {', '.join(MODES)}. Set 'sequence_mask', TRL's default."
        )
    log_ratio = torch.nan_to_num((old_BT - mu_BT) * mask_BT, nan=0.0)
    if mode.startswith("sequence"):
        log_ratio = log_ratio.sum(dim=-1, keepdim=True)
    raw = log_ratio.exp()
    outside = (raw < (-math.inf if low is None else low)) | (raw > (math.inf if high is None else high))
    if mode.endswith("mask"):
        return EngineRatio(mode, raw.masked_fill(outside, 0.0), raw, outside)
    if low is None and high is None:
        return EngineRatio(mode, raw, raw, outside)
    return EngineRatio(mode, raw.clamp(min=low, max=high), raw, outside)


@dataclass(frozen=True)
class RatioStats:
    """What the `sampling/*` metrics are made of, in float64: sums (6,) and highs (5,), minima riding along negated. Combine by
    sum and by maximum, over micro-batches and over ranks alike."""

    sums: torch.Tensor
    highs: torch.Tensor

    def __add__(self, other: "RatioStats") -> "RatioStats":
        return RatioStats(self.sums + other.sums, torch.maximum(self.highs, other.highs))

    def over_ranks(self, reduce: Callable[..., torch.Tensor], gather: Callable[[torch.Tensor], torch.Tensor]) -> "RatioStats":
        """Those of all ranks, by one sum and one gather (collectives: every rank calls alike)."""
        return RatioStats(reduce(self.sums, reduction="sum"), gather(self.highs[None]).amax(dim=0))


def ratio_stats(old_BT: torch.Tensor, mu_BT: torch.Tensor, mask_BT: torch.Tensor, ratio: EngineRatio) -> RatioStats:
    """Sums and extremes over masked tokens (ratios of sequence modes: over sequences). Non-finite differences are left out."""
    mask = mask_BT.bool()
    delta = (old_BT - mu_BT).abs().double()
    delta = delta[mask & torch.isfinite(delta)]
    counted = torch.ones_like(ratio.raw, dtype=torch.bool) if ratio.mode.startswith("sequence") else mask
    used, raw, outside = (x[counted].double() for x in (ratio.ratio, ratio.raw, ratio.outside))
    count = [x.new_tensor(x.numel()) for x in (delta, used)]
    sums = torch.stack([count[0], delta.sum(), count[1], used.sum(), raw.sum(), outside.sum()])
    highs = [x.max() if x.numel() else x.new_tensor(-math.inf) for x in (delta, -used, used, -raw, raw)]
    return RatioStats(sums, torch.stack(highs))


def ratio_metrics(stats: RatioStats, mode: str) -> dict[str, float]:
    """TRL's `sampling/*` names, the same before clipping (`.../raw_*`), and the fraction that was masked or truncated."""
    n_delta, delta, n_ratio, used, raw, outside = stats.sums.tolist()
    delta_max, minus_min, high, minus_raw_min, raw_high = stats.highs.tolist()
    name = "importance_sampling_ratio"
    metrics: dict[str, float] = {}
    if n_delta:
        metrics |= {"sampling_logp_difference/mean": delta / n_delta, "sampling_logp_difference/max": delta_max}
    if n_ratio:
        fate = "masked" if mode.endswith("mask") else "truncated"
        metrics |= {
            f"{name}/min": -minus_min,
            f"{name}/mean": used / n_ratio,
            f"{name}/max": high,
            f"{name}/raw_min": -minus_raw_min,
            f"{name}/raw_mean": raw / n_ratio,
            f"{name}/raw_max": raw_high,
            f"{name}/{fate}_fraction": outside / n_ratio,
        }
    return {PREFIX + key: value for key, value in metrics.items()}
