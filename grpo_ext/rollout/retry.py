"""An engine that raises is asked once more. All ranks learn of it, so that they go on, or stop, together. Pure."""

import logging
from collections.abc import Callable
from typing import Any

logger = logging.getLogger(__name__)


class EngineFailed(RuntimeError):
    """The engine does not generate. together: whether all ranks raise this, and so can write a checkpoint before they end."""

    def __init__(self, text: str, together: bool):
        super().__init__(text)
        self.together = together


def tried_twice(
    attempt: Callable[[], Any], recover: Callable[[], None], from_all: Callable[[str | None], list[str | None]], together: bool
) -> tuple[Any, int]:
    """What `attempt()` returns, of a second try where the first raised, and how many ranks took one.

    Args:
        recover: takes back what an attempt has done; called before the second one, and on all ranks where that one fails.
        from_all: this rank's fault, None for none, to those of all ranks, in order. May be a collective: a rank whose attempt went
            well waits there for those that try again.
        together: whether `from_all` speaks of all ranks.

    Raises:
        EngineFailed: wherever `from_all` tells of a fault at the second try.
    """
    result, error = _tried(attempt)
    faults = from_all(_said(error))
    retries = sum(fault is not None for fault in faults)
    if retries == 0:
        return result, 0
    logger.warning("The engine failed in generate and is asked once more: %s.", _by_rank(faults, together))
    if error is not None:
        recover()
        result, error = _tried(attempt)
    faults = from_all(_said(error))
    if any(fault is not None for fault in faults):
        recover()
        raise EngineFailed(f"The engine failed in generate twice: {_by_rank(faults, together)}.", together) from error
    return result, retries


def _tried(attempt: Callable[[], Any]) -> tuple[Any, Exception | None]:
    try:
        return attempt(), None
    except Exception as error:
        return None, error


def _said(error: Exception | None) -> str | None:
    return None if error is None else f"{type(error).__name__}: {str(error).rstrip('.')}"


def _by_rank(faults: list[str | None], together: bool) -> str:
    if len(faults) == 1:
        return str(faults[0])
    return "; ".join(f"rank {rank}: {fault}" for rank, fault in enumerate(faults) if fault is not None)
