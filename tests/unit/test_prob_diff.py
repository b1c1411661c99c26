"""Probability differences of a batch from anywhere, on literal values, and what they leave on disk."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from grpo_ext.consistency import calculate_prob_diff_metrics, calculate_token_level_prob_diff

MU = torch.tensor([[0.5, 0.25, 0.9], [0.1, 0.8, 0.2]]).log()
PI = torch.tensor([[0.4, 0.25, 0.7], [0.1, 0.6, 0.9]]).log()
MASK = torch.tensor([[1, 1, 0], [1, 1, 0]])


def batch(mu=MU, pi=PI, mask=MASK, **more):
    return {"rollout_log_probs": mu, "old_log_probs": pi, "responses": torch.zeros(mu.shape), "response_mask": mask, **more}


def test_case_1():
    # differences under the mask: .1, 0, 0, .2
    metrics = calculate_prob_diff_metrics(batch())
    assert metrics["training/rollout_probs_diff_mean"] == pytest.approx(0.075, abs=1e-6)
    assert metrics["training/rollout_probs_diff_max"] == pytest.approx(0.2, abs=1e-6)
    assert metrics["training/rollout_probs_diff_std"] == pytest.approx(0.09574, abs=1e-5)
    assert metrics["training/rollout_actor_probs_pearson_corr"] == pytest.approx(0.99594, abs=1e-5)
    # ratios .8, 1, 1, .75: two of four outside [.9, 1.1]
    assert metrics["training/rollout_ratio_outside_fraction"] == 0.5
    assert metrics["training/rollout_tokens"] == 4


def test_without_the_mask_the_mean_would_be_another():
    metrics = calculate_prob_diff_metrics(batch(mask=torch.ones_like(MASK)))
    assert metrics["training/rollout_probs_diff_mean"] == pytest.approx(0.2, abs=1e-6)


def test_nothing_under_the_mask(tmp_path):
    empty = batch(mask=torch.zeros_like(MASK))
    assert calculate_prob_diff_metrics(empty) == {}
    assert calculate_token_level_prob_diff(empty, tmp_path, 7) == {}
    diff, mask = (np.load(tmp_path / f"prob_{kind}_step_7.npy", allow_pickle=False) for kind in ("diff", "mask"))
    assert (diff.shape, diff.dtype, mask.shape, mask.dtype) == ((2, 3), np.float32, (2, 3), bool)
    assert not diff.any()
    assert not mask.any()


def test_one_token_has_no_spread():
    metrics = calculate_prob_diff_metrics(batch(MU[:1, :1], PI[:1, :1], MASK[:1, :1]))
    assert metrics["training/rollout_probs_diff_std"] == 0.0
    assert "training/rollout_actor_probs_pearson_corr" not in metrics
    assert not any(math.isnan(value) for value in metrics.values())


def test_case_2_unscored_and_impossible_tokens(tmp_path):
    given = {
        "rollout_log_probs": [[-0.5, None, -0.7, -math.inf]],
        "old_log_probs": [[-0.5, -0.1, -0.7, math.log(0.2)]],
        "responses": [[5, 6, 7, 8]],
        "response_mask": [[1, 1, 1, 1]],
    }
    metrics = calculate_prob_diff_metrics(given)
    assert metrics["training/rollout_unscored_tokens"] == 1
    assert metrics["training/rollout_nonfinite_tokens"] == 1
    assert metrics["training/rollout_probs_diff_mean"] == pytest.approx(0.2 / 3, abs=1e-6)  # 0, 0, .2
    assert metrics["training/rollout_logp_bias"] == 0.0
    assert all(math.isfinite(value) for value in metrics.values())
    grid = calculate_token_level_prob_diff(given, tmp_path, 0)
    assert grid == {
        "training/rollout_probs_diff/s0_p0000": 0.0,
        "training/rollout_probs_diff/s0_p0002": 0.0,
        "training/rollout_probs_diff/s0_p0003": pytest.approx(0.2),
    }
    diff = np.load(tmp_path / "prob_diff_step_0.npy", allow_pickle=False)
    assert np.isnan(diff).tolist() == [[False, True, False, False]]
    assert np.load(tmp_path / "prob_mask_step_0.npy", allow_pickle=False).all()


def test_the_grid_is_bounded_and_skips_masked_tokens():
    grid = calculate_token_level_prob_diff(batch(), token_max_print=2, sample_max_print=1)
    assert grid == {"training/rollout_probs_diff/s0_p0000": pytest.approx(0.1), "training/rollout_probs_diff/s0_p0001": 0.0}
    many = batch(torch.zeros(20, 30), torch.zeros(20, 30), torch.ones(20, 30))
    assert len(calculate_token_level_prob_diff(many)) == 8 * 10


def test_the_dump_is_whole_whatever_is_printed(tmp_path):
    calculate_token_level_prob_diff(batch(), tmp_path / "made", 12, token_max_print=1, sample_max_print=1)
    diff = np.load(tmp_path / "made/prob_diff_step_12.npy", allow_pickle=False)
    np.testing.assert_allclose(diff, [[0.1, 0, 0], [0, 0.2, 0]], atol=1e-7)
    assert sorted(path.name for path in (tmp_path / "made").iterdir()) == ["prob_diff_step_12.npy", "prob_mask_step_12.npy"]


def test_attention_mask_serves_by_its_last_columns():
    given = batch(attention_mask=torch.cat([torch.ones(2, 5), MASK], dim=1))
    del given["response_mask"]
    assert calculate_prob_diff_metrics(given) == calculate_prob_diff_metrics(batch())
    assert calculate_token_level_prob_diff(given) == calculate_token_level_prob_diff(batch())


@pytest.mark.parametrize("missing", ["rollout_log_probs", "old_log_probs", "responses", "response_mask"])
def test_a_missing_input_gives_nothing(tmp_path, missing):
    given = batch()
    del given[missing]
    assert calculate_prob_diff_metrics(given) == {}
    assert calculate_token_level_prob_diff(given, tmp_path, 0) == {}
    assert list(tmp_path.iterdir()) == []


def test_a_container_with_a_batch_serves():
    assert calculate_prob_diff_metrics(SimpleNamespace(batch=batch())) == calculate_prob_diff_metrics(batch())


def test_half_precision_and_masked_rubbish_make_no_nan():
    mu, pi = MU.bfloat16(), PI.clone()
    pi[:, 2] = math.nan
    metrics = calculate_prob_diff_metrics(batch(mu, pi))
    assert metrics["training/rollout_probs_diff_mean"] == pytest.approx(0.075, abs=3e-3)
    assert not calculate_token_level_prob_diff(batch(mu, pi)).keys() & {"training/rollout_probs_diff/s0_p0002"}


@pytest.mark.parametrize("name", ["rollout_log_probs", "old_log_probs"])
def test_a_positive_log_prob_is_refused_with_its_place(name):
    for value in (0.3, math.inf):
        given = batch()
        given[name] = given[name].clone()
        given[name][1, 0] = value
        with pytest.raises(ValueError, match=rf"{name}\[1, 0\] = {value}.*at most 0"):
            calculate_prob_diff_metrics(given)


def test_log_probs_with_a_gradient_are_dumped(tmp_path):
    pi = PI.clone().requires_grad_()
    assert calculate_token_level_prob_diff(batch(pi=pi), tmp_path, 0) == calculate_token_level_prob_diff(batch())
    assert np.load(tmp_path / "prob_diff_step_0.npy", allow_pickle=False)[1, 1] == pytest.approx(0.2)


def test_arrays_of_objects_and_turned_arrays_serve():
    objects = np.array([[-0.5, None]], dtype=object)
    metrics = calculate_prob_diff_metrics(batch(objects, [[-0.5, -1.0]], [[1, 1]]) | {"responses": [[5, 6]]})
    assert (metrics["training/rollout_tokens"], metrics["training/rollout_unscored_tokens"]) == (2, 1)
    turned = batch(MU.numpy()[::-1], PI.numpy()[::-1], MASK.numpy()[::-1])
    assert calculate_prob_diff_metrics(turned) == pytest.approx(calculate_prob_diff_metrics(batch()))


@pytest.mark.parametrize(
    ("mu", "said"),
    [
        (MU[0], r"rollout_log_probs has the shape \(3,\), where rows and tokens"),
        (MU[None], r"rollout_log_probs has the shape \(1, 2, 3\), where rows and tokens"),
        ([[-0.5], [-0.1, -0.2]], "rollout_log_probs cannot be read as numbers.*Pad its rows to one length"),
        (PI[:, :2], r"\(2, 2\).*one shape"),
    ],
    ids=["one dimension", "three", "ragged", "other columns"],
)
def test_shapes_that_do_not_fit_are_named(tmp_path, mu, said):
    given = batch() | {"rollout_log_probs": mu}
    for function in (calculate_prob_diff_metrics, lambda wrong: calculate_token_level_prob_diff(wrong, tmp_path, 0)):
        with pytest.raises(ValueError, match=said):
            function(given)
    assert list(tmp_path.iterdir()) == []


def test_a_list_is_no_batch():
    with pytest.raises(TypeError, match="maps rollout_log_probs"):
        calculate_prob_diff_metrics([MU, PI])


@pytest.mark.parametrize("count", ["token_max_print", "sample_max_print"])
def test_a_negative_count_is_refused(count):
    with pytest.raises(ValueError, match=f"{count}=-1: at least 0"):
        calculate_token_level_prob_diff(batch(), **{count: -1})


@pytest.mark.parametrize("step", [None, -1, 2.5])
def test_a_directory_wants_a_step(tmp_path, step):
    with pytest.raises(ValueError, match="step"):
        calculate_token_level_prob_diff(batch(), tmp_path, step)
    assert list(tmp_path.iterdir()) == []
