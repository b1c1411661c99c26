"""What the monitor's aggregates are: the formulas, written out on plain arrays, and that parts add up to the whole."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grpo_ext.consistency import keys
from grpo_ext.consistency.sums import ConsistencySums, consistency_metrics, consistency_sums


def random_rows(seed, B=7, T=23, noise=0.3):
    torch.manual_seed(seed)
    mu = -torch.rand(B, T, dtype=torch.float64) * 3
    pi = mu + noise * torch.randn(B, T, dtype=torch.float64)
    return mu, pi.clamp(max=0), (torch.rand(B, T) < 0.7).int()


def test_formulas():
    mu, pi, mask = random_rows(0)
    metrics = consistency_metrics(consistency_sums(mu, pi, mask))
    m = mask.bool().numpy()
    x, y = mu.numpy()[m], pi.numpy()[m]
    difference = y - x
    rho = np.exp(difference)
    rows = [(mu[i].numpy()[m[i]], pi[i].numpy()[m[i]]) for i in range(len(mu)) if m[i].any()]
    expected = {
        keys.MEAN: np.abs(np.exp(x) - np.exp(y)).mean(),
        keys.MAX: np.abs(np.exp(x) - np.exp(y)).max(),
        keys.STD: np.abs(np.exp(x) - np.exp(y)).std(ddof=1),
        keys.PEARSON: np.corrcoef(np.exp(x), np.exp(y))[0, 1],
        keys.RATIO_OUTSIDE: ((rho < 0.9) | (rho > 1.1)).mean(),
        keys.BIAS: difference.mean(),
        keys.LOGP_MAX: np.abs(difference).max(),
        keys.KL: -difference.mean(),
        keys.K3: (rho - difference - 1).mean(),
        keys.CHI2_TOKEN: (rho**2).mean() - 1,
        keys.CHI2_SEQ: np.mean([np.exp(2 * (b - a).sum()) for a, b in rows]) - 1,
        keys.ROLLOUT_PPL: np.mean([np.exp(-a.mean()) for a, _ in rows]),
        keys.TRAINING_PPL: np.mean([np.exp(-b.mean()) for _, b in rows]),
        keys.EFFECTIVE_SAMPLE_SIZE: 1 / np.mean((rho / rho.mean()) ** 2),
        keys.TOKENS: m.sum(),
        keys.UNSCORED: 0,
        keys.NON_FINITE: 0,
    }
    for name, value in expected.items():
        assert metrics[name] == pytest.approx(value, rel=1e-12, abs=1e-15), name


def test_weights_in_use_make_the_effective_sample_size():
    mu, pi, mask = random_rows(1)
    weights = torch.rand(*mask.shape)
    w = weights.double().numpy()[mask.bool().numpy()]
    metrics = consistency_metrics(consistency_sums(mu, pi, mask, weights))
    assert metrics[keys.EFFECTIVE_SAMPLE_SIZE] == pytest.approx(1 / np.mean((w / w.mean()) ** 2))
    per_row = torch.rand(len(mu), 1)
    w = per_row.double().expand_as(mu).numpy()[mask.bool().numpy()]
    metrics = consistency_metrics(consistency_sums(mu, pi, mask, per_row))
    assert metrics[keys.EFFECTIVE_SAMPLE_SIZE] == pytest.approx(1 / np.mean((w / w.mean()) ** 2))


def test_a_weight_without_bound_is_a_sample_of_one():
    mu, pi = torch.tensor([[-1.0, -1.0]]), torch.tensor([[-1.0, -1.0]])
    metrics = consistency_metrics(consistency_sums(mu, pi, torch.ones(1, 2), torch.tensor([[math.inf, 1.0]])))
    assert metrics[keys.EFFECTIVE_SAMPLE_SIZE] == pytest.approx(0.5)  # one of two


@pytest.mark.parametrize("scale", [1e-9, 1e-5, 1e-2, 0.3])
def test_quantiles_within_half_a_bin(scale):
    torch.manual_seed(2)
    mu = torch.zeros(50, 100, dtype=torch.float64)
    pi = torch.log1p(-(scale * torch.rand(50, 100, dtype=torch.float64) ** 3))
    d = (mu.exp() - pi.exp()).abs().flatten()
    metrics = consistency_metrics(consistency_sums(mu, pi, torch.ones(50, 100)))
    for name, q in keys.QUANTILES.items():
        assert metrics[name] == pytest.approx(float(d.quantile(q)), rel=0.07), name


def test_equal_sides_are_all_zero():
    mu, _, mask = random_rows(3)
    metrics = consistency_metrics(consistency_sums(mu, mu, mask))
    for name in (
        keys.MAX,
        keys.MEAN,
        keys.STD,
        *keys.QUANTILES,
        keys.RATIO_OUTSIDE,
        keys.BIAS,
        keys.KL,
        keys.K3,
        keys.CHI2_TOKEN,
    ):
        assert metrics[name] == 0.0, name
    assert metrics[keys.PEARSON] == metrics[keys.EFFECTIVE_SAMPLE_SIZE] == pytest.approx(1.0)


def test_deciles_are_tenths_of_each_rows_own_tokens():
    mu = torch.zeros(2, 20)
    pi = torch.zeros(2, 20)
    pi[0, 18:] = math.log(0.5)  # the last tenth of a row of twenty
    pi[1, 9] = math.log(0.25)  # the last token of a row of ten
    mask = torch.ones(2, 20)
    mask[1, 10:] = 0
    metrics = consistency_metrics(consistency_sums(mu, pi, mask))
    assert metrics[keys.DECILE.format(decile=9)] == pytest.approx((0.5 + 0.5 + 0.75) / 3)
    assert all(metrics[keys.DECILE.format(decile=i)] == 0.0 for i in range(9))


def test_extreme_ratios_stay_finite():
    mu, pi = torch.tensor([[-1e4, -math.inf, 0.0]]), torch.tensor([[0.0, -1.0, math.nan]])
    metrics = consistency_metrics(consistency_sums(mu, pi, torch.ones(1, 3)))
    assert all(math.isfinite(value) for value in metrics.values())
    assert metrics[keys.NON_FINITE] == 2
    assert metrics[keys.RATIO_OUTSIDE] == 1.0


def test_an_actor_at_plus_infinity_is_counted_and_left_out():
    mu, pi = torch.tensor([[-1.0, -1.0]]), torch.tensor([[math.inf, -1.0]])
    metrics = consistency_metrics(consistency_sums(mu, pi, torch.ones(1, 2)))
    assert (metrics[keys.NON_FINITE], metrics[keys.MEAN], metrics[keys.MAX]) == (1, 0.0, 0.0)


def test_only_unscored_tokens_leave_counts():
    metrics = consistency_metrics(consistency_sums(torch.full((2, 3), math.nan), torch.zeros(2, 3), torch.ones(2, 3)))
    assert metrics == {keys.TOKENS: 6, keys.UNSCORED: 6, keys.NON_FINITE: 0}


@given(st.integers(0, 10_000), st.lists(st.integers(0, 7), max_size=3))
def test_parts_add_up_to_the_whole(seed, cuts):
    mu, pi, mask = random_rows(seed)
    mu[0, 0], pi[1, 1], mu[2, 2] = math.nan, math.nan, -math.inf
    edges = [0, *sorted(cuts), 7]
    parts = [consistency_sums(mu[a:b], pi[a:b], mask[a:b]) for a, b in pairwise(edges)]
    whole, total = consistency_metrics(consistency_sums(mu, pi, mask)), consistency_metrics(sum(parts[1:], parts[0]))
    assert whole.keys() == total.keys()
    for name, value in whole.items():
        assert total[name] == pytest.approx(value, rel=1e-12, abs=1e-12), name


def test_padding_changes_nothing():
    mu, pi, mask = random_rows(5)
    wide = [torch.nn.functional.pad(x, (0, 9)) for x in (mu, pi, mask)]
    narrow = consistency_sums(mu, pi, mask)
    torch.testing.assert_close(consistency_sums(*wide).sums, narrow.sums, rtol=1e-12, atol=1e-12)
    assert isinstance(narrow, ConsistencySums)
