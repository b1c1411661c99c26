"""What the settings of a run must satisfy: one function per rule, each with a setting that works. Pure, and needs no TRL.

`GRPOExtConfig` raises the first problem; `grpo-ext plan` prints them all. A rule reads attributes named as the fields of
`GRPOExtConfig`, before TRL has filled any of them in, and takes the number of processes of the run. The fixes of all problems,
applied together, make a configuration that passes.
"""

from typing import Any

from grpo_ext.rules import batch, consistency, engine, logps, rewards, sampling
from grpo_ext.rules.problem import Problem

RULES = (*batch.RULES, *sampling.RULES, *engine.RULES, *logps.RULES, *rewards.RULES, *consistency.RULES)


def problems(settings: Any, processes: int) -> list[Problem]:
    """Every problem of `settings` on `processes` ranks, in the order of `RULES`."""
    return [problem for rule in RULES for problem in rule(settings, processes)]
