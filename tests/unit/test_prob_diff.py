"""Case 1: the arithmetic of the probability difference, on literal values."""

import math

import pytest
import torch

from grpo_ext.consistency.prob_diff import prob_diff_metrics, prob_diff_sums

MU = torch.tensor([[0.5, 0.25, 0.9], [0.1, 0.8, 0.2]]).log()
PI = torch.tensor([[0.4, 0.25, 0.7], [0.1, 0.6, 0.9]]).log()
MASK = torch.tensor([[1, 1, 0], [1, 1, 0]])


def test_case_1():
    # differences under the mask: .1, 0, 0, .2
    metrics = prob_diff_metrics(*prob_diff_sums(MU, PI, MASK))
    assert metrics["training/rollout_probs_diff_mean"] == pytest.approx(0.075, abs=1e-6)
    assert metrics["training/rollout_probs_diff_max"] == pytest.approx(0.2, abs=1e-6)
    assert metrics["training/rollout_probs_diff_std"] == pytest.approx(0.09574, abs=1e-5)
    assert metrics["training/rollout_actor_probs_pearson_corr"] == pytest.approx(0.99594, abs=1e-5)


def test_nothing_under_the_mask_is_no_metric():
    assert prob_diff_metrics(*prob_diff_sums(MU, PI, torch.zeros_like(MASK))) == {}


def test_one_token_has_no_spread():
    metrics = prob_diff_metrics(*prob_diff_sums(MU[:1, :1], PI[:1, :1], MASK[:1, :1]))
    assert metrics["training/rollout_probs_diff_std"] == 0.0
    assert "training/rollout_actor_probs_pearson_corr" not in metrics


def test_nan_is_left_out_and_minus_infinity_is_probability_zero():
    mu = torch.tensor([[math.log(0.5), math.nan, -math.inf]])
    pi = torch.tensor([[math.log(0.4), math.log(0.3), math.log(0.2)]])
    metrics = prob_diff_metrics(*prob_diff_sums(mu, pi, torch.ones(1, 3)))
    assert metrics["training/rollout_probs_diff_mean"] == pytest.approx((0.1 + 0.2) / 2)


def test_sums_of_parts_are_the_sums_of_the_whole():
    whole, largest = prob_diff_sums(MU, PI, MASK)
    a, b = (prob_diff_sums(MU[i : i + 1], PI[i : i + 1], MASK[i : i + 1]) for i in (0, 1))
    torch.testing.assert_close(a[0] + b[0], whole, atol=1e-12, rtol=0)
    assert torch.maximum(a[1], b[1]) == largest
