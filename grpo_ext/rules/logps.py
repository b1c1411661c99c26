"""Old and reference log-probs, their passes, and the correction for the engine."""

from collections.abc import Iterator
from typing import Any

from grpo_ext.rules.problem import Problem, Rule

OLD_LOGPS = ("window", "always", "rollout")
SHARED_PROMPT: dict[str, Any] = {"auto": "auto", "true": True, "false": False}  # as a command line says it
# Losses whose gradient over an optimizer window does not depend on which of its slices a row sits in.
NEUTRAL_LOSSES = ("grpo", "dapo", "dr_grpo", "cispo", "sapo", "vespo", "luspo")


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


RULES: tuple[Rule, ...] = (
    correction_bounds,
    old_log_probs,
    shared_prompts,
    sizes_of_passes,
)
