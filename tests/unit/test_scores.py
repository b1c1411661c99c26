"""Unscored tokens are counted, lengths that differ are an error that names the row, a positive log-prob is rejected."""

import math

import pytest

from grpo_ext.rollout.scores import RolloutScores, check_rollout_scores


def test_unscored_tokens_are_counted():
    assert check_rollout_scores([[4, 5, 6]], [[-0.5, None, -0.7]]) == RolloutScores(scored=2, unscored=1)
    assert check_rollout_scores([[4, 5]], [[math.nan, -0.7]]) == RolloutScores(scored=1, unscored=1)


def test_minus_infinity_is_a_score():
    assert check_rollout_scores([[4]], [[-math.inf]]) == RolloutScores(scored=1, unscored=0)


def test_lengths_that_differ_name_the_row():
    with pytest.raises(ValueError, match="Row 1: 3 completion tokens but 2 log-probs"):
        check_rollout_scores([[4], [4, 5, 6]], [[-0.1], [-0.5, -0.7]])
    with pytest.raises(ValueError, match="2 completions came with log-probs for 1 rows"):
        check_rollout_scores([[4], [5]], [[-0.1]])


def test_a_positive_log_prob_is_rejected():
    with pytest.raises(ValueError, match=r"Row 0, token 1: log-prob 0\.2 is positive"):
        check_rollout_scores([[4, 5]], [[-0.5, 0.2]])
    check_rollout_scores([[4]], [[1e-7]])  # a rounding error of a log-softmax


def test_empty_rows():
    assert check_rollout_scores([[], [4]], [[], [-1.0]]) == RolloutScores(scored=1, unscored=0)
