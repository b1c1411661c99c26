"""What the report keeps of a step: statistics, a pooled picture, the worst tokens. Pure: arrays in, a frozen dataclass out."""

from dataclasses import dataclass

import numpy as np

# Differences are drawn on a log scale from FLOOR to 1. Below FLOOR, and at 0, where float32 is equal, there is nothing to see.
FLOOR = 1e-10
DECADES = 10
BINS_PER_DECADE = 4
# Cells of a picture are bytes: these two, else 1..254 for log10 of FLOOR..1.
EMPTY, UNSCORED = 0, 255
_LEVELS = 253


@dataclass(frozen=True)
class WorstToken:
    step: int
    sample: int
    position: int
    diff: float


@dataclass(frozen=True)
class StepSummary:
    """One step; the statistics are None where no token was scored.

    `cells` (R, C) uint8 holds the largest difference in each `block` (rows, positions) of the matrix, `position_mean` (C,) the mean
    of each column of blocks (NaN where nothing was scored), and `histogram` counts [< FLOOR, then 4 bins for each decade up to 1].
    """

    step: int
    shape: tuple[int, int]
    tokens: int
    unscored: int
    mean: float | None
    p99: float | None
    maximum: float | None
    block: tuple[int, int]
    cells: np.ndarray
    position_mean: np.ndarray
    histogram: np.ndarray
    worst: list[WorstToken]


def summarize(step: int, diff_BT: np.ndarray, mask_BT: np.ndarray, *, max_cells: int, worst: int = 10) -> StepSummary:
    """Summary of a step whose picture has at most `max_cells` cells. NaN under the mask is an unscored token, and counts nowhere."""
    diff_BT = diff_BT.astype(np.float64 if diff_BT.dtype.itemsize > 4 else np.float32, copy=False)
    scored_BT = mask_BT & ~np.isnan(diff_BT)
    values = diff_BT[scored_BT].astype(np.float64)  # of float32 numpy would compute the rank of a quantile in float32, too
    block = block_of(diff_BT.shape, max_cells)
    filled_BT = np.where(scored_BT, diff_BT, 0)
    count_T, sum_T = scored_BT.sum(axis=0), filled_BT.sum(axis=0, dtype=np.float64)
    count_C, sum_C = (_pool(a, block[1], np.add, axis=0) for a in (count_T, sum_T))
    p99 = float(np.quantile(values, 0.99)) if len(values) else None
    with np.errstate(invalid="ignore"):
        position_mean = (sum_C / count_C).astype(np.float32)
    return StepSummary(
        step=step,
        shape=diff_BT.shape,
        tokens=len(values),
        unscored=int(mask_BT.sum()) - len(values),
        mean=float(values.mean()) if len(values) else None,
        p99=p99,
        maximum=float(values.max()) if len(values) else None,
        block=block,
        cells=_cells(filled_BT, scored_BT, mask_BT, block),
        position_mean=position_mean,
        histogram=_histogram(values),
        # Where a hundredth of the tokens is `worst` of them or more, only that hundredth has to be sorted.
        worst=_worst(step, filled_BT, p99 if p99 and len(values) >= 100 * worst else 0.0, worst),
    )


def block_of(shape: tuple[int, int], max_cells: int) -> tuple[int, int]:
    """Rows and positions to a cell, such that a (B, T) matrix has at most `max_cells` cells, about four times as wide as high."""
    rows, columns = shape
    wide = max(1, min(columns, max_cells, int(2 * max_cells**0.5)))
    block_columns = -(-columns // wide) or 1
    wide = max(1, -(-columns // block_columns))
    high = max(1, min(rows, max_cells // wide))
    return -(-rows // high) or 1, block_columns


def encode(values: np.ndarray) -> np.ndarray:
    """uint8 1..254 for the log10 of FLOOR..1, in steps of 0.04."""
    exponents = np.log10(np.clip(values, FLOOR, 1.0)) / DECADES + 1
    return (1 + np.rint(_LEVELS * exponents)).astype(np.uint8)


def decode(cells: np.ndarray) -> np.ndarray:
    """log10 of the differences that `encode` was given; NaN for EMPTY and UNSCORED."""
    exponents = ((cells.astype(np.float64) - 1) / _LEVELS - 1) * DECADES
    return np.where((cells == EMPTY) | (cells == UNSCORED), np.nan, exponents)


def bin_edges() -> np.ndarray:
    """Edges of the histogram's bins from FLOOR to 1; the first count of a histogram is what lies below."""
    return np.logspace(-DECADES, 0, DECADES * BINS_PER_DECADE + 1)


def _pool(array: np.ndarray, block: int, how: np.ufunc, axis: int) -> np.ndarray:
    """`how` over blocks of `block` entries along `axis`; the last block may be shorter."""
    if array.size == 0:
        return np.zeros([0 if i == axis else n for i, n in enumerate(array.shape)], dtype=array.dtype)
    return how.reduceat(array, np.arange(0, array.shape[axis], block), axis=axis)


def _cells(filled_BT: np.ndarray, scored_BT: np.ndarray, mask_BT: np.ndarray, block: tuple[int, int]) -> np.ndarray:
    def pool(array: np.ndarray, how: np.ufunc) -> np.ndarray:
        return _pool(_pool(array, block[1], how, axis=1), block[0], how, axis=0)

    scored, masked = pool(scored_BT, np.logical_or), pool(mask_BT, np.logical_or)
    return np.where(scored, encode(pool(filled_BT, np.maximum)), np.where(masked, UNSCORED, EMPTY)).astype(np.uint8)


def _histogram(values: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore"):
        bins = np.floor((np.log10(values) + DECADES) * BINS_PER_DECADE)  # -inf for 0
    bins = np.clip(bins, -1, DECADES * BINS_PER_DECADE - 1).astype(np.int64) + 1
    return np.bincount(bins, minlength=DECADES * BINS_PER_DECADE + 1)


def _worst(step: int, filled_BT: np.ndarray, at_least: float, count: int) -> list[WorstToken]:
    """The `count` largest differences above 0 and not below `at_least`, largest first; ties in reading order."""
    flat = filled_BT.ravel()
    candidates = np.flatnonzero((flat > 0) & (flat >= at_least))
    best = candidates[np.argsort(-flat[candidates], kind="stable")[:count]].tolist()
    return [WorstToken(step, i // filled_BT.shape[1], i % filled_BT.shape[1], float(flat[i])) for i in best]
