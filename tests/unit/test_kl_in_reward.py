"""KL in the reward: the estimate of a sequence and the coefficient, on literal numbers."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grpo_ext.rewards.kl import KLCoefficient, sequence_kl

NAN, INF = math.nan, math.inf


def test_the_kl_of_a_sequence_is_a_sum_over_its_loss_tokens():
    old = torch.tensor([[-1.0, -0.5, -3.0], [-2.0, -2.0, -9.0], [-1.0, -1.0, -1.0]])
    reference = torch.tensor([[-1.5, -1.5, -1.0], [-1.0, -2.5, -1.0], [-5.0, -5.0, -5.0]])
    mask = torch.tensor([[1, 1, 1], [1, 1, 0], [0, 0, 0]])
    # .5 + 1 - 2; -1 + .5, the third is masked; no token
    assert sequence_kl(old, reference, mask).tolist() == [-0.5, -0.5, 0.0]


def test_tokens_without_a_score_add_nothing_and_impossible_ones_are_seen():
    old = torch.tensor([[NAN, -1.0], [-INF, -1.0]])
    assert sequence_kl(old, torch.tensor([[-1.0, -2.0], [-1.0, -2.0]]), torch.ones(2, 2)).tolist() == [1.0, -INF]


def test_the_coefficient_moves_as_in_ziegler_et_al():
    coefficient = KLCoefficient(0.1, target=2.0, horizon=640)
    coefficient.update(5.0, rollouts=64)  # error 1.5, clipped to .2: x (1 + .2 * 64 / 640)
    assert coefficient.value == pytest.approx(0.102)
    coefficient.update(1.8, rollouts=64)  # error -.1: x .99
    assert coefficient.value == pytest.approx(0.10098)
    coefficient.update(-7.0, rollouts=64)  # clipped to -.2: x .98
    assert coefficient.value == pytest.approx(0.0989604)


def test_a_fixed_coefficient_stays_and_is_the_configurations():
    coefficient = KLCoefficient(0.1)
    coefficient.update(50.0, rollouts=64)
    coefficient.load_state_dict({"value": 7.0})
    assert coefficient.value == 0.1


def test_an_adaptive_one_is_remembered():
    coefficient, restored = KLCoefficient(0.1, 2.0, 640), KLCoefficient(0.5, 2.0, 640)
    coefficient.update(5.0, rollouts=64)
    restored.load_state_dict(coefficient.state_dict())
    assert restored.value == coefficient.value != 0.1


@given(st.lists(st.floats(-1e6, 1e6), max_size=50), st.integers(1, 100))
def test_it_stays_above_0_where_the_rule_lets_it(kls, rollouts):
    coefficient = KLCoefficient(0.1, target=1.0, horizon=rollouts // 5 + 1)
    for kl in kls:
        before = coefficient.value
        coefficient.update(kl, rollouts)
        assert coefficient.value > 0
        assert (coefficient.value > before) == (kl > 1.0) or coefficient.value == before
