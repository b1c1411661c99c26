"""What the KL may be charged, and how long a reward function may take."""

import math
from collections.abc import Iterator
from threading import TIMEOUT_MAX
from typing import Any

from grpo_ext.rules.batch import rollouts_of_a_generation
from grpo_ext.rules.problem import Problem, Rule


def kl_in_the_reward(s: Any, processes: int) -> Iterator[Problem]:
    if not s.kl_in_reward:
        return
    if s.beta:
        yield Problem(
            f"kl_in_reward=True and beta={s.beta}: the KL from the reference would count twice, once in the reward and once in the "
            "loss. Set beta=0.0, or kl_in_reward=False.",
            {"beta": 0.0},
        )
    if s.multi_objective_aggregation == "normalize_then_sum":
        yield Problem(
            "kl_in_reward=True with multi_objective_aggregation='normalize_then_sum': each reward is divided by its own standard "
            "deviation, and the KL's coefficient with it. Set multi_objective_aggregation='sum_then_normalize'.",
            {"multi_objective_aggregation": "sum_then_normalize"},
        )
    if not 0 < s.kl_in_reward_coef < math.inf:
        yield Problem(
            f"kl_in_reward_coef={s.kl_in_reward_coef}: a KL that costs nothing holds nothing back, and one that costs more than any "
            "reward leaves nothing else. Set 0.001 or more, or kl_in_reward=False.",
            {"kl_in_reward_coef": 0.001},
        )
    if s.kl_in_reward_target is None:
        return
    if not 0 < s.kl_in_reward_target < math.inf:
        yield Problem(
            f"kl_in_reward_target={s.kl_in_reward_target}: the actor starts at a KL of 0 and can come neither below nor there. Set 6.0, or as many "
            "nats as a completion may be away, or leave it unset for a fixed coefficient.",
            {"kl_in_reward_target": 6.0},
        )
    rollouts = rollouts_of_a_generation(s, processes)
    if s.kl_in_reward_horizon * 5 <= rollouts:
        works = max(10_000, rollouts)
        yield Problem(
            f"kl_in_reward_horizon={s.kl_in_reward_horizon}: a generation of {rollouts} rollouts moves the coefficient by up to "
            f"0.2 x {rollouts} / horizon of itself, which takes it to 0 or below. Set kl_in_reward_horizon={works}.",
            {"kl_in_reward_horizon": works},
        )


def limit_of_rewards(s: Any, processes: int) -> Iterator[Problem]:
    limit = s.reward_timeout_s
    if limit is None:
        return
    if not isinstance(limit, int | float) or not 0 < limit < TIMEOUT_MAX:
        yield Problem(
            f"reward_timeout_s={limit!r}: no time that can be waited for. Set a number of seconds above 0, or leave it unset.",
            {"reward_timeout_s": None},
        )
    elif processes > 1 and limit >= s.ddp_timeout:
        yield Problem(
            f"reward_timeout_s={limit} on {processes} processes with ddp_timeout={s.ddp_timeout}: the other ranks give up "
            f"waiting first, without naming the function. Set reward_timeout_s={s.ddp_timeout / 2:g}, or a higher ddp_timeout.",
            {"reward_timeout_s": s.ddp_timeout / 2},
        )


RULES: tuple[Rule, ...] = (
    kl_in_the_reward,
    limit_of_rewards,
)
