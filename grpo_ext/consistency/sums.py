"""Agreement of rollouts and actor as sums and maxima, which add up over micro-batches and ranks; metrics are made of them. Pure.

mu: the engine's log-probs, pi: the actor's, (B, T) in nats; mask (B, T): the tokens that count. With d = |exp(mu) - exp(pi)|,
l = pi - mu and rho = exp(l). A token enters what is made of probabilities where both log-probs exist (-inf is probability 0),
and what is made of l where both are finite. Formulas of the KL estimates, chi-square and the effective sample size: verl's
`rollout_corr` metrics, defined over finite tokens of the loss mask here.
"""

import math
from dataclasses import dataclass

import torch

from grpo_ext.consistency import keys

# Quantiles are read off a histogram of log10 d, exact in its counts: bins of 1/40 decade (6%) from 1e-12 to 1.
_DECADES, _PER_DECADE = 12, 40
_BINS = _DECADES * _PER_DECADE + 1  # bin 0: below 1e-12, exact zeros
_LARGEST_EXPONENT = 300.0  # of a ratio, so that its square stays finite in float64
_LARGEST_RATIO = math.exp(_LARGEST_EXPONENT)

_PER_TOKEN = (
    "n_p", "d", "dd", "mu", "pi", "mumu", "pipi", "mupi", "outside", "n_l", "l", "k3", "rho_squared", "w", "ww",
    "tokens", "unscored", "non_finite",
)  # fmt: skip
_PER_ROW = ("n_rows", "ppl_mu", "ppl_pi", "chi2")
_SCALARS = {name: i for i, name in enumerate((*_PER_TOKEN, *_PER_ROW))}
_DECILES = slice(len(_SCALARS), len(_SCALARS) + 20)  # ten counts, ten sums of d
_HISTOGRAM = slice(_DECILES.stop, _DECILES.stop + _BINS)
SIZE = _HISTOGRAM.stop


@dataclass(frozen=True)
class ConsistencySums:
    """sums (SIZE,) and maxima (2,): of d and of |l|, float64. Over ranks: SUM the first, MAX the second."""

    sums: torch.Tensor
    maxima: torch.Tensor

    def __add__(self, other: "ConsistencySums") -> "ConsistencySums":
        return ConsistencySums(self.sums + other.sums, torch.maximum(self.maxima, other.maxima))


def consistency_sums(
    mu_BT: torch.Tensor, pi_BT: torch.Tensor, mask_BT: torch.Tensor, weights: torch.Tensor | None = None
) -> ConsistencySums:
    """Sums of some rows. weights (B, T) or (B, 1): the importance weights in use, for the effective sample size; else rho."""
    mask = mask_BT.bool()
    scored = mask & (mu_BT < torch.inf) & (pi_BT < torch.inf)  # nor NaN
    finite = mask & torch.isfinite(mu_BT) & torch.isfinite(pi_BT)
    mu, pi = mu_BT.double(), pi_BT.double()
    p_mu, p_pi = (torch.where(scored, x, -torch.inf).exp() for x in (mu, pi))
    d = (p_mu - p_pi).abs()
    difference = torch.where(finite, pi - mu, 0.0)
    l_BT = difference.clamp(-_LARGEST_EXPONENT, _LARGEST_EXPONENT)
    rho = torch.where(finite, l_BT.exp(), 0.0)
    w = rho if weights is None else torch.where(finite, weights.double().clamp(max=_LARGEST_RATIO).expand_as(rho), 0.0)
    low, high = keys.RATIO_BOUNDS
    outside = (finite & ((rho < low) | (rho > high))) | (scored & ~finite & (d > 0))
    unscored = mask & torch.isnan(mu_BT)
    per_token = [
        scored, d, d * d, p_mu, p_pi, p_mu * p_mu, p_pi * p_pi, p_mu * p_pi, outside, finite, difference,
        torch.where(finite, rho - l_BT - 1, 0.0), rho * rho, w, w * w, mask, unscored, mask & ~unscored & ~finite,
    ]  # fmt: skip
    rows = _row_sums(torch.where(finite, mu, 0.0), torch.where(finite, pi, 0.0), difference, finite)
    scalars = torch.stack([*(x.double().sum() for x in per_token), *rows])
    largest = [x.max() if x.numel() else x.new_zeros(()) for x in (d, difference.abs())]
    return ConsistencySums(torch.cat([scalars, _decile_sums(d, scored, mask), _histogram(d, scored)]), torch.stack(largest))


def _row_sums(mu: torch.Tensor, pi: torch.Tensor, l_BT: torch.Tensor, finite: torch.Tensor) -> list[torch.Tensor]:
    """Rows that have finite tokens, and over those: exp(-mean mu), exp(-mean pi), exp(2 sum l)."""
    n = finite.sum(dim=1).double()
    counts = n > 0
    of = n.clamp(min=1)
    exponents = [
        x.clamp(-2 * _LARGEST_EXPONENT, 2 * _LARGEST_EXPONENT) for x in (-mu.sum(1) / of, -pi.sum(1) / of, 2 * l_BT.sum(1))
    ]
    return [counts.double().sum(), *(torch.where(counts, exponent.exp(), 0.0).sum() for exponent in exponents)]


def _decile_sums(d: torch.Tensor, scored: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Counts (10) and sums of d (10) by tenths of each row's own masked tokens."""
    place = mask.cumsum(dim=1) - 1
    decile = (place * 10 // mask.sum(dim=1, keepdim=True).clamp(min=1)).clamp(0, 9).flatten()
    counts, sums = (d.new_zeros(10).scatter_add_(0, decile, x.double().flatten()) for x in (scored, d))
    return torch.cat([counts, sums])


def _histogram(d: torch.Tensor, scored: torch.Tensor) -> torch.Tensor:
    at = ((d.log10() + _DECADES) * _PER_DECADE).floor().clamp(-1, _BINS - 2).long() + 1
    return d.new_zeros(_BINS).scatter_add_(0, at.flatten(), scored.double().flatten())


def consistency_metrics(of: ConsistencySums) -> dict[str, float]:
    """Every metric of `keys` that these sums give, counts included; {} where the mask held no token at all."""
    values = of.sums.double().tolist()
    s = {name: values[i] for name, i in _SCALARS.items()}
    if s["tokens"] == 0:
        return {}
    counts = {keys.TOKENS: s["tokens"], keys.UNSCORED: s["unscored"], keys.NON_FINITE: s["non_finite"]}
    largest, logp_largest = of.maxima.tolist()
    return _of_probabilities(s, largest, values) | _of_log_ratios(s, logp_largest) | counts


def _of_probabilities(s: dict[str, float], largest: float, values: list[float]) -> dict[str, float]:
    n = s["n_p"]
    if n == 0:
        return {}
    mean = s["d"] / n
    variance = max(s["dd"] - n * mean * mean, 0.0) / (n - 1) if n > 1 else 0.0
    metrics = {keys.MAX: largest, keys.MEAN: mean, keys.STD: variance**0.5, keys.RATIO_OUTSIDE: s["outside"] / n}
    spread = (n * s["mumu"] - s["mu"] ** 2) * (n * s["pipi"] - s["pi"] ** 2)
    if spread > 0:
        metrics[keys.PEARSON] = max(-1.0, min(1.0, (n * s["mupi"] - s["mu"] * s["pi"]) / spread**0.5))
    metrics |= {name: _quantile(values[_HISTOGRAM], n * q, largest) for name, q in keys.QUANTILES.items()}
    deciles = values[_DECILES]
    for i, (count, total) in enumerate(zip(deciles[:10], deciles[10:], strict=True)):
        if count:
            metrics[keys.DECILE.format(decile=i)] = total / count
    return metrics


def _quantile(counts: list[float], rank: float, largest: float) -> float:
    """The d that `rank` tokens do not exceed: the middle, on the log scale, of the bin it falls into."""
    seen = 0.0
    for i, count in enumerate(counts):
        seen += count
        if count and seen >= rank:
            return 0.0 if i == 0 else min(largest, 10 ** ((i - 0.5) / _PER_DECADE - _DECADES))
    return largest


def _of_log_ratios(s: dict[str, float], largest: float) -> dict[str, float]:
    n, rows = s["n_l"], s["n_rows"]
    if n == 0:
        return {}
    metrics = {
        keys.BIAS: s["l"] / n,
        keys.LOGP_MAX: largest,
        keys.KL: -s["l"] / n,
        keys.K3: s["k3"] / n,
        keys.CHI2_TOKEN: s["rho_squared"] / n - 1,
        keys.ROLLOUT_PPL: s["ppl_mu"] / rows,
        keys.TRAINING_PPL: s["ppl_pi"] / rows,
        keys.CHI2_SEQ: s["chi2"] / rows - 1,
    }
    if s["ww"] > 0:
        metrics[keys.EFFECTIVE_SAMPLE_SIZE] = s["w"] ** 2 / (n * s["ww"])
    return metrics
