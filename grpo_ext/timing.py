"""Wall time by phase. Seconds add up between two logs and are then given per optimizer step."""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager


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
