"""Rows with nothing in them: empty completions, rows without a token to learn from, rewards that cannot be used. Knows the trainer.

What becomes of each stands in docs/rows.md; the arithmetic in `grpo_ext.batch.empty` and `grpo_ext.rewards.usable`. Counts are
of all ranks, for one generation batch.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from grpo_ext.batch.empty import filled, hidden
from grpo_ext.batch.rollouts import Rows, loss_mask
from grpo_ext.notices import Notices
from grpo_ext.rewards.usable import LARGEST, counts, infinite, usable, weighted_sums


class OddRows:
    """Follows a generation through the trainer, which calls it at the places named below. One per trainer."""

    def __init__(self, trainer: Any):
        self._trainer, self._notices = trainer, Notices()
        self._empty: set[int] = set()
        self._first_turn = False

    # ---- completions -----------------------------------------------------------------------------------------------
    @contextmanager
    def generating(self) -> Iterator[None]:
        """For the duration of a generation: empty completions are filled, those of a user's `rollout_func` as well."""
        trainer = self._trainer
        self._empty, self._first_turn = set(), True
        rollout_func = trainer.rollout_func
        if rollout_func is not None:
            trainer.rollout_func = self._filling(rollout_func)
        try:
            yield
        finally:
            trainer.rollout_func = rollout_func

    def first_turn(self, completion_ids: list, logprobs: list | None) -> tuple[list, list | None]:
        """What an engine returned, a token in every row. Turns that follow a tool call may well add nothing to a row."""
        if self._first_turn:
            self._first_turn = False
            completion_ids, logprobs, self._empty = filled(completion_ids, logprobs, self._trainer._tokenizer.eos_token_id)
        return completion_ids, logprobs

    def _filling(self, rollout_func: Callable) -> Callable:
        def filling(prompts: list, trainer: Any) -> dict[str, Any]:
            output = rollout_func(prompts, trainer)
            if not {"completion_ids", "logprobs"} <= output.keys():
                return output  # TRL says what is missing
            ids, logprobs = self.first_turn(output["completion_ids"], output["logprobs"])
            mask = hidden(output.get("env_mask"), ids, self._empty)
            return {**output, "completion_ids": ids, "logprobs": logprobs, **({} if mask is None else {"env_mask": mask})}

        return filling

    def hidden(self, generated: tuple) -> tuple:
        """What `_generate` returned, with the tokens that stand in for nothing kept out of the loss by the tool mask."""
        prompt_ids, completion_ids, tool_mask, *rest = generated
        return prompt_ids, completion_ids, hidden(tool_mask, completion_ids, self._empty), *rest

    # ---- rewards ---------------------------------------------------------------------------------------------------
    def judged(self, rewards_NF: torch.Tensor) -> torch.Tensor:
        """The rewards of all ranks without the values that cannot be used."""
        trainer, mode = self._trainer, self._trainer._mode
        judges = len(trainer.reward_func_names) - (trainer.kl_in_reward is not None)  # the penalty comes last and is none
        rewards = usable(rewards_NF, judges)
        group = trainer.num_generations if mode == "train" else trainer.num_generations_eval
        summed = trainer.multi_objective_aggregation == "sum_then_normalize"
        compared = weighted_sums(rewards, trainer.reward_weights.to(rewards.device)) if summed else rewards
        for name, value in counts(rewards_NF, rewards, compared, group, judges).items():
            trainer._metrics[mode][name].append(value)
        beyond = infinite(rewards_NF[:, :judges]).any(dim=0).tolist()
        for name, found in zip(trainer.reward_func_names, beyond, strict=False):
            if found:
                self._notices.once(
                    name,
                    f"The reward function {name!r} returned an infinite reward, or one beyond {LARGEST:g}. It counts as None: the other functions judge that "
                    "row. Let the function return None where it has no opinion, or a bounded number.",
                )
        return rewards

    # ---- rows as they go into training -----------------------------------------------------------------------------
    def received(self, rows: Rows) -> Rows:
        trainer = self._trainer
        without = int((loss_mask(rows).sum(dim=1) == 0).sum())
        sums = torch.tensor([len(self._empty), without - len(self._empty)], device=rows["prompt_ids"].device)
        empty, masked = trainer.accelerator.reduce(sums, reduction="sum").tolist()
        trainer._metrics[trainer._mode]["rows/empty"].append(float(empty))
        trainer._metrics[trainer._mode]["rows/masked"].append(float(masked))
        return rows
