"""GRPO that computes no log-prob it already has, pads no token it need not, and always knows whether its rollouts match its actor.

The public names load on first use, so `import grpo_ext` costs nothing and imports neither torch, TRL, vLLM nor DeepSpeed.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOME = {
    "GRPOExtConfig": "grpo_ext.config",
    "GRPOExtMixin": "grpo_ext.trainer",
    "GRPOExtTrainer": "grpo_ext.trainer",
    "ProbDiffCallback": "grpo_ext.consistency.callback",
}

__all__ = ["GRPOExtConfig", "GRPOExtMixin", "GRPOExtTrainer", "ProbDiffCallback", "__version__"]

if TYPE_CHECKING:
    from grpo_ext.config import GRPOExtConfig
    from grpo_ext.consistency.callback import ProbDiffCallback
    from grpo_ext.trainer import GRPOExtMixin, GRPOExtTrainer


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'grpo_ext' has no attribute {name!r}; its public names are {', '.join(__all__)}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
