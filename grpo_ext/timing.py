"""Wall time by phase. Seconds add up between two logs and are then given per optimizer step. On this rank's clock; a device is never
waited for, so that work is counted where its result is first needed."""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

# Given in every log. Phases nest, and what an inner one takes is not the outer one's: forward_backward is all of a training step but
# the phases within.
PHASES = ("gen", "sync_weights", "old_logps", "ref_logps", "reward", "forward_backward", "optimizer", "checkpoint")
# What lies between an optimizer step's end and the next one's begin, and is counted as a part of the step nevertheless.
BETWEEN = ("checkpoint", "evaluate", "diagnosis")


class PhaseTimes:
    """Seconds spent in named phases."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = defaultdict(float)
        self._inner: list[float] = []
        self._closed = False

    @contextmanager
    def phase(self, name: str, whole: bool = False) -> Iterator[None]:
        """Time what runs within. whole: phases inside count as a part of this one."""
        if self._closed:
            yield
            return
        start = time.perf_counter()
        self._inner.append(0.0)
        self._closed = whole
        try:
            yield
        finally:
            self._closed = False
            elapsed = time.perf_counter() - start
            self._seconds[name] += elapsed - self._inner.pop()
            if self._inner:
                self._inner[-1] += elapsed

    def add(self, name: str, seconds: float) -> None:
        """Count a phase that was timed by the caller and lies within no other."""
        self._seconds[name] += seconds

    def drain(self) -> dict[str, float]:
        """Seconds by phase since the last call."""
        seconds = dict(self._seconds)
        self._seconds.clear()
        return seconds


@dataclass(frozen=True)
class StepTotals:
    """Since the last log, over all ranks: optimizer steps, their wall time, tokens (prompts and completions) that were generated for them,
    completion tokens alone, and floating-point operations of training on them (0 where unknown)."""

    steps: int = 0
    seconds: float = 0.0
    tokens: float = 0.0
    rollout_tokens: float = 0.0
    flops: float = 0.0


class StepTimes:
    """Wall time and tokens of whole optimizer steps, generation included."""

    def __init__(self) -> None:
        self._totals = StepTotals()
        self._start = self._tokens = 0.0

    def begin(self, tokens_seen: float) -> None:
        self._start, self._tokens = time.perf_counter(), tokens_seen

    def end(self, tokens_seen: float) -> None:
        t = self._totals
        elapsed = time.perf_counter() - self._start
        self._totals = replace(t, steps=t.steps + 1, seconds=t.seconds + elapsed, tokens=t.tokens + tokens_seen - self._tokens)

    def generated(self, rollout_tokens: float) -> None:
        self._totals = replace(self._totals, rollout_tokens=self._totals.rollout_tokens + rollout_tokens)

    def trained(self, flops: float) -> None:
        self._totals = replace(self._totals, flops=self._totals.flops + flops)

    def drain(self) -> StepTotals:
        totals, self._totals = self._totals, StepTotals()
        return totals


def timing_metrics(phases: dict[str, float], totals: StepTotals, peak_flops: float | None = None) -> dict[str, float]:
    """`timing_s/*` in seconds per optimizer step and `perf/*`; {} where no step has ended.

    `timing_s/step` is the wall time of a step with what lies between it and the next (`BETWEEN`), which the phases add up to within a
    few percent. peak_flops: what all devices together can do in a second; `perf/mfu` is the share of it that training comes to.
    """
    if totals.steps == 0:
        return {}
    seconds = dict.fromkeys(PHASES, 0.0) | phases
    step = totals.seconds + sum(seconds.get(name, 0.0) for name in BETWEEN)
    metrics = {f"timing_s/{name}": value / totals.steps for name, value in seconds.items()}
    metrics["timing_s/step"] = step / totals.steps
    metrics["perf/tokens_per_s"] = totals.tokens / step
    if seconds["gen"] > 0 and totals.rollout_tokens:
        metrics["perf/rollout_tokens_per_s"] = totals.rollout_tokens / seconds["gen"]
    if peak_flops and totals.flops:
        metrics["perf/mfu"] = totals.flops / (step * peak_flops)
    return metrics
