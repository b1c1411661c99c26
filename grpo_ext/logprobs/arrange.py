"""Slices fresh from generation: rows of like length or of one prompt together, padding cut off, tokens counted. Knows the trainer."""

from collections.abc import Sequence
from typing import Any

import torch

from grpo_ext.batch.padding import order_by_length, token_counts, trim
from grpo_ext.batch.rollouts import Rows, is_multimodal, loss_mask, rearrange
from grpo_ext.logprobs.neutral import grouping_obstacle, trimming_obstacle
from grpo_ext.logprobs.sharing import SharedPrompts
from grpo_ext.logprobs.window import Use, cells
from grpo_ext.notices import Notices


class Arranger:
    """Groups, trims and counts; says once where it must not. Multimodal slices keep TRL's order and width."""

    def __init__(self, trainer: Any, notices: Notices, sharing: SharedPrompts | None = None):
        self._trainer, self._notices, self._sharing = trainer, notices, sharing
        self._real = self._processed = 0.0  # tokens of the slices trained on, all ranks
        self._share: dict[str, float] = {}

    def arrange(self, slices: Sequence[Rows], remaining: Sequence[Use]) -> list[Rows]:
        """The slices of a generation batch as they will be used; `remaining` tells which of them share their windows."""
        if not is_multimodal(slices[0]) and self._groups(len(slices)):
            slices = rearrange(slices, cells(remaining, len(slices)), self._order)
        return self.trimmed(slices)

    def trimmed(self, slices: Sequence[Rows]) -> list[Rows]:
        """Each slice cut to its own longest prompt and completion, its loss tokens counted."""
        width = slices[0]["prompt_ids"].size(1) + slices[0]["completion_ids"].size(1)
        trimmed = list(slices)
        if not is_multimodal(slices[0]):
            obstacle = trimming_obstacle(self._trainer, width)
            if obstacle is None:
                trimmed = [trim(rows, self._trainer.pad_to_multiple_of) for rows in slices]
            else:
                self._notices.once("trimming", f"Padding is not cut: {obstacle}")
        self.count_tokens(trimmed)
        return trimmed

    def _groups(self, n_slices: int) -> bool:
        wanted = self._trainer._setting("group_rollouts_by_length")
        if wanted is False or n_slices == 1:
            return False
        obstacle = grouping_obstacle(self._trainer, asked_for=bool(wanted))
        if obstacle is not None:
            self._notices.once("grouping", f"Rollouts are not grouped by length: {obstacle}")
        return obstacle is None

    def _order(self, slices: Sequence[Rows]) -> list[int]:
        by_length = order_by_length(slices)
        return self._sharing.order(slices, by_length) if self._sharing and self._sharing.on else by_length

    def count_tokens(self, slices: Sequence[Rows]) -> None:
        """One sum over ranks: each slice's weight in the exact means, its real tokens, and how much of it is padding."""
        training = self._trainer.model.training
        shared = training and self._sharing and self._sharing.on and not is_multimodal(slices[0])
        counted = self._sharing.token_counts(slices) if shared else [token_counts([rows]) for rows in slices]
        losses = [loss_mask(rows).sum() for rows in slices]
        counts = torch.stack(
            [torch.stack([loss, *map(loss.new_tensor, each)]) for loss, each in zip(losses, counted, strict=True)]
        )
        for rows, (loss, real, processed) in zip(
            slices, self._trainer.accelerator.reduce(counts, reduction="sum"), strict=True
        ):
            rows["loss_tokens"], rows["real_tokens"] = loss, real
            if training:
                self._real += float(real)
                self._processed += float(processed)

    def drain(self) -> dict[str, float]:
        """Share of real tokens, prompts included (shared ones once), of the slices arranged since the last call, or of those before."""
        real, processed = self._real, self._processed
        self._real = self._processed = 0.0
        if processed:
            self._share = {"perf/real_token_share": real / processed}
        return self._share

    def state_dict(self) -> dict[str, Any]:
        return {"real": self._real, "processed": self._processed, "share": self._share}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._real, self._processed, self._share = state["real"], state["processed"], state["share"]
