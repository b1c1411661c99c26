"""GRPOExtConfig: TRL's GRPOConfig plus the knobs of grpo_ext. What they must satisfy stands in `grpo_ext.rules`."""

import os
from dataclasses import dataclass, field
from typing import Any

from trl import GRPOConfig

from grpo_ext.rules import problems
from grpo_ext.rules.logps import SHARED_PROMPT
from grpo_ext.toolchain import spare_the_compiler


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
            Seed from which every rollout's own sampling seed is derived, by (generation batch, prompt, number among the samples
            of that prompt over all ranks), so that what is sampled depends neither on the rest of the batch nor on the
            number of ranks. Unset: the engine's generator draws, except with tensor parallelism, where per-rollout seeds are
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
        kl_in_reward (`bool`, defaults to `False`):
            Subtract the KL divergence from the reference from the reward of each completion, before the group is normalised.
            Takes the place of `beta`, which puts it into the loss and must be 0.
        kl_in_reward_coef (`float`, defaults to `0.001`):
            Reward per nat of a completion's KL, the sum over its tokens; where there is a target, the value to start from.
        kl_in_reward_target (`float`, *optional*):
            KL of a completion, in nats, that the coefficient is moved towards. Unset: the coefficient stays.
        kl_in_reward_horizon (`int`, defaults to `10000`):
            Rollouts in which the coefficient moves by up to a fifth of itself, towards `kl_in_reward_target`.
        debug_batch (`bool`, defaults to `False`):
            Print, before the first loss, a table of the tensors it is given and the first row with its loss mask, on the main
            process of every node.
        enable_token_level_prob_diff (`bool`, defaults to `False`):
            Log |p_rollout - p_actor| of the first tokens of the first rollouts, and dump that of every token to
            `prob_diff_save_dir`. The aggregates are logged in any case.
        prob_diff_save_dir (`str`, *optional*):
            Directory of the dumps. Made if its parent exists or it lies in `output_dir`. Unset: no dumps.
        prob_diff_token_max_print (`int`, defaults to `10`), prob_diff_sample_max_print (`int`, defaults to `8`):
            Positions, and rollouts, of which single tokens are logged.
        prob_diff_warn (`float`, *optional*, defaults to `0.005`):
            Mean probability difference above which a warning names the likely cause. None: no warning.
        prob_diff_stop (`float`, *optional*):
            Mean probability difference above which the run stops, with a checkpoint. Unset: never.
        prob_diff_patience (`int`, defaults to `1`):
            Policy versions in a row above `prob_diff_stop` before the run stops.
        prob_diff_keep_last (`int`, defaults to `100`):
            Optimizer steps whose dumps are kept; older ones are deleted.
        prob_diff_save_tokens (`bool`, defaults to `False`):
            Write a Parquet file beside each dump: token ids and text, both log-probs, policy version, prompt.
        sampling_mismatch (`str`, defaults to `"warn"`):
            What to do where the engine samples from another distribution than the trainer scores (top_p, top_k, min_p, penalties,
            logit bias, `generation_kwargs` included). "warn": say so once, with the bias measured on the first rollouts. "error":
            refuse. "correct": score the actor on the support that was sampled from, at the cost of full logits.
        reward_timeout_s (`float`, *optional*):
            Seconds that a call of a reward function may take on a rank; past them the run ends with a TimeoutError that names
            it. The function then runs in a thread of its own, where `signal` cannot be used. Unset: no limit, no thread.
        resume_rollouts (`bool`, defaults to `True`):
            Resume with the rollouts, their old log-probs, counts and seeds that the checkpoint holds, as if the run had never
            stopped; a checkpoint whose state is damaged, incomplete or of other settings is refused. False: that state is not
            read, and the resumed run begins with fresh rollouts.
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

    kl_in_reward: bool = field(
        default=False, metadata={"help": "Subtract the KL from the reference from the reward, in the place of beta."}
    )
    kl_in_reward_coef: float = field(
        default=0.001, metadata={"help": "Reward per nat of a completion's KL; the start where there is a target."}
    )
    kl_in_reward_target: float | None = field(
        default=None, metadata={"help": "KL of a completion in nats that the coefficient moves towards; unset: it stays."}
    )
    kl_in_reward_horizon: int = field(
        default=10_000, metadata={"help": "Rollouts in which the coefficient moves by up to a fifth of itself."}
    )
    debug_batch: bool = field(
        default=False, metadata={"help": "Print the tensors of the first loss and its first row, once on every node."}
    )

    enable_token_level_prob_diff: bool = field(
        default=False, metadata={"help": "Log and dump the probability differences of single tokens."}
    )
    prob_diff_save_dir: str | None = field(default=None, metadata={"help": "Directory of the dumps; unset: none."})
    prob_diff_token_max_print: int = field(default=10, metadata={"help": "Positions of which single tokens are logged."})
    prob_diff_sample_max_print: int = field(default=8, metadata={"help": "Rollouts of which single tokens are logged."})
    prob_diff_warn: float | None = field(
        default=0.005, metadata={"help": "Mean probability difference above which a warning names the likely cause."}
    )
    prob_diff_stop: float | None = field(
        default=None, metadata={"help": "Mean probability difference above which the run stops, with a checkpoint."}
    )
    prob_diff_patience: int = field(
        default=1, metadata={"help": "Policy versions in a row above prob_diff_stop before the run stops."}
    )
    prob_diff_keep_last: int = field(default=100, metadata={"help": "Optimizer steps whose dumps are kept."})
    prob_diff_save_tokens: bool = field(
        default=False, metadata={"help": "Write a Parquet file with tokens and both log-probs beside each dump."}
    )
    sampling_mismatch: str = field(
        default="warn",
        metadata={"help": "Where sampling is truncated or penalised: 'warn', 'error', or 'correct' the actor's log-probs."},
    )
    reward_timeout_s: float | None = field(
        default=None, metadata={"help": "Seconds that a call of a reward function may take; unset: no limit."}
    )
    resume_rollouts: bool = field(
        default=True,
        metadata={"help": "Resume with the rollouts and counts that the checkpoint holds; False: with fresh ones."},
    )

    def __post_init__(self) -> None:
        self._choose_backend()
        self._check_deepspeed_on_cpu()
        for problem in problems(self, launched_processes()):
            raise ValueError(problem.text)
        super().__post_init__()
        self.shared_prompt = SHARED_PROMPT[str(self.shared_prompt).lower()]

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

    def _check_deepspeed_on_cpu(self) -> None:
        if self.use_cpu and (launched_with_deepspeed() or self.deepspeed is not None):
            raise ValueError(
                "use_cpu=True was given together with DeepSpeed. Accelerate then drops DeepSpeed without a word while the "
                "weights are already partitioned, and every parameter has shape (0,). Leave use_cpu=False: on a box "
                "without an accelerator DeepSpeed runs on the CPU by itself (ddp_backend='gloo' is chosen for you)."
            )
