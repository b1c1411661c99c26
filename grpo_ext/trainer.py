"""GRPOExtMixin and GRPOExtTrainer: what is added to TRL's GRPOTrainer, each override being `super()` plus one call."""

import os
from contextlib import ExitStack
from dataclasses import fields
from typing import Any

import torch
from transformers import TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from trl import GRPOTrainer

from grpo_ext import _trl
from grpo_ext.clock import Clock
from grpo_ext.config import GRPOExtConfig
from grpo_ext.consistency.callback import ProbDiffCallback
from grpo_ext.consistency.monitor import ProbDiffMonitor
from grpo_ext.console import BatchLook
from grpo_ext.logprobs.anchors import Anchors
from grpo_ext.resume.checkpoint import Checkpoints
from grpo_ext.rewards.guard import RewardGuard
from grpo_ext.rewards.odd_rows import OddRows
from grpo_ext.rewards.penalty import KLInReward
from grpo_ext.rollout.guards import Guards
from grpo_ext.rollout.scores import check_rollout_scores
from grpo_ext.rollout.seeds import GenerationCount

_trl.check_trl()


class GRPOExtMixin:
    """Put before any trainer that derives from `trl.GRPOTrainer`: `class Mine(GRPOExtMixin, SomeTRLTrainer)`.

    Overrides, and what each adds:
        __init__                  checks first; a `ColocatedEngine` where TRL would start its own; a reference for the KL in the reward
        _generate                 the engine's log-probs are held against its tokens, unscored ones counted
        _generate_single_turn     a token stands in for an empty completion
        _generate_and_score_completions   neither old log-probs nor the engine's ratio are computed there any more ...
        _prepare_inputs           ... but here, when an optimizer step is about to make them too late; rows grouped and trimmed
        compute_loss              ... or taken from the loss's own forward, free
        _get_per_token_logps_and_entropies   micro-batches of like length where no gradient is needed
        _calculate_rewards        a reward function that raises, hangs or returns the wrong number ends the run on all ranks, by name;
                                  rewards that cannot be used are taken out before a group's statistics are made of them
        training_step, evaluate, log   phase times, and the monitor's aggregates
        _load_from_checkpoint,
        _load_best_model          the engine is told that the weights changed
        _run_epoch                a run that was over is not trained further when it is resumed
        train, _save_checkpoint,
        _save_rng_state, _load_rng_state, _get_train_sampler   a checkpoint holds all that an exact resume needs, or is not used

    Settings are read from `args`, a `GRPOExtConfig` (or a class that derives from it and the other trainer's
    config). With a plain `GRPOConfig` every knob has its default.
    """

    def __init__(self, model: Any, *args: Any, **kwargs: Any):
        config = kwargs.get("args", args[1] if len(args) > 1 else None)
        self._ext = config if isinstance(config, GRPOExtConfig) else None
        if config is not None and config.use_vllm and config.vllm_mode == "colocate":
            _trl.check_vllm()
            from grpo_ext.rollout.engine import check_engine_kwargs

            check_engine_kwargs(self._setting("vllm_engine_kwargs") or {})
        processing_class = kwargs.get("processing_class", args[4] if len(args) > 4 else None)
        if isinstance(model, str) and processing_class is None:
            _check_has_tokenizer(model)
        self.clock = Clock(self)
        self.phase_times = self.clock.phases
        self.generations = GenerationCount()
        with ExitStack() as around:
            around.enter_context(_trl.engine_injected(self._build_engine))
            if self._setting("kl_in_reward"):
                around.enter_context(_trl.reference_loaded(self, config))
            super().__init__(model, *args, **kwargs)
        self.odd_rows = OddRows(self)
        self.kl_in_reward = KLInReward(self) if self._setting("kl_in_reward") else None
        self.monitor = ProbDiffMonitor(self.accelerator)
        self.anchors = Anchors(self)
        self.reward_guard = RewardGuard(self, self._setting("reward_timeout_s"))
        parts = {"monitor": self.monitor, "anchors": self.anchors, "generations": self.generations}
        if self.kl_in_reward is not None:
            parts["kl_in_reward"] = self.kl_in_reward
        self.checkpoints = Checkpoints(self, parts)
        self.guards = Guards(self)
        looks = self._setting("debug_batch") and self.accelerator.is_local_main_process
        self.batch_look = BatchLook(looks, self._tokenizer.decode)
        self.add_callback(_RunEvents(self))
        self._attach_prob_diff()

    def _setting(self, name: str) -> Any:
        """Value of one of our knobs: that of the config, or its default where the config is TRL's own."""
        return getattr(self._ext if self._ext is not None else GRPOExtConfig, name)

    def _attach_prob_diff(self) -> None:
        """Bind every `ProbDiffCallback` to this trainer; one set as the config says is added where there is no other."""
        present = [callback for callback in self.callback_handler.callbacks if isinstance(callback, ProbDiffCallback)]
        if not present:
            names = (field.name for field in fields(GRPOExtConfig) if "prob_diff" in field.name)
            present = [ProbDiffCallback(automatic=True, **{name: self._setting(name) for name in names})]
            self.add_callback(present[0])
        for callback in present:
            if callback.automatic and len(present) > 1:
                self.remove_callback(callback)
            else:
                callback.bind(self)

    # ---- the engine ------------------------------------------------------------------------------------------------
    def _build_engine(self, **kwargs: Any) -> Any:
        """The engine TRL asked for: ours in its process, TRL's own client where the engine is a server."""
        if kwargs["mode"] != "colocate":
            from trl.generation.vllm_generation import VLLMGeneration

            return VLLMGeneration(**kwargs)
        from grpo_ext.rollout.engine import ColocatedEngine

        seed = self._setting("rollout_seed")
        if seed is None and kwargs["tensor_parallel_size"] > 1:
            seed = self.args.seed
        return ColocatedEngine(
            **kwargs,
            dtype=self._setting("vllm_dtype"),
            engine_kwargs=self._setting("vllm_engine_kwargs"),
            weight_sync=self._setting("vllm_weight_sync"),
            bucket_mb=self._setting("weight_sync_bucket_mb"),
            rollout_seed=seed,
            generations=self.generations,
            phase_times=self.phase_times,
            retried=self._count_retries,
        )

    def _count_retries(self, ranks: int) -> None:
        counted = self._metrics[self._mode]["rollout/generate_retries"]
        counted[:] = [sum(counted) + ranks]  # TRL logs the mean of what is in the list: here, all since the last log

    def mark_weights_changed(self) -> None:
        """Say that the actor's weights changed other than by an optimizer step: they are pushed before the next generation."""
        self._last_loaded_step = -1

    def _load_from_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_checkpoint(*args, **kwargs)
        self.mark_weights_changed()

    def _load_best_model(self) -> None:
        super()._load_best_model()
        self.mark_weights_changed()

    # ---- checkpoints -----------------------------------------------------------------------------------------------
    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        with self.checkpoints.one_before_failing():
            return super().train(self.checkpoints.chosen(resume_from_checkpoint), *args, **kwargs)

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        if not self.checkpoints.run_is_over:
            super()._run_epoch(*args, **kwargs)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        if self.checkpoints.waits:
            self.control.should_save = True
            return
        folder = f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        with (
            self.phase_times.phase("checkpoint"),
            self.checkpoints.writing(os.path.join(self._get_output_dir(trial=trial), folder)),
        ):
            super()._save_checkpoint(model, trial)

    def _save_rng_state(self, output_dir: str) -> None:
        self.checkpoints.save(output_dir)
        super()._save_rng_state(output_dir)
        self.accelerator.wait_for_everyone()  # `trainer_state.json`, which the main process writes next, says that all is there

    def _load_rng_state(self, checkpoint: str | None) -> None:
        super()._load_rng_state(checkpoint)
        self.checkpoints.restore(checkpoint)

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
        self.checkpoints.sampler = super()._get_train_sampler(*args, **kwargs)
        return self.checkpoints.sampler

    # ---- rollouts --------------------------------------------------------------------------------------------------
    def _generate(self, prompts: list) -> tuple:
        self.generations.begins(self._mode)
        with self.clock.generation(len(prompts)), self.odd_rows.generating():
            result = super()._generate(prompts)
        result = self.odd_rows.hidden(result)
        completion_ids, tool_mask, logprobs = result[1], result[2], result[4]
        self.anchors.passes.generated(tool_mask, logprobs)
        if logprobs is not None:
            scores = check_rollout_scores(completion_ids, logprobs)
            self._metrics[self._mode]["sampling/unscored_tokens"].append(float(scores.unscored))
        return result

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> tuple:
        return self.odd_rows.first_turn(*super()._generate_single_turn(*args, **kwargs))

    def _generate_and_score_completions(self, inputs: list) -> dict[str, Any]:
        with self.anchors.passes.generating():
            rows = super()._generate_and_score_completions(inputs)
        return self.odd_rows.received(self.anchors.received(rows))

    # ---- old log-probs: taken when due, or free --------------------------------------------------------------------
    def _prepare_inputs(self, generation_batch: Any) -> dict[str, Any]:
        return self.anchors.prepared(super()._prepare_inputs(generation_batch))

    def _get_per_token_logps_and_entropies(self, model: Any, *args: Any, **kwargs: Any) -> tuple:
        return self.anchors.passes.score(super()._get_per_token_logps_and_entropies, model, *args, **kwargs)

    def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> torch.Tensor:
        with self.anchors.of_loss(model, self.batch_look(inputs)):
            loss = super().compute_loss(model, inputs, *args, **kwargs)
        if self._mode == "train" and self.anchors.position.steps_now:
            self.monitor.send()
        return loss

    # ---- times and logs --------------------------------------------------------------------------------------------
    @property
    def _mode(self) -> str:
        return "train" if self.model.training else "eval"

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        with self.phase_times.phase("reward"), self.reward_guard.watching():
            return self.odd_rows.judged(super()._calculate_rewards(*args, **kwargs))

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        with self.clock.micro_step():
            return super().training_step(*args, **kwargs)

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        with self.phase_times.phase("evaluate", whole=True), self.checkpoints.evaluating():
            return super().evaluate(*args, **kwargs)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        mode = self._mode
        own = self.monitor.drain(mode) | self.anchors.drain(mode)
        if mode == "train":
            own |= self.clock.drain()
        self._metrics[mode].update({name: [value] for name, value in own.items()})
        super().log(logs, start_time)


class GRPOExtTrainer(GRPOExtMixin, GRPOTrainer):
    """`trl.GRPOTrainer` with everything of `GRPOExtMixin`. Takes the same arguments, and a `GRPOExtConfig` as `args`."""


class _RunEvents(TrainerCallback):
    """What the trainer must learn from its own loop: where training, an epoch and an optimizer step begin and end."""

    def __init__(self, trainer: GRPOExtMixin):
        self._trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # A checkpoint may have been loaded by now; DeepSpeed does it past `_load_from_checkpoint`.
        self._trainer.mark_weights_changed()
        self._trainer.anchors.train_begins()
        self._trainer.monitor.train_begins()
        self._trainer.guards.train_begins()
        self._trainer.clock.train_begins()
        self._trainer._attach_prob_diff()
        self._trainer.checkpoints.train_begins()

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._trainer.anchors.position.epoch_begins()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._trainer.clock.steps.begin(state.num_input_tokens_seen)
        self._trainer.anchors.position.window_begins()
        self._trainer.checkpoints.window_begins()

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._trainer.clock.optimizer_stepped()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._trainer.clock.steps.end(state.num_input_tokens_seen)
        self._trainer.checkpoints.step_ends()
        report = self._trainer.monitor.close(state.global_step)
        self._trainer.guards.step_ended(report.metrics if report is not None else None)


def _check_has_tokenizer(model: str) -> None:
    """A local model directory must bring the tokenizer that nobody passed."""
    if not os.path.isdir(model):
        return
    names = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt", "processor_config.json")
    if not any(os.path.exists(os.path.join(model, name)) for name in names):
        raise ValueError(
            f"The model directory {model!r} holds no tokenizer ({', '.join(names[:3])} ...) and no processing_class was given. "
            "Save one there with tokenizer.save_pretrained(...), or pass processing_class=tokenizer."
        )
