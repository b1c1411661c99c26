"""Rows with nothing in them, on literal numbers: what stands in for an empty completion, and which rewards are used."""

import math

import torch

from grpo_ext.batch.empty import filled, hidden
from grpo_ext.rewards.usable import counts, usable, weighted_sums

NAN, INF = math.nan, math.inf


def test_an_end_token_stands_in_for_an_empty_completion_and_is_kept_out():
    ids, logprobs, empty = filled([[5, 6], [], [7]], [[-1.0, None], [], [-2.0]], end=1)
    assert (ids, logprobs, empty) == ([[5, 6], [1], [7]], [[-1.0, None], [0.0], [-2.0]], {1})
    assert hidden(None, ids, empty) == [[1, 1], [0], [1]]
    assert hidden([[1, 0], [], [1]], ids, empty) == [[1, 0], [0], [1]]


def test_nothing_changes_where_no_completion_is_empty():
    assert filled([[5], [6]], None, end=1) == ([[5], [6]], None, set())
    assert hidden(None, [[5], [6]], set()) is None
    assert hidden([[0], [1]], [[5], [6]], set()) == [[0], [1]]


def same(a, b):
    torch.testing.assert_close(a, torch.tensor(b), rtol=0, atol=0, equal_nan=True)


def test_what_is_not_finite_counts_as_none():
    rewards = torch.tensor([[1.0, INF], [NAN, -INF], [NAN, 2.0]])
    same(usable(rewards, judges=2), [[1.0, NAN], [NAN, NAN], [NAN, 2.0]])
    same(weighted_sums(usable(rewards, 2), torch.tensor([1.0, 0.5])), [[1.0], [NAN], [1.0]])


def test_the_penalty_alone_is_no_reward():
    rewards = torch.tensor([[1.0, -0.5], [INF, -0.5], [2.0, NAN]])  # one judge, then the KL penalty
    same(usable(rewards, judges=1), [[1.0, -0.5], [NAN, NAN], [2.0, NAN]])


def test_counts():
    raw = torch.tensor([[1.0], [1.0], [NAN], [INF], [3.0], [NAN], [0.0], [1.0]])
    rewards = usable(raw, judges=1)
    # groups of two: equal; none usable; one usable; different
    assert counts(raw, rewards, weighted_sums(rewards, torch.ones(1)), group=2, judges=1) == {
        "rewards/missing": 2.0,
        "rewards/infinite": 1.0,
        "rewards/none": 3.0,
        "groups/equal_rewards": 3.0,
    }


def test_functions_that_are_normalised_each_for_itself_are_compared_so():
    rewards = torch.tensor([[1.0, 0.0], [0.0, 1.0]])  # equal sums
    assert counts(rewards, rewards, weighted_sums(rewards, torch.ones(2)), 2, 2)["groups/equal_rewards"] == 1
    assert counts(rewards, rewards, rewards, 2, 2)["groups/equal_rewards"] == 0
