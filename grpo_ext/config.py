"""GRPOExtConfig: TRL's GRPOConfig plus the knobs of grpo_ext, one validator per rule."""

import json
import math
import os
from dataclasses import dataclass, field
from typing import Any

from trl import GRPOConfig

from grpo_ext.toolchain import spare_the_compiler

WEIGHT_SYNCS = ("merged", "adapter")
OLD_LOGPS = ("window", "always", "rollout")
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


def launched_processes() -> int:
    """Number of processes the launcher started, readable before anything distributed is set up."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def launched_with_deepspeed() -> bool:
    return os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() in ("true", "1", "yes")


def has_accelerator() -> bool:
    import torch

    return torch.accelerator.is_available()


@dataclass
class GRPOExtConfig(GRPOConfig):
    """Everything `trl.GRPOConfig` takes, and the fields below. Left alone, every field keeps TRL's training semantics.

    Parameters:
        vllm_dtype (`str`, *optional*):
            dtype of the colocated engine: "float32", "bfloat16" or "float16". Unset: the actor's dtype, so that both sides
            compute the same probabilities.
        vllm_engine_kwargs (`dict`, *optional*):
            Further arguments of `vllm.LLM`, passed through as they are (a JSON object on the command line). They win over
            the defaults that the trainer would pass.
        vllm_weight_sync (`str`, defaults to `"merged"`):
            What is pushed to the engine when the actor is a PEFT model: "merged" pushes full weights with the adapter
            folded in (any PEFT kind that can be merged), "adapter" pushes the LoRA matrices only (plain LoRA, no sleep mode).
        weight_sync_bucket_mb (`float`, defaults to `512`):
            Upper bound, in MiB, of the memory that one ZeRO-3 gather takes during a push (twice the size of the parameters
            in it, for DeepSpeed holds them as received and as put together). A single larger parameter is gathered alone.
        rollout_seed (`int`, *optional*):
            Seed from which every rollout's own sampling seed is derived, by (generation call, row over all ranks).
            Unset: the engine's generator draws, except with tensor parallelism, where per-rollout seeds are
            necessary (the ranks of one engine must draw alike) and `seed` serves.
        old_logps (`str`, defaults to `"window"`):
            Where the log-probs of the old policy, the anchor of the PPO ratio, come from. "window": from the training forward
            where no optimizer step lies between generation and a rollout's first use, else from a forward just before that
            step. "always": from a forward right after generation, for every rollout. "rollout": the engine's own log-probs,
            no forward at all.
        old_logps_budget (`int`, *optional*):
            Rows, per rank and micro-step, of which old log-probs are computed ahead of the step that makes them due, so that
            the work is spread over the window. What is left is computed at the step. Unset: all at the step.
        old_logps_max_age (`int`, *optional*):
            Optimizer steps after which a rollout's old log-probs are taken anew when it is used, free of cost; the engine's
            log-probs then carry the correction. Unset: never.
        group_rollouts_by_length (`bool`, *optional*):
            Put rollouts of like length into the same slice, among slices that share their optimizer windows. Unset: where it
            is known not to change the gradient. False: never. True: with a `_compute_loss` of your own as well.
        shared_prompt (`bool` or `str`, defaults to `"auto"`):
            Encode a prompt once for all of its rollouts in a slice, as the trunk of a tree whose branches are the completions, in
            every pass. "auto": where that is cheaper than rows, and the model can. True: wherever the model can. False: never.
            In the first two the head projects the completions' positions only, of rows as well.
        logps_micro_batch_size (`int`, *optional*):
            Rows per forward of the actor without gradient. Unset: `per_device_train_batch_size`.
        ref_logps_micro_batch_size (`int`, *optional*):
            Rows per forward of the reference model. Unset: `per_device_train_batch_size`.
        logps_max_tokens (`int`, *optional*):
            Tokens, padding included, per forward without gradient, of actor and reference; a hard cap, except that a
            longer row runs alone. Unset: no cap.
    """

    _VALID_DICT_FIELDS = [*GRPOConfig._VALID_DICT_FIELDS, "vllm_engine_kwargs"]

    vllm_dtype: str | None = field(default=None, metadata={"help": "dtype of the colocated vLLM engine; unset: the actor's."})
    vllm_engine_kwargs: dict[str, Any] | str | None = field(
        default=None, metadata={"help": "Further arguments of vllm.LLM, as a JSON object on the command line."}
    )
    vllm_weight_sync: str = field(
        default="merged",
        metadata={"help": "What a push carries for a PEFT actor: 'merged' weights or only the LoRA 'adapter'."},
    )
    weight_sync_bucket_mb: float = field(
        default=512, metadata={"help": "MiB of memory that one ZeRO-3 gather may take during a weight push."}
    )
    rollout_seed: int | None = field(
        default=None, metadata={"help": "Seed from which every rollout's own sampling seed is derived."}
    )

    old_logps: str = field(
        default="window",
        metadata={"help": "Where old log-probs come from: 'window' (when due, else free), 'always', or 'rollout'."},
    )
    old_logps_budget: int | None = field(
        default=None, metadata={"help": "Rows per micro-step whose old log-probs are computed ahead of the step."}
    )
    old_logps_max_age: int | None = field(
        default=None, metadata={"help": "Optimizer steps after which old log-probs are taken anew at the next use."}
    )
    group_rollouts_by_length: bool | None = field(
        default=None,
        metadata={"help": "Put rollouts of like length into the same slice; unset: where the gradient stays the same."},
    )
    shared_prompt: str = field(  # or a bool: the command line's parser takes no union of the two
        default="auto",
        metadata={"help": "Encode a prompt once for its rollouts: 'auto' (where that is cheaper), true, or false."},
    )
    logps_micro_batch_size: int | None = field(
        default=None, metadata={"help": "Rows per forward of the actor without gradient; unset: the training batch's."}
    )
    ref_logps_micro_batch_size: int | None = field(
        default=None, metadata={"help": "Rows per forward of the reference model; unset: the training batch's."}
    )
    logps_max_tokens: int | None = field(
        default=None, metadata={"help": "Tokens, padding included, per forward without gradient: a hard cap."}
    )

    def __post_init__(self) -> None:
        self._choose_backend()
        self._check_deepspeed_on_cpu()
        self._check_num_generations()
        self._check_batch_arithmetic()
        self._check_temperature()
        self._check_tensor_parallel()
        super().__post_init__()
        self._check_engine_fields()
        self._check_old_logps()
        self._check_shared_prompt()
        self._check_sizes()

    # ---- chosen for the user ---------------------------------------------------------------------------------------
    def _choose_backend(self) -> None:
        """On a box without an accelerator: gloo, and CPU mode where DeepSpeed does not have to start it."""
        if has_accelerator():
            return
        spare_the_compiler()
        deepspeed = launched_with_deepspeed() or self.deepspeed is not None
        if self.ddp_backend is None and (deepspeed or launched_processes() > 1):
            self.ddp_backend = "gloo"
        if launched_processes() > 1 and not deepspeed:
            self.use_cpu = True  # without it Accelerate starts processes that do not cooperate
        if self.bf16 is None and not self.use_cpu:
            self.bf16 = False  # TRL's default, True, is refused by transformers on such a box

    # ---- one validator per rule ------------------------------------------------------------------------------------
    def _check_deepspeed_on_cpu(self) -> None:
        if self.use_cpu and (launched_with_deepspeed() or self.deepspeed is not None):
            raise ValueError(
                "use_cpu=True was given together with DeepSpeed. Accelerate then drops DeepSpeed without a word while the "
                "weights are already partitioned, and every parameter has shape (0,). Leave use_cpu=False: on a box "
                "without an accelerator DeepSpeed runs on the CPU by itself (ddp_backend='gloo' is chosen for you)."
            )

    def _check_num_generations(self) -> None:
        if self.num_generations is None or self.num_generations < 2:
            raise ValueError(
                f"num_generations={self.num_generations}: GRPO compares the completions of one prompt with each other, so "
                "it needs at least 2 generations per prompt. Set num_generations=2 or more."
            )

    def _check_batch_arithmetic(self) -> None:
        if self.generation_batch_size is not None and self.steps_per_generation is not None:
            return  # TRL refuses the pair and says so
        assert self.num_generations is not None  # `_check_num_generations` came first
        per_step = self.per_device_train_batch_size * launched_processes()
        shape = (
            f"per_device_train_batch_size={self.per_device_train_batch_size} x {launched_processes()} process(es) = "
            f"{per_step} rollouts a micro-step"
        )
        if self.generation_batch_size is not None:
            unit = math.lcm(per_step, self.num_generations)
            if self.generation_batch_size <= 0 or self.generation_batch_size % unit:
                works = max(1, math.ceil(self.generation_batch_size / unit)) * unit
                raise ValueError(
                    f"generation_batch_size={self.generation_batch_size} cannot be cut into whole micro-steps ({shape}) "
                    f"and whole groups (num_generations={self.num_generations}). Set generation_batch_size={works}."
                )
            return
        steps = self.steps_per_generation or self.gradient_accumulation_steps
        if steps < 1:
            raise ValueError(f"steps_per_generation={steps}: at least 1 micro-step must follow a generation. Set 1 or more.")
        if (per_step * steps) % self.num_generations:
            unit = self.num_generations // math.gcd(per_step, self.num_generations)
            works = math.ceil(steps / unit) * unit
            origin = "steps_per_generation" if self.steps_per_generation else "gradient_accumulation_steps"
            raise ValueError(
                f"{shape}, times {origin}={steps} = {per_step * steps} rollouts a generation: these are not whole groups of "
                f"num_generations={self.num_generations}. Set steps_per_generation={works} "
                f"({per_step * works} rollouts, {per_step * works // self.num_generations} group(s))."
            )

    def _check_temperature(self) -> None:
        kwargs = self.generation_kwargs
        if isinstance(kwargs, str):
            kwargs = json.loads(kwargs)
        fields = {"temperature": self.temperature}
        if kwargs and "temperature" in kwargs:
            fields["generation_kwargs['temperature']"] = kwargs["temperature"]
        for name, value in fields.items():
            if value is None or not value > 0:
                raise ValueError(
                    f"{name}={value}: log-probs are those of the distribution that was sampled, logits / temperature, which "
                    "does not exist at 0 (greedy decoding also makes all completions of a group equal). Set "
                    "temperature=1.0, or any value above 0."
                )
        if kwargs and "temperature" in kwargs and kwargs["temperature"] != self.temperature:
            raise ValueError(
                f"generation_kwargs['temperature']={kwargs['temperature']} while temperature={self.temperature}: the engine "
                "would sample at one and the trainer score at the other. Set temperature alone."
            )

    def _check_tensor_parallel(self) -> None:
        size, processes = self.vllm_tensor_parallel_size, launched_processes()
        if size < 1 or (self.use_vllm and self.vllm_mode == "colocate" and processes % size):
            works = [n for n in range(1, processes + 1) if processes % n == 0]
            raise ValueError(
                f"vllm_tensor_parallel_size={size} does not divide the {processes} process(es) of this run, and every engine "
                f"must span the same number of ranks. Set it to one of {works}, or start a multiple of {size} processes."
            )

    def _check_old_logps(self) -> None:
        if self.old_logps not in OLD_LOGPS:
            raise ValueError(
                f"old_logps={self.old_logps!r} is none of {', '.join(OLD_LOGPS)}. Set 'window', which computes what is due."
            )
        if self.old_logps_max_age is None:
            return
        if self.old_logps_max_age < 0:
            raise ValueError(
                f"old_logps_max_age={self.old_logps_max_age}: an age in optimizer steps cannot be negative. Set 0 to take old "
                "log-probs anew at every use after a step, a larger number for older rollouts only, or leave it unset."
            )
        if not (self.use_vllm and self.vllm_importance_sampling_correction):
            raise ValueError(
                f"old_logps_max_age={self.old_logps_max_age} moves the anchor of old rollouts to the current policy, and only "
                "the engine's log-probs and their correction lead back to the policy that sampled them; with "
                f"use_vllm={self.use_vllm} and vllm_importance_sampling_correction="
                f"{self.vllm_importance_sampling_correction} there are none. Set both to True, or leave the age unset."
            )

    def _check_shared_prompt(self) -> None:
        said: dict[str, Any] = {"true": True, "false": False}
        self.shared_prompt = said.get(str(self.shared_prompt).lower(), self.shared_prompt)
        if self.shared_prompt not in ("auto", True, False):
            raise ValueError(
                f"shared_prompt={self.shared_prompt!r} is none of 'auto', True, False. Set 'auto' to encode a prompt once for its "
                "rollouts where that is cheaper."
            )

    def _check_sizes(self) -> None:
        works = {"old_logps_budget": self.per_device_train_batch_size, "logps_max_tokens": self.max_completion_length}
        names = (*works, "logps_micro_batch_size", "ref_logps_micro_batch_size")
        for name in names:
            value, good = getattr(self, name), works.get(name, self.per_device_train_batch_size)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value}: nothing fits into that. Set {name}={good} or more, or leave it unset.")

    def _check_engine_fields(self) -> None:
        if self.vllm_dtype not in (None, *VLLM_DTYPES):
            raise ValueError(
                f"vllm_dtype={self.vllm_dtype!r} is none of {', '.join(VLLM_DTYPES)}. Leave it unset to take the actor's."
            )
        if self.vllm_weight_sync not in WEIGHT_SYNCS:
            raise ValueError(f"vllm_weight_sync={self.vllm_weight_sync!r} is none of {', '.join(WEIGHT_SYNCS)}. Set 'merged'.")
        if self.vllm_weight_sync == "adapter" and self.vllm_enable_sleep_mode:
            raise ValueError(
                "vllm_weight_sync='adapter' was given with vllm_enable_sleep_mode=True. A sleeping engine drops the base "
                "weights, which an adapter push does not carry. Set vllm_weight_sync='merged', or leave the engine awake."
            )
        if not self.weight_sync_bucket_mb > 0:
            raise ValueError(
                f"weight_sync_bucket_mb={self.weight_sync_bucket_mb}: a bucket must hold something. Set 512, or as many MiB "
                "as you can spare twice."
            )
        if self.vllm_engine_kwargs is not None and not isinstance(self.vllm_engine_kwargs, dict):
            raise ValueError(
                f"vllm_engine_kwargs={self.vllm_engine_kwargs!r} is no mapping. Give a dict, or a JSON object such as "
                "'{\"enforce_eager\": true}' on the command line."
            )
        for name in self.vllm_engine_kwargs or {}:
            if name in RESERVED_ENGINE_KWARGS:
                raise ValueError(
                    f"vllm_engine_kwargs[{name!r}] is decided by {RESERVED_ENGINE_KWARGS[name]}. Take it out of "
                    "vllm_engine_kwargs."
                )
