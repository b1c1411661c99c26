"""When old log-probs are taken, and from where: the window check at work inside a trainer.

`Anchors` follows the training loop micro-step by micro-step. The rules are pure (`window`, `ratio`, `metrics`, and
`grpo_ext.batch`); here they meet the trainer's buffered slices. What a slice knows about itself is kept in the slice, as
tensors, so that it survives wherever the slice does:

    row_id                    (B,)    row of the generation batch, over all ranks, in the order of generation
    loss_tokens               ()      tokens under the loss mask, over all ranks
    real_tokens               ()      tokens that a forward needs, over all ranks: none of padding, of trees each prompt once
    generated_version         ()      optimizer steps taken when the rollouts were generated
    used                      ()      there once a loss was computed over the slice
    old_per_token_logps       (B, T)  the anchor, once it is there, and with it
    anchor_version            ()      ... the version it belongs to
    importance_sampling_ratio (B, T) or (B, 1)  ... the engine correction
    generation_logps          (B, T)  log-probs that the KL in the reward computed at generation, until they become the anchor
    due_logps, due_rows       (B, T), ()  what `old_logps_budget` has computed of it so far

Ranks hold slices of equal size and see the same versions, so every branch below is taken by all of them alike.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import torch
from trl.models.utils import disable_gradient_checkpointing

from grpo_ext.batch.padding import stack
from grpo_ext.batch.rollouts import FORWARD_KEYS, ROW_ID, Rows, is_multimodal, loss_mask, n_rows, take
from grpo_ext.logprobs.arrange import Arranger
from grpo_ext.logprobs.forward import Passes, scoring_wrapped
from grpo_ext.logprobs.metrics import ExactMeans
from grpo_ext.logprobs.position import LoopPosition
from grpo_ext.logprobs.ratio import RatioStats, engine_ratio, ratio_metrics, ratio_stats
from grpo_ext.logprobs.sharing import SharedPrompts
from grpo_ext.logprobs.window import RowCounts, Use, due, portions, rows_now, too_old
from grpo_ext.notices import Notices

OLD, RATIO, MU = "old_per_token_logps", "importance_sampling_ratio", "sampling_per_token_logps"
GIVEN = "generation_logps"


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
        notices = Notices()
        self.position = LoopPosition(trainer)
        sharing = SharedPrompts(trainer, notices)
        self.passes = Passes(trainer, notices, sharing)
        self.arranger = Arranger(trainer, notices, sharing)
        self._fresh = self._followed = False

    def train_begins(self) -> None:
        """Rollouts that an earlier `train()` left over belong to another policy's versions."""
        self.trainer._buffered_inputs = None
        self.position.train_begins()

    # ---- generation ------------------------------------------------------------------------------------------------
    def received(self, rows: Rows) -> Rows:
        """Rollouts as they come from generation: rows get their identity and version."""
        if self.mode == "rollout" and rows.get(MU) is None:
            raise ValueError(
                "old_logps='rollout' takes the log-probs of the engine, but these rollouts came without any. Return "
                "'logprobs' from rollout_func, or set old_logps='window'."
            )
        n, device = n_rows(rows), rows["prompt_ids"].device
        rows[ROW_ID] = torch.arange(n, device=device) + n * self.trainer.accelerator.process_index
        rows["generated_version"] = torch.tensor(self.position.version)
        self._fresh = self.trainer.model.training
        actor = self.passes.scored().actor
        if self.trainer.kl_in_reward is not None:
            rows.pop("ref_per_token_logps", None)  # the loss has no KL term
        if self._fresh:
            if actor is not None:
                rows[GIVEN] = actor
            self.trainer.monitor.generation = self.trainer.generations.number("train")
        return rows

    # ---- before a micro-step ---------------------------------------------------------------------------------------
    def prepared(self, current: Rows) -> Rows:
        """The slice about to be used: trimmed and grouped if it is new, and whatever is due before it computed."""
        trainer, position = self.trainer, self.position
        if not trainer.model.training:
            return self.arranger.trimmed([current])[0]
        if self._fresh:
            self._fresh = False
            trainer._buffered_inputs = self.arranger.arrange(trainer._buffered_inputs, position.remaining())
            current = trainer._buffered_inputs[trainer._step % trainer.args.steps_per_generation]
            if GIVEN in current:
                self._take_given(trainer._buffered_inputs)
            elif self.mode == "always":
                self._compute([(i, 0, n_rows(rows)) for i, rows in enumerate(trainer._buffered_inputs)])
        if OLD in current and too_old(int(current["anchor_version"]), position.version, self.max_age):
            del current[OLD]
            current.pop(RATIO, None)
        self._follow(position.remaining())
        position.advance()
        self._followed = True
        return current

    # ---- what a step would make too late ---------------------------------------------------------------------------
    def _follow(self, remaining: Sequence[Use]) -> None:
        """Compute what is due, all of it if this micro-step ends in an optimizer step, else as much as the budget allows."""
        slices, deadline = self.trainer._buffered_inputs, self.position.steps_now
        if self.mode == "rollout" or not (deadline or self.budget):
            return
        unused = {use.slice for use in remaining} - {number for number, rows in enumerate(slices) if "used" in rows}
        wanted = self._due(remaining, set(range(len(slices))) - unused)
        if deadline and int(slices[0]["generated_version"]) == self.position.version:
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
        position = self.position
        age = position.version - int(self.trainer._buffered_inputs[0]["generated_version"])
        return due(remaining, settled, position.steps_left, self.max_age, age, sized=position.loop.epoch is not None)

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
                    self._anchor(rows, rows["due_logps"])

    def _take_given(self, slices: Sequence[Rows]) -> None:
        """Log-probs that were computed at generation are the anchors."""
        for rows in slices:
            self.counts.recomputed += n_rows(rows)
            self._anchor(rows, rows.pop(GIVEN))

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

        def handing_over(score: Any) -> Any:
            def hand_over(scored: Any, *args: Any, **kwargs: Any) -> Any:
                result = score(scored, *args, **kwargs)
                fits = result[0] is not None and result[0].shape == rows["completion_ids"].shape
                if scored is model and fits and OLD not in rows:
                    self._anchor_free(rows, result[0].detach())
                return result

            return hand_over

        rows["used"] = torch.tensor(True)
        if "loss_tokens" not in rows:  # rows from elsewhere
            self.arranger.count_tokens([rows])
        if mode == "train":
            trainer.clock.trains_on(rows)
        rows_everywhere = n_rows(rows) * trainer.accelerator.num_processes
        with (
            scoring_wrapped(trainer, handing_over),
            self.means[mode].collecting(trainer._metrics[mode], float(rows["loss_tokens"]), rows_everywhere),
        ):
            yield

    def _anchor_free(self, rows: Rows, logps: torch.Tensor) -> None:
        version = self.position.version
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
        version, generated = self.position.version, int(rows["generated_version"])
        rows[OLD], rows["anchor_version"] = logps, torch.tensor(version)
        rows.pop("due_logps", None)
        rows.pop("due_rows", None)
        mu, mask = rows.get(MU), loss_mask(rows)
        if self.mode == "rollout" and mu is not None and not too_old(generated, version, self.max_age):
            rows[OLD] = torch.where(torch.isfinite(mu), mu, logps).to(logps.dtype)
            rows["anchor_version"] = rows["generated_version"]
        if trainer.use_vllm and trainer.vllm_importance_sampling_correction and mu is not None:
            self._correct(rows, mu, mask)
        if mu is not None and version == generated:
            trainer.monitor.observe(trainer._mode, version, rows | {OLD: logps}, mask, rows.get(RATIO))

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
            metrics |= self.arranger.drain()
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """What is collected between two logs. Rollouts and anchors are the trainer's slices; the position follows from the step."""
        return {
            "means": {mode: means.state_dict() for mode, means in self.means.items()},
            "ratios": {mode: (stats.sums, stats.highs) for mode, stats in self.ratios.items()},
            "counts": asdict(self.counts),
            "followed": self._followed,
            "tokens": self.arranger.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for mode, means in self.means.items():
            means.load_state_dict(state["means"][mode])
        self.ratios = {mode: RatioStats(*stats) for mode, stats in state["ratios"].items()}
        self.counts, self._followed = RowCounts(**state["counts"]), state["followed"]
        self.arranger.load_state_dict(state["tokens"])
