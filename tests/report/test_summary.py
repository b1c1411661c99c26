"""The arithmetic of a step's summary, on literal values and against the plain way."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from grpo_ext.consistency.report.run import Thresholds, verdict
from grpo_ext.consistency.report.summary import EMPTY, FLOOR, UNSCORED, bin_edges, block_of, decode, encode, summarize

NAN = math.nan
DIFF = np.float32([[0.1, 0.0, 0.9], [0.0, NAN, 0.8]])
MASK = np.array([[1, 1, 0], [1, 1, 0]], dtype=bool)


def test_case_1_with_an_unscored_token():
    s = summarize(5, np.float32([[0.1, 0.0, 0.9], [0.0, 0.2, 0.8]]), MASK, max_cells=100)
    assert (s.step, s.shape, s.tokens, s.unscored) == (5, (2, 3), 4, 0)
    assert s.mean == pytest.approx(0.075)
    assert s.maximum == pytest.approx(0.2)
    assert s.p99 == pytest.approx(0.197)  # between the third (0.1) and the fourth of four values, 0.97 of the way

    s = summarize(5, DIFF, MASK, max_cells=100)
    assert (s.tokens, s.unscored) == (3, 1)
    assert s.mean == pytest.approx(0.1 / 3)
    np.testing.assert_allclose(s.position_mean, [0.05, 0.0, NAN])
    assert s.cells.tolist() == [[encode(np.array(0.1)), 1, EMPTY], [1, UNSCORED, EMPTY]]
    assert [(t.sample, t.position) for t in s.worst] == [(0, 0)]
    assert s.histogram[0] == 2 and s.histogram.sum() == 3


def test_all_masked():
    s = summarize(0, DIFF, np.zeros_like(MASK), max_cells=100)
    assert (s.tokens, s.unscored, s.mean, s.p99, s.maximum, s.worst) == (0, 0, None, None, None, [])
    assert (s.cells == EMPTY).all() and s.histogram.sum() == 0


def test_all_unscored():
    s = summarize(0, np.full((2, 3), NAN, dtype=np.float32), MASK, max_cells=100)
    assert (s.tokens, s.unscored, s.mean) == (0, 4, None)
    assert s.cells.tolist() == [[UNSCORED, UNSCORED, EMPTY]] * 2


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0)])
def test_no_rows_or_no_positions(shape):
    s = summarize(0, np.zeros(shape, dtype=np.float32), np.zeros(shape, dtype=bool), max_cells=100)
    assert s.mean is None and s.cells.size == 0 and s.position_mean.shape == (shape[1],)


def test_a_single_bad_token_survives_pooling():
    diff = np.full((256, 1024), 1e-7, dtype=np.float32)
    diff[200, 777] = 0.5
    s = summarize(0, diff, np.ones_like(diff, dtype=bool), max_cells=1000)
    assert s.cells.size <= 1000
    row, column = np.unravel_index(s.cells.argmax(), s.cells.shape)
    assert row == 200 // s.block[0] and column == 777 // s.block[1]
    assert 10 ** decode(s.cells).max() == pytest.approx(0.5, rel=0.05)
    assert (s.worst[0].sample, s.worst[0].position, s.worst[0].diff) == (200, 777, 0.5)


def test_ties_come_in_reading_order():
    s = summarize(0, np.full((3, 3), 0.5, dtype=np.float32), np.ones((3, 3), dtype=bool), max_cells=9, worst=4)
    assert [(t.sample, t.position) for t in s.worst] == [(0, 0), (0, 1), (0, 2), (1, 0)]


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_against_the_plain_way(data):
    shape = data.draw(st.tuples(st.integers(1, 40), st.integers(1, 60)))
    unit = st.one_of(st.just(0.0), st.just(NAN), st.floats(0, 1, width=32), st.floats(0, 2**-20, width=32))
    diff = data.draw(
        arrays(data.draw(st.sampled_from([np.float32, np.float64, np.float16])), shape, elements=unit, fill=st.just(0.25))
    )
    mask = data.draw(arrays(bool, shape))
    max_cells, worst = data.draw(st.integers(1, 3000)), data.draw(st.integers(1, 12))
    s = summarize(0, diff, mask, max_cells=max_cells, worst=worst)

    scored = mask & ~np.isnan(diff)
    values = diff[scored].astype(np.float64)
    assert (s.tokens, s.unscored) == (scored.sum(), (mask & np.isnan(diff)).sum())
    if len(values):
        assert s.mean == pytest.approx(values.mean(), rel=1e-9)
        assert s.p99 == pytest.approx(np.quantile(values, 0.99), rel=1e-6)
        assert s.maximum == values.max()
    assert [t.diff for t in s.worst] == sorted(values[values > 0], reverse=True)[:worst]
    assert all(diff[t.sample, t.position] == t.diff and scored[t.sample, t.position] for t in s.worst)

    high, wide = s.block
    assert s.cells.size <= max_cells
    assert s.cells.shape == (-(-shape[0] // high), -(-shape[1] // wide))
    for r in range(s.cells.shape[0]):
        for c in range(s.cells.shape[1]):
            here = np.s_[r * high : (r + 1) * high, c * wide : (c + 1) * wide]
            inside = diff[here][scored[here]]
            if len(inside):
                assert s.cells[r, c] == encode(inside.max().astype(np.float64 if diff.dtype == np.float64 else np.float32))
            else:
                assert s.cells[r, c] == (UNSCORED if mask[here].any() else EMPTY)
    for c, mean in enumerate(s.position_mean):
        inside = diff[:, c * wide : (c + 1) * wide][scored[:, c * wide : (c + 1) * wide]]
        assert math.isnan(mean) if not len(inside) else mean == pytest.approx(inside.mean(dtype=np.float64), rel=1e-5)
    assert s.histogram.sum() == s.tokens
    assert (values < 0.999 * FLOOR).sum() <= s.histogram[0] <= (values < 1.001 * FLOOR).sum()


def test_histogram_bins_are_those_of_their_edges():
    values = np.float64([2e-10, 1.5e-3, 1.5e-3, 0.9, 1.0])
    s = summarize(0, values[None], np.ones((1, 5), dtype=bool), max_cells=10)
    expected, _ = np.histogram(values, bins=bin_edges())
    np.testing.assert_array_equal(s.histogram[1:], expected)


@given(st.floats(FLOOR, 1))
def test_a_cell_is_right_to_a_twentieth(value):
    assert 10 ** float(decode(encode(np.array([value])))[0]) == pytest.approx(value, rel=0.05)


@given(st.integers(0, 10**6), st.integers(0, 10**6), st.integers(1, 10**5))
def test_a_picture_keeps_to_its_cells(rows, columns, max_cells):
    high, wide = block_of((rows, columns), max_cells)
    assert (-(-rows // high)) * (-(-columns // wide)) <= max_cells


def steps(*means):
    return [
        summarize(i, np.full((1, 2), NAN if mean is None else mean), np.ones((1, 2), dtype=bool), max_cells=2)
        for i, mean in enumerate(means)
    ]


@pytest.mark.parametrize(
    "means, stop, expected",
    [
        ([3.1e-7], None, ("healthy", "mean 3.1e-07, healthy: below 0.005")),
        ([1e-7, 3e-7], 0.01, ("healthy", "mean 2e-07, healthy: below 0.005 at each of 2 steps")),
        ([1e-7, None], None, ("healthy", "mean 1e-07, healthy: below 0.005; 1 step without a scored token")),
        ([0.02], None, ("warn", "mean 0.02, above 0.005")),
        ([0.02], 0.01, ("stop", "mean 0.02, above 0.01")),
        ([1e-7, 0.02, 0.006], None, ("warn", "2 of 3 steps above 0.005, first at step 1 (mean 0.02)")),
        ([0.005, 0.006], 0.01, ("warn", "1 of 2 steps above 0.005, first at step 1 (mean 0.006)")),
        (
            [0.006, 0.02],
            0.01,
            ("stop", "2 of 2 steps above 0.005, first at step 0 (mean 0.006); 1 above 0.01, first at step 1 (mean 0.02)"),
        ),
        ([None, None], None, ("unknown", "no token was scored on both sides: nothing can be said")),
    ],
)
def test_verdict(means, stop, expected):
    assert verdict(steps(*means), Thresholds(0.005, stop)) == expected
