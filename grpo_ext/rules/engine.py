"""What the engine is started with."""

from collections.abc import Iterator
from typing import Any

from grpo_ext.rollout.sampling import as_mapping
from grpo_ext.rules.problem import Problem, Rule

WEIGHT_SYNCS = ("merged", "adapter")
VLLM_MODES = ("colocate", "server")
VLLM_DTYPES = ("float32", "bfloat16", "float16")
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


RULES: tuple[Rule, ...] = (
    engines_of_equal_size,
    engine_fields,
    engine_arguments,
)
