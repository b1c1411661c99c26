"""What the settings of a run must satisfy: one function per rule, each with a setting that works. Pure, and needs no TRL.

`GRPOExtConfig` raises the first problem; `grpo-ext plan` prints them all. A rule reads attributes named as the fields of
`GRPOExtConfig`, before TRL has filled any of them in, and takes the number of processes of the run. The fixes of all problems,
applied together, make a configuration that passes.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from threading import TIMEOUT_MAX
from typing import Any

from grpo_ext.rollout.sampling import OFF, SamplingSettings, as_mapping, effective_sampling, listed, neutral
from grpo_ext.rollout.sampling_values import (
    TEMPERATURES,
    generation_kwargs,
    is_number,
    mended,
    mended_kwargs,
    refused_fields,
    refused_kwargs,
)

WEIGHT_SYNCS = ("merged", "adapter")
OLD_LOGPS = ("window", "always", "rollout")
SHARED_PROMPT: dict[str, Any] = {"auto": "auto", "true": True, "false": False}  # as a command line says it
EVAL_STRATEGIES = ("no", "steps", "epoch")
VLLM_MODES = ("colocate", "server")
VLLM_DTYPES = ("float32", "bfloat16", "float16")
SAMPLING_MISMATCHES = ("warn", "error", "correct")
# Losses whose gradient over an optimizer window does not depend on which of its slices a row sits in.
NEUTRAL_LOSSES = ("grpo", "dapo", "dr_grpo", "cispo", "sapo", "vespo", "luspo")
# What the engine's own fields decide: setting them twice would let the two disagree.
RESERVED_ENGINE_KWARGS = {
    "model": "the model handed to the trainer",
    "tensor_parallel_size": "`vllm_tensor_parallel_size`",
    "enable_sleep_mode": "`vllm_enable_sleep_mode`",
    "dtype": "`vllm_dtype`",
    "distributed_executor_backend": "the trainer (the engine lives in its process)",
    "logprobs_mode": "the trainer (it needs the log-probs of the distribution that was sampled: 'processed_logprobs')",
    "enable_lora": "`vllm_weight_sync='adapter'`",
}


@dataclass(frozen=True)
class Problem:
    """text: what was given, why it cannot work, a setting that does. fixes: that setting, by field; None takes it away."""

    text: str
    fixes: dict[str, Any] = field(default_factory=dict)


Rule = Callable[[Any, int], Iterator[Problem]]


def problems(settings: Any, processes: int) -> list[Problem]:
    """Every problem of `settings` on `processes` ranks, in the order of `RULES`."""
    return [problem for rule in RULES for problem in rule(settings, processes)]


def group_size(settings: Any) -> int:
    """num_generations, or the least that could work where it does not."""
    return max(2, settings.num_generations or 0)


# ---- batch arithmetic ------------------------------------------------------------------------------------------------
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


# ---- sampling and the engine -----------------------------------------------------------------------------------------
def generation_kwargs_as_mapping(s: Any, processes: int) -> Iterator[Problem]:
    if generation_kwargs(s) is None:
        yield Problem(
            f"generation_kwargs={s.generation_kwargs!r} is no mapping. Give a dict, or a JSON object such as "
            "'{\"min_p\": 0.1}' on the command line.",
            {"generation_kwargs": None},
        )


def sampled_temperature(s: Any, processes: int) -> Iterator[Problem]:
    kwargs, (lowest, highest) = generation_kwargs(s) or {}, TEMPERATURES
    temperatures, fix = {"temperature": s.temperature}, {}
    if "temperature" in kwargs:
        temperatures["generation_kwargs['temperature']"] = kwargs["temperature"]
        fix = {"generation_kwargs": mended_kwargs(s)}
    found = []
    for name, value in temperatures.items():
        fixes = {"temperature": 1.0, **fix} if name == "temperature" else fix
        if not is_number(value) or value <= 0:
            text = (
                f"{name}={value}: log-probs are those of the distribution that was sampled, logits / temperature, which "
                "exists for a finite number above 0 only (greedy decoding also makes all completions of a group equal). Set "
                "temperature=1.0."
            )
            found.append(Problem(text, fixes))
        elif s.use_vllm and not lowest <= value <= highest:
            text = (
                f"{name}={value}: vLLM samples at temperatures from {lowest} to {highest}. A lower one it takes for {lowest}, while "
                "the trainer scores at what is given. Set temperature=1.0, or any value between the two."
            )
            found.append(Problem(text, fixes))
    yield from found
    if not found and len(set(temperatures.values())) > 1:
        yield Problem(
            f"generation_kwargs['temperature']={kwargs['temperature']} while temperature={s.temperature}: the engine "
            "would sample at one and the trainer score at the other. Set temperature alone.",
            fix,
        )


def sampling_that_vllm_takes(s: Any, processes: int) -> Iterator[Problem]:
    if not s.use_vllm:
        return
    for name, wanted in refused_fields(s).items():
        yield Problem(
            f"{name}={getattr(s, name)!r}: {wanted} is needed. Set {name}={OFF[name]}, which is off.", {name: OFF[name]}
        )
    for name, wanted in refused_kwargs(s).items():
        value = (generation_kwargs(s) or {})[name]
        yield Problem(
            f"generation_kwargs[{name!r}]={value!r}: {wanted} is needed. Take it out of generation_kwargs.",
            {"generation_kwargs": mended_kwargs(s)},
        )


def engines_of_equal_size(s: Any, processes: int) -> Iterator[Problem]:
    size = s.vllm_tensor_parallel_size
    if size < 1 or (s.use_vllm and s.vllm_mode == "colocate" and processes % size):
        works = [n for n in range(1, processes + 1) if processes % n == 0]
        more = f", or start a multiple of {size} processes" if size > 0 else ""
        yield Problem(
            f"vllm_tensor_parallel_size={size} does not divide the {processes} process(es) of this run, and every engine "
            f"must span the same number of ranks. Set it to one of {works}{more}.",
            {"vllm_tensor_parallel_size": max((n for n in works if n <= size), default=1)},
        )


def engine_fields(s: Any, processes: int) -> Iterator[Problem]:
    if s.use_vllm and s.vllm_mode not in VLLM_MODES:
        yield Problem(
            f"vllm_mode={s.vllm_mode!r} is none of {', '.join(VLLM_MODES)}. Set 'colocate' for an engine in the trainer's processes.",
            {"vllm_mode": "colocate"},
        )
    if s.use_vllm and s.vllm_mode != "server":
        yield from _room_of_an_engine(s)
    if s.vllm_dtype not in (None, *VLLM_DTYPES):
        yield Problem(
            f"vllm_dtype={s.vllm_dtype!r} is none of {', '.join(VLLM_DTYPES)}. Leave it unset to take the actor's.",
            {"vllm_dtype": None},
        )
    if s.vllm_weight_sync not in WEIGHT_SYNCS:
        yield Problem(
            f"vllm_weight_sync={s.vllm_weight_sync!r} is none of {', '.join(WEIGHT_SYNCS)}. Set 'merged'.",
            {"vllm_weight_sync": "merged"},
        )
    if s.vllm_weight_sync == "adapter" and s.vllm_enable_sleep_mode:
        yield Problem(
            "vllm_weight_sync='adapter' was given with vllm_enable_sleep_mode=True. A sleeping engine drops the base "
            "weights, which an adapter push does not carry. Set vllm_weight_sync='merged', or leave the engine awake.",
            {"vllm_weight_sync": "merged"},
        )
    if not s.weight_sync_bucket_mb > 0:
        yield Problem(
            f"weight_sync_bucket_mb={s.weight_sync_bucket_mb}: a bucket must hold something. Set 512, or as many MiB "
            "as you can spare twice.",
            {"weight_sync_bucket_mb": 512},
        )


def _room_of_an_engine(s: Any) -> Iterator[Problem]:
    length, share = s.vllm_max_model_length, s.vllm_gpu_memory_utilization
    if length is not None and length < 2 and length != -1:  # -1: as long as memory allows
        yield Problem(
            f"vllm_max_model_length={length} has no room for a prompt and a completion. Leave it unset to take the model's.",
            {"vllm_max_model_length": None},
        )
    if not 0 < share <= 1:
        yield Problem(
            f"vllm_gpu_memory_utilization={share} is no share of a device's memory. Set 0.3, or any number up to 1.",
            {"vllm_gpu_memory_utilization": 0.3},
        )


def engine_arguments(s: Any, processes: int) -> Iterator[Problem]:
    kwargs = as_mapping(s.vllm_engine_kwargs)
    if kwargs is not None and not isinstance(kwargs, dict):
        yield Problem(
            f"vllm_engine_kwargs={kwargs!r} is no mapping. Give a dict, or a JSON object such as "
            "'{\"enforce_eager\": true}' on the command line.",
            {"vllm_engine_kwargs": None},
        )
        return
    free = {name: value for name, value in (kwargs or {}).items() if name not in RESERVED_ENGINE_KWARGS}
    for name in kwargs or {}:
        if name in RESERVED_ENGINE_KWARGS:
            yield Problem(
                f"vllm_engine_kwargs[{name!r}] is decided by {RESERVED_ENGINE_KWARGS[name]}. Take it out of "
                "vllm_engine_kwargs.",
                {"vllm_engine_kwargs": free or None},
            )


def correction_bounds(s: Any, processes: int) -> Iterator[Problem]:
    low, high = s.vllm_importance_sampling_clip_min, s.vllm_importance_sampling_clip_max
    high = high if s.vllm_importance_sampling_cap is None else s.vllm_importance_sampling_cap  # TRL's older name
    mode = s.vllm_importance_sampling_mode
    if low is not None and high is not None and low >= high:
        yield Problem(
            f"vllm_importance_sampling_clip_min={low} is not below vllm_importance_sampling_clip_max={high}, so every ratio is "
            "out of bounds. Leave vllm_importance_sampling_clip_min unset, or set one below.",
            {"vllm_importance_sampling_clip_min": None},
        )
    elif s.vllm_importance_sampling_correction and mode.endswith("_truncate") and low is None and high is None:
        yield Problem(
            f"vllm_importance_sampling_mode={mode!r} has nothing to truncate at: both of its bounds are unset. Set "
            "vllm_importance_sampling_clip_max=3.0.",
            {"vllm_importance_sampling_clip_max": 3.0},
        )


# ---- sampling --------------------------------------------------------------------------------------------------------
def sampled_as_scored(s: Any, processes: int) -> Iterator[Problem]:
    if s.sampling_mismatch not in SAMPLING_MISMATCHES:
        yield Problem(
            f"sampling_mismatch={s.sampling_mismatch!r} is none of {', '.join(SAMPLING_MISMATCHES)}. Set 'warn', the default.",
            {"sampling_mismatch": "warn"},
        )
        return
    if not s.use_vllm or s.sampling_mismatch == "warn":
        return
    asked = mended(s)
    settings = SamplingSettings.of(effective_sampling(asked))
    fix = {"sampling_mismatch": "warn" if settings.not_replayed else "correct"}
    if settings.departures and s.sampling_mismatch == "error":
        yield Problem(
            f"sampling_mismatch='error' and {listed(settings.departures)}: the engine samples from another distribution than the "
            f"trainer scores, so that every importance ratio is biased. Set {listed(neutral(asked))}, or {listed(fix)}.",
            fix,
        )
    elif settings.not_replayed and s.sampling_mismatch == "correct":
        yield Problem(
            f"sampling_mismatch='correct' cannot replay {', '.join(settings.not_replayed)}: which tokens it forbids depends on the "
            f"text so far. Set {listed(neutral(asked))}, or {listed(fix)}.",
            fix,
        )


# ---- log-probs -------------------------------------------------------------------------------------------------------
def old_log_probs(s: Any, processes: int) -> Iterator[Problem]:
    if s.old_logps not in OLD_LOGPS:
        yield Problem(
            f"old_logps={s.old_logps!r} is none of {', '.join(OLD_LOGPS)}. Set 'window', which computes what is due.",
            {"old_logps": "window"},
        )
    if s.old_logps_max_age is None:
        return
    if s.old_logps_max_age < 0:
        yield Problem(
            f"old_logps_max_age={s.old_logps_max_age}: an age in optimizer steps cannot be negative. Set 0 to take old "
            "log-probs anew at every use after a step, a larger number for older rollouts only, or leave it unset.",
            {"old_logps_max_age": None},
        )
    elif not (s.use_vllm and s.vllm_importance_sampling_correction):
        yield Problem(
            f"old_logps_max_age={s.old_logps_max_age} moves the anchor of old rollouts to the current policy, and only "
            "the engine's log-probs and their correction lead back to the policy that sampled them; with "
            f"use_vllm={s.use_vllm} and vllm_importance_sampling_correction="
            f"{s.vllm_importance_sampling_correction} there are none. Set both to True, or leave the age unset.",
            {"old_logps_max_age": None},
        )


def shared_prompts(s: Any, processes: int) -> Iterator[Problem]:
    if str(s.shared_prompt).lower() not in SHARED_PROMPT:
        yield Problem(
            f"shared_prompt={s.shared_prompt!r} is none of 'auto', True, False. Set 'auto' to encode a prompt once for its "
            "rollouts where that is cheaper.",
            {"shared_prompt": "auto"},
        )


def sizes_of_passes(s: Any, processes: int) -> Iterator[Problem]:
    rows = max(1, s.per_device_train_batch_size)
    works = {"old_logps_budget": rows, "logps_max_tokens": s.max_completion_length or 256}
    for name in (*works, "logps_micro_batch_size", "ref_logps_micro_batch_size"):
        value, good = getattr(s, name), works.get(name, rows)
        if value is not None and value < 1:
            yield Problem(
                f"{name}={value}: nothing fits into that. Set {name}={good} or more, or leave it unset.", {name: None}
            )


# ---- rewards ---------------------------------------------------------------------------------------------------------
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


def rollouts_of_a_generation(s: Any, processes: int) -> int:
    if s.generation_batch_size is not None:
        return s.generation_batch_size
    steps = s.steps_per_generation if s.steps_per_generation is not None else s.gradient_accumulation_steps
    return s.per_device_train_batch_size * processes * steps


# ---- consistency -----------------------------------------------------------------------------------------------------
def prob_diff_counts(s: Any, processes: int) -> Iterator[Problem]:
    for name, (least, default) in _PROB_DIFF_COUNTS.items():
        if getattr(s, name) < least:
            yield Problem(f"{name}={getattr(s, name)}: at least {least} is needed. Set {name}={default}.", {name: default})


_PROB_DIFF_COUNTS = {
    "prob_diff_token_max_print": (0, 10),
    "prob_diff_sample_max_print": (0, 8),
    "prob_diff_patience": (1, 1),
    "prob_diff_keep_last": (1, 100),
}


def prob_diff_thresholds(s: Any, processes: int) -> Iterator[Problem]:
    for name in ("prob_diff_warn", "prob_diff_stop"):
        value = getattr(s, name)
        if value is not None and not 0 <= value <= 1:
            yield Problem(
                f"{name}={value}: a difference of probabilities lies between 0 and 1. Set 0.005 (above it a run deserves a "
                "look), 0.01 (above it something is wrong), or None.",
                {name: 0.005},
            )


# ---- faults ----------------------------------------------------------------------------------------------------------
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
    at_least_two_generations,
    sizes_of_a_step,
    one_size_of_a_generation,
    whole_groups,
    whole_groups_in_evaluation,
    generation_kwargs_as_mapping,
    sampled_temperature,
    sampling_that_vllm_takes,
    engines_of_equal_size,
    engine_fields,
    engine_arguments,
    correction_bounds,
    sampled_as_scored,
    old_log_probs,
    shared_prompts,
    sizes_of_passes,
    kl_in_the_reward,
    prob_diff_counts,
    prob_diff_thresholds,
    limit_of_rewards,
)
