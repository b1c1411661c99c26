"""Exact means of what TRL logs once per slice: kl, entropy, clip ratios. Pure.

TRL averages the slices' means with equal weight, so a slice of short rows counts as much as one of long rows and the logged
value moves with the grouping (by up to half). Every such mean is itself exact over ranks, so sum(mean * tokens) / sum(tokens)
is the exact mean over all tokens that were logged together."""

import math
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

# Means over the loss-masked tokens of all ranks (TRL's `global_masked_mean`) ...
TOKEN_MEANS = ("kl", "entropy")
# ... which become means over sequences where the importance weight is one per sequence.
RATIO_MEANS = ("clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean", "cispo_clip_ratio")
SEQUENCE_MEANS = ("vespo/phi_seq_mean",)
# Extremes over the sequences of all ranks, which TRL averages over slices.
MINIMA, MAXIMA = ("clip_ratio/low_min",), ("clip_ratio/high_max",)


class ExactMeans:
    """Collects what a loss logs and gives it back as exact means, minima and maxima."""

    def __init__(self, per_sequence: bool = False) -> None:
        """per_sequence: whether the importance weights, and so the clip ratios, are one per sequence."""
        self._by_sequence = {*SEQUENCE_MEANS, *(RATIO_MEANS if per_sequence else ())}
        self._by_token = {*TOKEN_MEANS, *RATIO_MEANS} - self._by_sequence
        self._sums: dict[str, tuple[float, float]] = {}
        self._extremes: dict[str, float] = {}

    @contextmanager
    def collecting(self, metrics: MutableMapping[str, list[float]], tokens: float, sequences: float) -> Iterator[None]:
        """Within, what a loss over `tokens` tokens and `sequences` rows (of all ranks) appends to `metrics` is taken out of
        it."""
        names = (*self._by_token, *self._by_sequence, *MINIMA, *MAXIMA)
        before = {name: len(metrics[name]) for name in names if name in metrics}
        yield
        for name in names:
            if name not in metrics:
                continue
            at = before.get(name, 0)
            for value in metrics[name][at:]:
                self._add(name, value, tokens if name in self._by_token else sequences)
            del metrics[name][at:]
            if not metrics[name]:
                del metrics[name]

    def _add(self, name: str, value: float, weight: float) -> None:
        if math.isnan(value):
            return
        if name in MINIMA or name in MAXIMA:
            better = min if name in MINIMA else max
            self._extremes[name] = better(value, self._extremes.get(name, value))
            return
        total, count = self._sums.get(name, (0.0, 0.0))
        self._sums[name] = total + value * weight, count + weight

    def drain(self) -> dict[str, float]:
        """The exact values since the last call; 0 for a mean over no token at all, as in TRL."""
        result = {name: total / count if count else 0.0 for name, (total, count) in self._sums.items()} | self._extremes
        self._sums, self._extremes = {}, {}
        return result

    def state_dict(self) -> dict[str, Any]:
        return {"sums": dict(self._sums), "extremes": dict(self._extremes)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._sums, self._extremes = dict(state["sums"]), dict(state["extremes"])
