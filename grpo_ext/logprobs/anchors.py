"""When old log-probs are taken, and from where: the window check at work inside a trainer.

`Anchors` follows the training loop micro-step by micro-step. The rules are pure (`window`, `ratio`, `metrics`, and
`grpo_ext.batch`); here they meet the trainer's buffered slices. What a slice knows about itself is kept in the slice, as
tensors, so that it survives wherever the slice does:

    row_id                    (B,)    row of the generation batch, over all ranks, in the order of generation
    loss_tokens               ()      tokens under the loss mask, over all ranks
    generated_version         ()      optimizer steps taken when the rollouts were generated
    old_per_token_logps       (B, T)  the anchor, once it is there, and with it
    used                      ()      there once a loss was computed over the slice
    anchor_version            ()      ... the version it belongs to
    importance_sampling_ratio (B, T) or (B, 1)  ... the engine correction
    due_logps, due_rows       (B, T), ()  what `old_logps_budget` has computed of it so far

Ranks hold slices of equal size and see the same versions, so every branch below is taken by all of them alike.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from accelerate.logging import get_logger
from transformers.trainer_utils import has_length
from trl.models.utils import disable_gradient_checkpointing

from grpo_ext import _trl
from grpo_ext.batch.padding import order_by_length, stack, token_counts, trim
from grpo_ext.batch.rollouts import FORWARD_KEYS, ROW_ID, Rows, is_multimodal, loss_mask, n_rows, rearrange, take
from grpo_ext.logprobs import forward
from grpo_ext.logprobs.metrics import ExactMeans
from grpo_ext.logprobs.neutral import grouping_obstacle, trimming_obstacle
from grpo_ext.logprobs.ratio import RatioStats, engine_ratio, ratio_metrics, ratio_stats
from grpo_ext.logprobs.window import (
    Loop,
    RowCounts,
    Use,
    cells,
    due,
    ending_now,
    epoch_start,
    portions,
    rows_now,
    too_old,
    uses,
)

logger = get_logger(__name__)  # the main process speaks for all

OLD, RATIO, MU = "old_per_token_logps", "importance_sampling_ratio", "sampling_per_token_logps"


class Anchors:
    """Gives every rollout its old log-probs, at least cost. One per trainer, which calls it at the places named below."""

    def __init__(self, trainer: Any):
        self.trainer = trainer
        self.mode: str = trainer._setting("old_logps")
        self.budget: int | None = trainer._setting("old_logps_budget")
        self.max_age: int | None = trainer._setting("old_logps_max_age")
        if self.mode == "rollout" and not trainer.use_vllm and trainer.rollout_func is None:
            raise ValueError(
                "old_logps='rollout' takes the log-probs of the engine for the old policy's, but use_vllm=False and no "
                "rollout_func returns any. Set use_vllm=True, or old_logps='window'."
            )
        per_sequence = trainer.importance_sampling_level == "sequence"
        self.means = {mode: ExactMeans(per_sequence) for mode in ("train", "eval")}
        self.ratios: dict[str, RatioStats] = {}
        self.counts = RowCounts()
        self.real_tokens = self.processed_tokens = 0.0  # of the slices trained on, all ranks
        self.position = 0  # micro-step of the epoch about to be taken
        self.in_window = 0  # micro-steps of the current window that are over
        self._generating = self._fresh = self._resuming = self._followed = False
        self._said: set[str] = set()
        self._absolute: dict[int, bool] = {}

    # ---- where the loop stands: told by callbacks ------------------------------------------------------------------
    @property
    def loop(self) -> Loop:
        args, loader = self.trainer.args, self.trainer.callback_handler.train_dataloader
        epoch = len(loader) if has_length(loader) else None
        return Loop(args.gradient_accumulation_steps, args.steps_per_generation, self.trainer.num_iterations, epoch)

    def train_begins(self) -> None:
        """Rollouts that an earlier `train()` left over belong to another policy's versions."""
        self.trainer._buffered_inputs = None
        self._resuming = True

    def epoch_begins(self) -> None:
        state, args = self.trainer.state, self.trainer.args
        start = epoch_start(state.global_step, self.loop, state.max_steps, args.ignore_data_skip)
        self.position, self._resuming = start if self._resuming else 0, False

    def window_begins(self) -> None:
        self.in_window = 0

    # ---- generation ------------------------------------------------------------------------------------------------
    @contextmanager
    def generating(self) -> Iterator[None]:
        """Within, TRL computes neither the old pass nor the engine's ratio; the reference pass stays."""
        trainer = self.trainer
        held, trainer.vllm_importance_sampling_correction = trainer.vllm_importance_sampling_correction, False
        self._generating = True
        try:
            yield
        finally:
            trainer.vllm_importance_sampling_correction, self._generating = held, False

    def received(self, rows: Rows) -> Rows:
        """Rollouts as they come from generation: rows get their identity and version."""
        if self.mode == "rollout" and rows.get(MU) is None:
            raise ValueError(
                "old_logps='rollout' takes the log-probs of the engine, but these rollouts came without any. Return "
                "'logprobs' from rollout_func, or set old_logps='window'."
            )
        n, device = n_rows(rows), rows["prompt_ids"].device
        rows[ROW_ID] = torch.arange(n, device=device) + n * self.trainer.accelerator.process_index
        rows["generated_version"] = torch.tensor(self.trainer.state.global_step)
        self._fresh = self.trainer.model.training
        return rows

    # ---- every pass ------------------------------------------------------------------------------------------------
    def score(self, method: Any, model: Any, *args: Any, **kwargs: Any) -> forward.Scored | tuple[None, None, None]:
        """`_get_per_token_logps_and_entropies`: nothing for the old pass of a generation, micro-batches where no grad flows."""
        reference = self._is_reference(model)
        if self._generating and not reference:
            return None, None, None
        with ExitStack() as around:
            if self._has_absolute_positions(model):
                around.enter_context(forward.positions_passed(model))
            if self._generating:
                around.enter_context(self.trainer.phase_times.phase("ref_logps"))
            if torch.is_grad_enabled() or not forward.is_plain(kwargs):
                return method(model, *args, **kwargs)
            return self._micro_batched(method, reference, model, *args, **kwargs)

    def _micro_batched(
        self,
        method: Any,
        reference: bool,
        model: Any,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        **kwargs: Any,
    ) -> forward.Scored:
        trainer = self.trainer
        rows = trainer._setting("ref_logps_micro_batch_size" if reference else "logps_micro_batch_size")
        tokens = trainer._setting("logps_max_tokens")
        kwargs = {key: value for key, value in kwargs.items() if value is not None and key != "compute_aux_loss"}
        return forward.micro_batched(
            method,
            model,
            input_ids,
            attention_mask,
            logits_to_keep,
            max_rows=rows or (None if tokens else batch_size),
            max_tokens=tokens,
            trims=trimming_obstacle(trainer, input_ids.size(1)) is None,
            multiple=trainer.pad_to_multiple_of,
            accelerator=trainer.accelerator,
            on_alone=self._alone,
            **kwargs,
        )

    def _is_reference(self, model: Any) -> bool:
        trainer = self.trainer
        if trainer.ref_model is not None:
            return model is trainer.ref_model
        return _trl.is_reference_pass(trainer.accelerator.unwrap_model(trainer.model))

    def _has_absolute_positions(self, model: Any) -> bool:
        if id(model) not in self._absolute:
            self._absolute[id(model)] = forward.has_absolute_positions(self.trainer.accelerator.unwrap_model(model))
        return self._absolute[id(model)]

    # ---- before a micro-step ---------------------------------------------------------------------------------------
    def prepared(self, current: Rows) -> Rows:
        """The slice about to be used: trimmed and grouped if it is new, and whatever is due before it computed."""
        trainer = self.trainer
        if not trainer.model.training:
            rows = self._trimmed([current])[0]
            self._count_tokens([rows])
            return rows
        if self._fresh:
            self._fresh = False
            self._arrange()
            current = trainer._buffered_inputs[trainer._step % trainer.args.steps_per_generation]
        if OLD in current and too_old(int(current["anchor_version"]), trainer.state.global_step, self.max_age):
            del current[OLD]
            current.pop(RATIO, None)
        self._follow(self._remaining())
        self._followed = True
        self.position += 1
        self.in_window += 1
        return current

    def _remaining(self) -> list[Use]:
        """Uses left of the buffered slices, the current micro-step's first; what the loop says wins over what was foreseen."""
        trainer, loop = self.trainer, self.loop
        left = trainer.current_gradient_accumulation_steps - self.in_window
        remaining = uses(loop, self.position, trainer._step % loop.lifetime, window_left=max(left, 1))
        return ending_now(remaining) if trainer.accelerator.sync_gradients else remaining

    def _arrange(self) -> None:
        """Slices fresh from generation: rows of like length together, padding cut, tokens counted."""
        trainer = self.trainer
        slices: list[Rows] = trainer._buffered_inputs
        if not is_multimodal(slices[0]) and self._groups():
            slices = rearrange(slices, cells(self._remaining(), len(slices)), order_by_length)
        slices = self._trimmed(slices)
        self._count_tokens(slices)
        trainer._buffered_inputs = slices
        if self.mode == "always":
            self._compute([(number, 0, n_rows(rows)) for number, rows in enumerate(slices)])

    def _groups(self) -> bool:
        wanted, obstacle = self.trainer._setting("group_rollouts_by_length"), None
        if wanted is not False and len(self.trainer._buffered_inputs) > 1:
            obstacle = grouping_obstacle(self.trainer, asked_for=bool(wanted))
            if obstacle:
                self._say("grouping", f"Rollouts are not grouped by length: {obstacle}")
        return wanted is not False and obstacle is None

    def _trimmed(self, slices: Sequence[Rows]) -> list[Rows]:
        if is_multimodal(slices[0]):
            return list(slices)
        width = slices[0]["prompt_ids"].size(1) + slices[0]["completion_ids"].size(1)
        obstacle = trimming_obstacle(self.trainer, width)
        if obstacle:
            self._say("trimming", f"Padding is not cut: {obstacle}")
            return list(slices)
        return [trim(rows, self.trainer.pad_to_multiple_of) for rows in slices]

    def _count_tokens(self, slices: Sequence[Rows]) -> None:
        """One sum over ranks for all slices: the weight of each in the exact means, and how much of them is padding."""
        counts = [loss_mask(rows).sum() for rows in slices]
        counts += [counts[0].new_tensor(count) for count in token_counts(slices)]
        *counts, real, processed = self.trainer.accelerator.reduce(torch.stack(counts), reduction="sum")
        for rows, count in zip(slices, counts, strict=True):
            rows["loss_tokens"] = count
        if self.trainer.model.training:
            self.real_tokens += float(real)
            self.processed_tokens += float(processed)

    # ---- what a step would make too late ---------------------------------------------------------------------------
    def _follow(self, remaining: Sequence[Use]) -> None:
        """Compute what is due, all of it if this micro-step ends in an optimizer step, else as much as the budget allows."""
        trainer, slices = self.trainer, self.trainer._buffered_inputs
        deadline = trainer.accelerator.sync_gradients
        if self.mode == "rollout" or not (deadline or self.budget):
            return
        unused = {use.slice for use in remaining} - {number for number, rows in enumerate(slices) if "used" in rows}
        wanted = self._due(remaining, set(range(len(slices))) - unused)
        if deadline and int(slices[0]["generated_version"]) == trainer.state.global_step:
            self.counts.due += sum(n_rows(slices[number]) for number in wanted)
        wanted = [number for number in wanted if OLD not in slices[number]]
        pending = [(number, int(slices[number].get("due_rows", 0)), n_rows(slices[number])) for number in wanted]
        if is_multimodal(slices[0]):  # cannot be cut by rows: whole slices, as many as the budget opens
            whole = rows_now(sum(rows for _, _, rows in pending), self.budget, deadline)
            self._compute([(number, 0, rows) for i, (number, _, rows) in enumerate(pending) if i * rows < whole])
            return
        now = rows_now(sum(rows - done for _, done, rows in pending), self.budget, deadline)
        self._compute(portions(pending, now))

    def _due(self, remaining: Sequence[Use], settled: set[int]) -> list[int]:
        trainer = self.trainer
        version = trainer.state.global_step
        generated = int(trainer._buffered_inputs[0]["generated_version"])
        steps_left, sized = trainer.state.max_steps - version, self.loop.epoch is not None
        return due(remaining, settled, steps_left, self.max_age, version - generated, sized)

    def _compute(self, parts: Sequence[tuple[int, int, int]]) -> None:
        """Old log-probs of rows (slice, start, stop) by a forward of their own, at the current version."""
        if not parts:
            return
        slices = self.trainer._buffered_inputs
        with self.trainer.phase_times.phase("old_logps"):
            for (number, start, stop), logps in zip(parts, self._forward(parts), strict=True):
                rows = slices[number]
                held = rows.setdefault("due_logps", logps.new_zeros(rows["completion_ids"].shape))
                held[start:stop] = logps
                rows["due_rows"] = torch.tensor(stop)
                self.counts.recomputed += stop - start
                if stop == n_rows(rows):
                    rows.pop("due_rows")
                    self._anchor(rows, rows.pop("due_logps"))

    def _forward(self, parts: Sequence[tuple[int, int, int]]) -> list[torch.Tensor]:
        trainer, slices = self.trainer, self.trainer._buffered_inputs
        with torch.no_grad(), disable_gradient_checkpointing(trainer.model, trainer.args.gradient_checkpointing_kwargs):
            if is_multimodal(slices[0]):
                return [self._logps(slices[number]) for number, _, _ in parts]
            chosen = [take(slices[number], range(start, stop)) for number, start, stop in parts]
            keys = {"prompt_ids", "prompt_mask", "completion_ids", "completion_mask", *FORWARD_KEYS}
            together = self._logps(stack([{key: value for key, value in rows.items() if key in keys} for rows in chosen]))
        split = together.split([n_rows(rows) for rows in chosen])
        return [logps[:, : rows["completion_ids"].size(1)] for logps, rows in zip(split, chosen, strict=True)]

    def _logps(self, rows: Rows) -> torch.Tensor:
        trainer = self.trainer
        ids = torch.cat([rows["prompt_ids"], rows["completion_ids"]], dim=1)
        mask = torch.cat([rows["prompt_mask"], rows["completion_mask"]], dim=1)
        further = {key: rows[key] for key in FORWARD_KEYS if rows.get(key) is not None}
        width, batch_size = rows["completion_ids"].size(1), trainer.args.per_device_train_batch_size
        score = trainer._get_per_token_logps_and_entropies
        return score(trainer.model, ids, mask, width, batch_size=batch_size, **further)[0]

    # ---- the loss: what it computes is free ------------------------------------------------------------------------
    @contextmanager
    def of_loss(self, model: Any, rows: Rows) -> Iterator[None]:
        """For the duration of a loss over `rows`: its log-probs anchor them if nothing does yet, and its metrics are weighed.

        TRL reads `old_per_token_logps` and `importance_sampling_ratio` after the forward, so both can be filled in by then. The
        method is wrapped on the instance, which leaves a user's override of it, or of `_compute_loss`, as it is.
        """
        trainer, mode = self.trainer, self.trainer._mode
        score = trainer._get_per_token_logps_and_entropies
        outer = trainer.__dict__.get("_get_per_token_logps_and_entropies")

        def hand_over(scored: Any, *args: Any, **kwargs: Any) -> Any:
            result = score(scored, *args, **kwargs)
            if scored is model and OLD not in rows and result[0].shape == rows["completion_ids"].shape:
                self._anchor_free(rows, result[0].detach())
            return result

        trainer._get_per_token_logps_and_entropies = hand_over
        rows["used"] = torch.tensor(True)
        if "loss_tokens" not in rows:  # rows from elsewhere
            self._count_tokens([rows])
        rows_everywhere = n_rows(rows) * trainer.accelerator.num_processes
        try:
            with self.means[mode].collecting(trainer._metrics[mode], float(rows["loss_tokens"]), rows_everywhere):
                yield
        finally:
            del trainer._get_per_token_logps_and_entropies
            if outer is not None:
                trainer._get_per_token_logps_and_entropies = outer

    def _anchor_free(self, rows: Rows, logps: torch.Tensor) -> None:
        version = self.trainer.state.global_step
        generated = int(rows.setdefault("generated_version", torch.tensor(version)))
        if self.trainer.model.training:
            if version == generated or (self.mode == "rollout" and not too_old(generated, version, self.max_age)):
                self.counts.free += n_rows(rows)
            else:
                self.counts.reanchored += n_rows(rows)
        self._anchor(rows, logps)

    def _anchor(self, rows: Rows, logps: torch.Tensor) -> None:
        """`logps` (B, T), of the current version, become the anchor; in mode "rollout" log mu does while it is young enough."""
        trainer = self.trainer
        version, generated = trainer.state.global_step, int(rows["generated_version"])
        rows[OLD], rows["anchor_version"] = logps, torch.tensor(version)
        mu, mask = rows.get(MU), loss_mask(rows)
        if mu is not None and version == generated:
            trainer.monitor.observe(trainer._mode, mu, logps, mask, trainer.accelerator.reduce, trainer.accelerator.gather)
        if self.mode == "rollout" and mu is not None and not too_old(generated, version, self.max_age):
            rows[OLD] = torch.where(torch.isfinite(mu), mu, logps).to(logps.dtype)
            rows["anchor_version"] = rows["generated_version"]
        if trainer.use_vllm and trainer.vllm_importance_sampling_correction and mu is not None:
            self._correct(rows, mu, mask)

    def _correct(self, rows: Rows, mu: torch.Tensor, mask: torch.Tensor) -> None:
        trainer = self.trainer
        low, high = trainer.vllm_importance_sampling_clip_min, trainer.vllm_importance_sampling_clip_max
        found = engine_ratio(rows[OLD], mu, mask, trainer.vllm_importance_sampling_mode, low, high)
        rows[RATIO] = found.ratio
        stats = ratio_stats(rows[OLD], mu, mask, found).over_ranks(trainer.accelerator.reduce, trainer.accelerator.gather)
        mode = trainer._mode
        self.ratios[mode] = self.ratios[mode] + stats if mode in self.ratios else stats

    # ---- logs ------------------------------------------------------------------------------------------------------
    def drain(self, mode: str) -> dict[str, float]:
        """Metrics since the last log: exact means, the engine ratio, rows by origin (over all ranks)."""
        metrics = self.means[mode].drain()
        if mode in self.ratios:
            metrics |= ratio_metrics(self.ratios.pop(mode), self.trainer.vllm_importance_sampling_mode)
        if mode == "train" and self._followed:
            self._followed, ranks = False, self.trainer.accelerator.num_processes
            metrics |= {f"old_logps/rows_{name}": float(rows * ranks) for name, rows in self.counts.drain().items()}
            if self.processed_tokens:
                metrics["perf/real_token_share"] = self.real_tokens / self.processed_tokens
                self.real_tokens = self.processed_tokens = 0.0
        return metrics

    def _alone(self, n: int) -> None:
        if n:
            self._say(
                "alone",
                f"{n} row(s) are longer than logps_max_tokens={self.trainer._setting('logps_max_tokens')}; such a row runs in "
                "a forward of its own. Raise logps_max_tokens to the longest prompt plus completion if memory allows.",
            )

    def _say(self, topic: str, message: str) -> None:
        if topic not in self._said:
            self._said.add(topic)
            logger.warning(message)
