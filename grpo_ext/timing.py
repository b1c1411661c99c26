"""Wall time by phase. Seconds add up between two logs and are then given per optimizer step."""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


class PhaseTimes:
    """Seconds spent in named phases. Phases nest: what an inner phase takes is not the outer one's."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = defaultdict(float)
        self._inner: list[float] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        self._inner.append(0.0)
        try:
            yield
        finally:
            elapsed = time.perf_counter() - start
            self._seconds[name] += elapsed - self._inner.pop()
            if self._inner:
                self._inner[-1] += elapsed

    def drain(self) -> dict[str, float]:
        """Seconds by phase since the last call."""
        seconds = dict(self._seconds)
        self._seconds.clear()
        return seconds


@dataclass(frozen=True)
class StepTotals:
    """Optimizer steps since the last log, their wall time, and the tokens (prompts and completions, all ranks) they consumed."""

    steps: int
    seconds: float
    tokens: float


class StepTimes:
    """Wall time and tokens of whole optimizer steps, generation included."""

    def __init__(self) -> None:
        self._totals = StepTotals(0, 0.0, 0.0)
        self._start = self._tokens = 0.0

    def begin(self, tokens_seen: float) -> None:
        self._start, self._tokens = time.perf_counter(), tokens_seen

    def end(self, tokens_seen: float) -> None:
        t = self._totals
        elapsed = time.perf_counter() - self._start
        self._totals = StepTotals(t.steps + 1, t.seconds + elapsed, t.tokens + tokens_seen - self._tokens)

    def drain(self) -> StepTotals:
        totals, self._totals = self._totals, StepTotals(0, 0.0, 0.0)
        return totals


def timing_metrics(phases: dict[str, float], totals: StepTotals) -> dict[str, float]:
    """`timing_s/*` in seconds per optimizer step and `perf/tokens_per_s`; {} where no step has ended."""
    if totals.steps == 0:
        return {}
    metrics = {f"timing_s/{name}": seconds / totals.steps for name, seconds in phases.items()}
    metrics["timing_s/step"] = totals.seconds / totals.steps
    metrics["perf/tokens_per_s"] = totals.tokens / totals.seconds
    return metrics
