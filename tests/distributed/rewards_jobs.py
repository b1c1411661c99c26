"""What the ranks do in the tests of rewards: the KL in the reward against stock TRL, and odd rows on one rank only."""

import math
from typing import Any

import torch


def penalised(model: str, out: str, runs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """For each run: histories of stock TRL and of ours on the same rewards, and how far apart their weights end."""
    from tests.distributed.window_jobs import _weights
    from tests.engine.test_floor import ADAPTERS
    from tests.trainer.penalised import against_stock

    report: dict[str, Any] = {}
    for name, run in runs.items():
        arguments = dict(run)
        adapter = arguments.pop("adapter", None)
        stock, ours = against_stock(
            model,
            f"{out}/{name}",
            rollouts={"tools": True},
            peft_config=ADAPTERS[adapter]() if adapter else None,
            ranks=True,
            **arguments,
        )
        reference = ours.ref_model
        report[name] = {
            "histories": [stock.history, ours.history],
            "weights_apart": float((_weights(stock.model) - _weights(ours.model)).abs().max()),
            "rewards": ours.rewards,
            "engine": type(ours.model_wrapped).__name__,
            "reference": None if reference is None else type(reference).__name__,
            "reference_partitioned": 0 if reference is None else sum(p.numel() == 0 for p in reference.parameters()),
        }
    return report


def odd(model: str, out: str) -> dict[str, Any]:
    """The first rank has an empty completion, an infinite reward, a missing one; the second has none of them."""
    from grpo_ext import GRPOExtTrainer
    from tests.trainer import replay

    recorded = replay.rollouts()

    def func(prompts: Any, trainer: Any) -> dict[str, list]:
        output = recorded(prompts, trainer)
        if trainer.accelerator.process_index == 0:
            output["completion_ids"][1], output["logprobs"][1] = [], []
        return output

    def judge(completions: list, trainer_state: Any, **kwargs: Any) -> list[float | None]:
        rewards: list[float | None] = [float(len(text)) + i / 8 for i, text in enumerate(completions)]
        if made.accelerator.process_index == 0:
            rewards[0], rewards[2] = math.inf, None
        return rewards

    def judged(trainer: Any) -> None:
        nonlocal made
        made, trainer.reward_funcs = trainer, [judge]

    made: Any = None
    shape = {"gradient_accumulation_steps": 2, "steps_per_generation": 4, "max_steps": 4}
    trainer = replay.train(GRPOExtTrainer, model, out, func=func, before=judged, ranks=True, debug_batch=True, **shape)
    return {
        "history": trainer.history,
        "finite": all(bool(torch.isfinite(getattr(p, "ds_tensor", p)).all()) for p in trainer.model.parameters()),
        "engine": type(trainer.model_wrapped).__name__,
    }
