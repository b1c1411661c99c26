"""Counts and thresholds of the comparison of rollouts and actor."""

from collections.abc import Iterator
from typing import Any

from grpo_ext.rules.problem import Problem, Rule

REMEMBERED = 1000  # policy versions whose mean differences a run keeps
_PROB_DIFF_COUNTS = {
    "prob_diff_token_max_print": (0, 10),
    "prob_diff_sample_max_print": (0, 8),
    "prob_diff_patience": (1, 1),
    "prob_diff_keep_last": (1, 100),
}


def prob_diff_counts(s: Any, processes: int) -> Iterator[Problem]:
    for name, (least, default) in _PROB_DIFF_COUNTS.items():
        if getattr(s, name) < least:
            yield Problem(f"{name}={getattr(s, name)}: at least {least} is needed. Set {name}={default}.", {name: default})
    if s.prob_diff_patience > REMEMBERED:
        yield Problem(
            f"prob_diff_patience={s.prob_diff_patience}: of {REMEMBERED} policy versions the differences are remembered. Set "
            f"prob_diff_patience={REMEMBERED} or less.",
            {"prob_diff_patience": REMEMBERED},
        )


def prob_diff_thresholds(s: Any, processes: int) -> Iterator[Problem]:
    for name in ("prob_diff_warn", "prob_diff_stop"):
        value = getattr(s, name)
        if value is not None and not 0 <= value <= 1:
            yield Problem(
                f"{name}={value}: a difference of probabilities lies between 0 and 1. Set 0.005 (above it a run deserves a "
                "look), 0.01 (above it something is wrong), or None.",
                {name: 0.005},
            )


RULES: tuple[Rule, ...] = (
    prob_diff_counts,
    prob_diff_thresholds,
)
