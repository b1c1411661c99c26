"""What a rule finds."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Problem:
    """text: what was given, why it cannot work, a setting that does. fixes: that setting, by field; None takes it away."""

    text: str
    fixes: dict[str, Any] = field(default_factory=dict)


Rule = Callable[[Any, int], Iterator[Problem]]
