import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grpo_ext.logprobs.ratio import MODES, engine_ratio, ratio_metrics, ratio_stats

# log-ratios: row 0 is [log 2, log 8, (masked)], row 1 is [log 1/8, nothing scored, log 1]
OLD = torch.tensor([[-1.0, -1.0, -1.0], [-4.0, -2.0, -0.5]])
MU = torch.tensor([[-1.0 - math.log(2), -1.0 - math.log(8), -9.0], [-4.0 + math.log(8), float("nan"), -0.5]])
MASK = torch.tensor([[1, 1, 0], [1, 1, 1]])


@pytest.mark.parametrize(
    ("mode", "low", "high", "expected"),
    [
        ("token_truncate", None, 3.0, [[2, 3, 1], [0.125, 1, 1]]),
        ("token_truncate", 0.5, 3.0, [[2, 3, 1], [0.5, 1, 1]]),
        ("token_truncate", None, None, [[2, 8, 1], [0.125, 1, 1]]),
        ("token_mask", None, 3.0, [[2, 0, 1], [0.125, 1, 1]]),
        ("token_mask", 0.5, 3.0, [[2, 0, 1], [0, 1, 1]]),
        ("token_mask", 0.5, None, [[2, 8, 1], [0, 1, 1]]),
        ("sequence_truncate", None, 3.0, [[3], [0.125]]),  # 2 * 8 = 16 and 1/8
        ("sequence_truncate", 0.5, 20.0, [[16], [0.5]]),
        ("sequence_mask", None, 3.0, [[0], [0.125]]),
        ("sequence_mask", 0.5, None, [[16], [0]]),
    ],
)
def test_ratios_by_hand(mode, low, high, expected):
    torch.testing.assert_close(engine_ratio(OLD, MU, MASK, mode, low, high).ratio, torch.tensor(expected).float())


def test_before_clipping_and_the_fraction_masked():
    found = engine_ratio(OLD, MU, MASK, "token_mask", 0.5, 3.0)
    metrics = ratio_metrics(ratio_stats(OLD, MU, MASK, found), "token_mask")
    assert metrics["sampling/importance_sampling_ratio/raw_max"] == pytest.approx(8)
    assert metrics["sampling/importance_sampling_ratio/raw_min"] == pytest.approx(0.125)
    assert metrics["sampling/importance_sampling_ratio/raw_mean"] == pytest.approx((2 + 8 + 0.125 + 1 + 1) / 5)
    assert metrics["sampling/importance_sampling_ratio/masked_fraction"] == pytest.approx(2 / 5)
    assert metrics["sampling/importance_sampling_ratio/mean"] == pytest.approx((2 + 0 + 0 + 1 + 1) / 5)
    # the unscored token is in no difference: log 2, log 8, log 8, 0
    assert metrics["sampling/sampling_logp_difference/mean"] == pytest.approx(7 * math.log(2) / 4)
    assert metrics["sampling/sampling_logp_difference/max"] == pytest.approx(3 * math.log(2))


def test_the_probabilities_of_case_1():
    """Actor over rollout: .4/.5, .25/.25 | .1/.1, .6/.8; the last column is masked, or the mean would move."""
    mu = torch.tensor([[0.5, 0.25, 0.9], [0.1, 0.8, 0.2]]).log()
    old = torch.tensor([[0.4, 0.25, 0.7], [0.1, 0.6, 0.9]]).log()
    mask = torch.tensor([[1, 1, 0], [1, 1, 0]])
    tokens = engine_ratio(old, mu, mask, "token_truncate", None, 3.0)
    torch.testing.assert_close(tokens.ratio, torch.tensor([[0.8, 1, 1], [1, 0.75, 1]]))
    sequences = engine_ratio(old, mu, mask, "sequence_mask", None, 3.0)
    torch.testing.assert_close(sequences.ratio, torch.tensor([[0.8], [0.75]]))
    metrics = ratio_metrics(ratio_stats(old, mu, mask, tokens), "token_truncate")
    assert metrics["sampling/sampling_logp_difference/mean"] == pytest.approx(-(math.log(0.8) + math.log(0.75)) / 4)
    assert metrics["sampling/importance_sampling_ratio/mean"] == pytest.approx((0.8 + 1 + 1 + 0.75) / 4)


def test_an_unknown_mode_is_refused_with_one_that_works():
    with pytest.raises(ValueError, match=r"'token'.*sequence_mask"):
        engine_ratio(OLD, MU, MASK, "token", None, 3.0)


def test_rows_without_a_token_make_no_metric_of_differences():
    nothing = torch.zeros_like(MASK)
    stats = ratio_stats(OLD, MU, nothing, engine_ratio(OLD, MU, nothing, "token_mask", None, 3.0))
    assert ratio_metrics(stats, "token_mask") == {}


def test_a_token_the_engine_held_impossible_leaves_the_metrics_finite():
    mu = torch.tensor([[-math.inf, -1.0]])
    old, mask = torch.tensor([[-1.0, -1.0]]), torch.ones(1, 2)
    for mode in MODES:
        found = engine_ratio(old, mu, mask, mode, None, 3.0)
        assert torch.isfinite(found.ratio).all()
        assert ratio_metrics(ratio_stats(old, mu, mask, found), mode)["sampling/sampling_logp_difference/mean"] == 0


@given(st.data())
def test_parts_add_up_to_the_whole(data):
    """Exact over micro-batches and ranks: any cut of the rows gives the same metrics."""
    n, T = data.draw(st.integers(2, 6)), data.draw(st.integers(1, 5))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    old, mu = -torch.rand(n, T, generator=generator) * 4, -torch.rand(n, T, generator=generator) * 4
    mask = (torch.rand(n, T, generator=generator) < 0.7).long()
    mode, at = data.draw(st.sampled_from(MODES)), data.draw(st.integers(1, n - 1))

    def stats(rows):
        found = engine_ratio(old[rows], mu[rows], mask[rows], mode, 0.5, 2.0)
        return ratio_stats(old[rows], mu[rows], mask[rows], found)

    whole = ratio_metrics(stats(slice(0, n)), mode)
    parts = ratio_metrics(stats(slice(0, at)) + stats(slice(at, n)), mode)
    assert whole == pytest.approx(parts, rel=1e-12)
