"""Do rollouts and actor agree? The same token has a probability on both sides; with the same weights the two must be equal.

The names below load on first use.
"""

from importlib import import_module
from typing import Any

_HOME = {
    "calculate_prob_diff_metrics": "grpo_ext.consistency.prob_diff",
    "calculate_token_level_prob_diff": "grpo_ext.consistency.prob_diff",
    "ProbDiffCallback": "grpo_ext.consistency.callback",
}

__all__ = ["ProbDiffCallback", "calculate_prob_diff_metrics", "calculate_token_level_prob_diff"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'grpo_ext.consistency' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(_HOME[name]), name)
