from collections import defaultdict

import pytest

from grpo_ext.logprobs.metrics import ExactMeans


def log_slices(means, metrics, slices):
    for tokens, sequences, values in slices:
        with means.collecting(metrics, tokens, sequences):
            for name, value in values.items():
                metrics[name].append(value)


def test_a_slice_counts_by_its_tokens():
    """Slices of 10 tokens with kl 1 and of 90 with kl 2: 1.9, where TRL's mean of means says 1.5."""
    means, metrics = ExactMeans(), defaultdict(list)
    log_slices(means, metrics, [(10, 2, {"kl": 1.0}), (90, 2, {"kl": 2.0})])
    assert means.drain() == {"kl": pytest.approx(1.9)}
    assert means.drain() == {}


def test_what_others_log_stays_where_it_is():
    means, metrics = ExactMeans(), defaultdict(list, {"reward": [1.0], "kl": [7.0]})
    log_slices(means, metrics, [(10, 2, {"kl": 1.0, "mine": 3.0})])
    assert metrics == {"reward": [1.0], "kl": [7.0], "mine": [3.0]}


def test_clip_ratios_are_over_sequences_where_the_weights_are():
    slices = [(10, 2, {"clip_ratio/low_mean": 1.0}), (90, 2, {"clip_ratio/low_mean": 0.0})]
    for per_sequence, expected in ((False, 0.1), (True, 0.5)):
        means = ExactMeans(per_sequence)
        log_slices(means, defaultdict(list), slices)
        assert means.drain()["clip_ratio/low_mean"] == pytest.approx(expected)


def test_extremes_are_extremes_and_nan_is_nothing():
    means = ExactMeans()
    both = "clip_ratio/low_min", "clip_ratio/high_max"
    values = [(0.2, 0.3), (0.1, float("nan")), (0.4, 0.5)]
    log_slices(means, defaultdict(list), [(1, 1, dict(zip(both, pair, strict=True))) for pair in values])
    assert means.drain() == {"clip_ratio/low_min": 0.1, "clip_ratio/high_max": 0.5}


def test_slices_without_a_token_weigh_nothing():
    means = ExactMeans()
    log_slices(means, defaultdict(list), [(0, 2, {"kl": 0.0}), (5, 2, {"kl": 3.0})])
    assert means.drain() == {"kl": pytest.approx(3.0)}
    log_slices(means, defaultdict(list), [(0, 2, {"kl": 0.0})])
    assert means.drain() == {"kl": 0.0}
