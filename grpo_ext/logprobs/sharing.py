"""Rows or trees: where trees can be, where they are cheaper, and a first look at whether both say the same. Knows the trainer.

Every decision is taken on values summed (costs) or maximised (the first look) over ranks, so all ranks take the same branch.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import accumulate
from typing import Any

import torch

from grpo_ext import _trl
from grpo_ext.batch.costs import Costs
from grpo_ext.batch.groups import Inputs, cut_groups, group_order, line_tokens
from grpo_ext.batch.micro_batches import Chunks, cut
from grpo_ext.batch.padding import token_counts
from grpo_ext.batch.rollouts import Rows, join, n_rows
from grpo_ext.logprobs.neutral import longest_tree_row, sharing_obstacle
from grpo_ext.logprobs.tree_forward import ATTENTIONS, Scored, score_as_trees
from grpo_ext.notices import Notices

# How far the log-probs of trees and of rows may be apart, in nats: the largest difference in float32; the mean where products are
# rounded to half precision or TF32. In bfloat16 trees were off by 4e-3 on average, two paddings of the same rows by 1e-2, and rows
# with a wrong context by 0.4 and more.
LARGEST, ROUNDED_MEAN = 1e-4, 5e-2
INFINITE = float("inf")


class SharedPrompts:
    """What `shared_prompt` asks for, as far as this trainer and its model allow."""

    def __init__(self, trainer: Any, notices: Notices):
        self._trainer, self._notices = trainer, notices
        self._wanted: bool | str = trainer._setting("shared_prompt")
        self._on: bool | None = None if self._wanted else False
        self._compared = False

    @property
    def on(self) -> bool:
        """Whether trees are possible at all; found out at the first use, when the model is what it is in training."""
        if self._on is None:
            obstacle = sharing_obstacle(self._trainer)
            if obstacle is None:
                config = self._trainer.model.config
                self._costs = Costs.of(config, dense=_trl.attention_of(self._trainer.model) == "eager")
                self._longest = longest_tree_row(config)
                _trl.serve_trees()
                self._on = True
            else:
                self._refuse(obstacle)
        return bool(self._on)

    def _refuse(self, why: str) -> None:
        self._on = False
        self._notices.once("sharing", f"Prompts are not shared: {why}")

    def head(self) -> AbstractContextManager:
        """Around a forward, be it of rows: the head projects labelled positions only."""
        return _trl.labelled_positions_only() if self.on else nullcontext()

    # ---- a pass ------------------------------------------------------------------------------------------------------
    def lines(self, method: Any, model: Any, rows: Inputs, max_rows: int | None, max_tokens: int | None) -> Chunks | None:
        """How to cut the rows of a pass into lines of trees; None where they stay rows. A collective."""
        if not self.on or self._attention(model) not in ATTENTIONS:
            return None
        lengths = rows.lengths
        chunks = cut_groups(rows.groups, lengths, max_rows, max_tokens)
        trees = self._cheaper([self._costs_of(rows, cut(lengths, max_rows, max_tokens), chunks)])[0]
        return chunks if trees and self._agree(method, model, rows) else None

    def by_trees(self, method: Callable[..., Scored], model: Any) -> Callable[..., Scored]:
        """`method` by forwards of `model` over trees, to be called like `method`."""
        return partial(score_as_trees, method, attention=self._attention(model), dtype=self._trainer.model.dtype)

    def _attention(self, model: Any) -> str | None:
        return _trl.attention_of(self._trainer.accelerator.unwrap_model(model))

    # ---- which is cheaper --------------------------------------------------------------------------------------------
    def _costs_of(self, rows: Inputs, as_rows: Chunks | None, as_trees: Chunks | None) -> tuple[float, float]:
        """(as rows, as trees) in multiply-adds on this rank; infinite where trees cannot be."""
        lengths = rows.lengths
        possible = rows.is_regular and rows.ids.size(1) <= self._longest
        return self._costs.rows(lengths, as_rows), self._costs.trees(rows.groups, lengths, as_trees) if possible else INFINITE

    def _cheaper(self, costs: Sequence[tuple[float, float]]) -> list[bool]:
        """For each (rows, trees) whether trees are taken. A collective."""
        sums = self._summed(costs)
        if any(trees == INFINITE for _, trees in sums):
            longer = f"rows are longer than {self._longest:g} tokens, this model's window or what its rotary frequencies were trained for"
            self._notices.once(
                "irregular",
                "Some prompts are not shared: a prompt is empty, or an attention mask has holes"
                f"{f', or {longer}' if self._longest < INFINITE else ''}.",
            )
        return [trees < (INFINITE if self._wanted is True else rows) for rows, trees in sums]

    def _summed(self, costs: Sequence[tuple[float, float]]) -> list[list[float]]:
        accelerator = self._trainer.accelerator
        return accelerator.reduce(torch.tensor(costs, device=accelerator.device), reduction="sum").tolist()

    # ---- slices ------------------------------------------------------------------------------------------------------
    def order(self, slices: Sequence[Rows], by_length: list[int]) -> list[int]:
        """The order of the joined rows of slices that costs least: groups together, or `by_length`. A collective."""
        rows, sizes = Inputs.of(join(slices)), [n_rows(each) for each in slices]
        orders = [by_length, group_order(rows.groups, sizes)]
        parts = [[order[stop - size : stop] for size, stop in zip(sizes, accumulate(sizes), strict=True)] for order in orders]
        costs = [self._costs_of(rows, chunk, chunk) for part in parts for chunk in (Chunks((tuple(p),)) for p in part)]
        sums = self._summed(costs)
        least = [trees if self._wanted is True and trees < INFINITE else min(rows, trees) for rows, trees in sums]
        return orders[1] if sum(least[len(sizes) :]) < sum(least[: len(sizes)]) else by_length

    def token_counts(self, slices: Sequence[Rows]) -> list[tuple[int, int]]:
        """(real, processed) tokens of each slice as it will be used; those of trees are real once. A collective."""
        inputs = [Inputs.of(rows) for rows in slices]
        trees = self._cheaper([self._costs_of(rows, None, None) for rows in inputs])
        return [
            line_tokens(rows.groups, rows.lengths) if shared else token_counts([each])
            for each, rows, shared in zip(slices, inputs, trees, strict=True)
        ]

    # ---- a first look ------------------------------------------------------------------------------------------------
    def _agree(self, method: Any, model: Any, rows: Inputs) -> bool:
        """Whether trees give the log-probs of rows: looked at once in a run, on at most three rows. A collective."""
        if self._compared:
            return self.on
        few = rows.few()
        with torch.no_grad(), _at_rest(model):
            plain, shared = (score(model, few.ids, few.mask, few.T)[0] for score in (method, self.by_trees(method, model)))
        apart = (plain - shared).abs()[few.mask[:, -few.T :] > 0].double()
        rounded = self._is_rounded()
        found = float((apart.mean() if rounded else apart.max()).nan_to_num(nan=INFINITE)) if apart.numel() else -1.0
        found = float(self._trainer.accelerator.gather(torch.tensor([found], device=apart.device)).max())
        self._compared = found >= 0
        limit = ROUNDED_MEAN if rounded else LARGEST
        if found > limit:
            self._refuse(
                f"on the first rows of this run their log-probs are {found:.1e} nats off those of plain rows, where {limit:.0e} "
                "would be rounding, so this model does not attend as a tree asks. Set shared_prompt=False."
            )
        return self.on

    def _is_rounded(self) -> bool:
        trainer = self._trainer
        full = trainer.model.dtype == torch.float32 and trainer.accelerator.mixed_precision == "no"
        return not full or torch.get_float32_matmul_precision() != "highest"


@contextmanager
def _at_rest(model: Any) -> Iterator[None]:
    """Within, no part of `model` is in training mode: two forwards of the same rows are the same, dropout or not."""
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True
