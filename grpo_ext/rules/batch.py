"""A step's arithmetic: whole groups, whole micro-steps."""

import math
from collections.abc import Iterator
from typing import Any

from grpo_ext.rules.problem import Problem, Rule

EVAL_STRATEGIES = ("no", "steps", "epoch")


def group_size(settings: Any) -> int:
    """num_generations, or the least that could work where it does not."""
    return max(2, settings.num_generations or 0)


def rollouts_of_a_generation(s: Any, processes: int) -> int:
    if s.generation_batch_size is not None:
        return s.generation_batch_size
    steps = s.steps_per_generation if s.steps_per_generation is not None else s.gradient_accumulation_steps
    return s.per_device_train_batch_size * processes * steps


def at_least_two_generations(s: Any, processes: int) -> Iterator[Problem]:
    if s.num_generations is None or s.num_generations < 2:
        yield Problem(
            f"num_generations={s.num_generations}: GRPO compares the completions of one prompt with each other, so "
            "it needs at least 2 generations per prompt. Set num_generations=2 or more.",
            {"num_generations": 2},
        )


def sizes_of_a_step(s: Any, processes: int) -> Iterator[Problem]:
    for name in ("per_device_train_batch_size", "gradient_accumulation_steps", "num_iterations"):
        if getattr(s, name) < 1:
            yield Problem(f"{name}={getattr(s, name)}: a step needs at least 1. Set {name}=1 or more.", {name: 1})
    if s.max_completion_length is not None and s.max_completion_length < 1:
        yield Problem(
            f"max_completion_length={s.max_completion_length}: a completion needs at least 1 token. Set "
            "max_completion_length=256, or what an answer takes.",
            {"max_completion_length": 256},
        )
    if s.auto_find_batch_size:
        yield Problem(
            "auto_find_batch_size=True shrinks the batch when memory runs out, and the rest would be no whole groups. Set "
            "auto_find_batch_size=False and a smaller per_device_train_batch_size.",
            {"auto_find_batch_size": False},
        )


def one_size_of_a_generation(s: Any, processes: int) -> Iterator[Problem]:
    if s.generation_batch_size is not None and s.steps_per_generation is not None:
        yield Problem(
            f"generation_batch_size={s.generation_batch_size} and steps_per_generation={s.steps_per_generation} say the same "
            "thing twice, and can not be both configured at the same time. Take generation_batch_size out.",
            {"generation_batch_size": None},
        )


def whole_groups(s: Any, processes: int) -> Iterator[Problem]:
    """A generation is whole micro-steps on every rank, and whole groups over all ranks."""
    groups, per_device = group_size(s), max(1, s.per_device_train_batch_size)
    per_step = per_device * processes
    shape = f"per_device_train_batch_size={per_device} x {processes} process(es) = {per_step} rollouts a micro-step"
    if s.generation_batch_size is not None and s.steps_per_generation is None:
        unit = math.lcm(per_step, groups)
        if s.generation_batch_size <= 0 or s.generation_batch_size % unit:
            works = max(1, math.ceil(s.generation_batch_size / unit)) * unit
            yield Problem(
                f"generation_batch_size={s.generation_batch_size} cannot be cut into whole micro-steps ({shape}) "
                f"and whole groups (num_generations={groups}). Set generation_batch_size={works}.",
                {"generation_batch_size": works},
            )
        return
    given = s.steps_per_generation is not None
    steps = s.steps_per_generation if given else max(1, s.gradient_accumulation_steps)
    unit = groups // math.gcd(per_step, groups)
    works = max(1, math.ceil(steps / unit)) * unit
    fix = {"steps_per_generation": works}
    if steps < 1:
        yield Problem(
            f"steps_per_generation={steps}: at least 1 micro-step must follow a generation. Set steps_per_generation={works}.",
            fix,
        )
    elif per_step * steps % groups:
        origin = "steps_per_generation" if given else "gradient_accumulation_steps"
        yield Problem(
            f"{shape}, times {origin}={steps} = {per_step * steps} rollouts a generation: these are not whole groups of "
            f"num_generations={groups}. Set steps_per_generation={works} "
            f"({per_step * works} rollouts, {per_step * works // groups} group(s)).",
            fix,
        )


def whole_groups_in_evaluation(s: Any, processes: int) -> Iterator[Problem]:
    strategy = getattr(s.eval_strategy, "value", s.eval_strategy)
    if strategy == "no":
        return
    if strategy not in EVAL_STRATEGIES:
        yield Problem(
            f"eval_strategy={strategy!r} is none of {', '.join(EVAL_STRATEGIES)}. Set 'steps', with eval_steps, or 'no'.",
            {"eval_strategy": "no"},
        )
    if s.num_generations_eval is not None and s.num_generations_eval < 0:
        yield Problem(
            f"num_generations_eval={s.num_generations_eval}: an evaluation needs at least 1 completion a prompt. Leave it unset to "
            "take num_generations.",
            {"num_generations_eval": None},
        )
    groups = max(0, s.num_generations_eval or 0) or group_size(s)
    batch = s.per_device_eval_batch_size * processes
    if batch < 1 or batch % groups:
        unit = groups // math.gcd(processes, groups)
        works = max(1, math.ceil(s.per_device_eval_batch_size / unit)) * unit
        yield Problem(
            f"per_device_eval_batch_size={s.per_device_eval_batch_size} x {processes} process(es) = {batch} rollouts an "
            f"evaluation step: these are not whole groups of {groups} (num_generations_eval, else num_generations). Set "
            f"per_device_eval_batch_size={works}.",
            {"per_device_eval_batch_size": works},
        )


RULES: tuple[Rule, ...] = (
    at_least_two_generations,
    sizes_of_a_step,
    one_size_of_a_generation,
    whole_groups,
    whole_groups_in_evaluation,
)
