"""What the ranks do in the tests of the window check: stock TRL and ours, in turn, on the same recorded rollouts."""

from typing import Any

import torch


def _weights(model: Any) -> torch.Tensor:
    """All parameters in one vector, gathered where ZeRO-3 has partitioned them."""
    parameters = list(model.parameters())
    if not hasattr(parameters[0], "ds_id"):
        return torch.cat([p.detach().flatten() for p in parameters])
    import deepspeed

    with deepspeed.zero.GatheredParameters(parameters):
        return torch.cat([p.detach().flatten().clone() for p in parameters])


def _broken(trainer: type) -> type:
    """Ours without the due pass."""

    class Broken(trainer):  # type: ignore[misc,valid-type]
        def __init__(self, *args: Any, **kwargs: Any):
            super().__init__(*args, **kwargs)
            self.anchors._compute = lambda parts: None

    return Broken


def compare(model: str, out: str, runs: dict[str, dict[str, Any]], rollouts: dict[str, Any] | None = None) -> dict[str, Any]:
    """For each run: histories of stock TRL and of ours, the largest difference of the final weights, what was forwarded."""
    from trl import GRPOTrainer

    from grpo_ext import GRPOExtTrainer
    from tests.engine.test_floor import ADAPTERS
    from tests.trainer import replay

    report: dict[str, Any] = {}
    for name, run in runs.items():
        arguments, found = dict(run), []
        adapter, theirs = arguments.pop("adapter", None), arguments.pop("stock", True)
        ours = _broken(GRPOExtTrainer) if arguments.pop("broken", False) else GRPOExtTrainer
        for trainer in (GRPOTrainer, ours) if theirs else (ours,):
            own = arguments if trainer is ours else {k: v for k, v in arguments.items() if not k.startswith(replay.OWN)}
            torch.manual_seed(0)
            found.append(
                replay.train(
                    trainer,
                    model,
                    f"{out}/{name}-{len(found)}",
                    func=replay.rollouts(**(rollouts or {})),
                    peft_config=ADAPTERS[adapter]() if adapter else None,
                    ranks=True,
                    **own,
                )
            )
        weights = [_weights(each.model) for each in found]
        trained = found[-1]
        report[name] = {
            "histories": [each.history for each in found],
            "forwards": [each.forwards.counts for each in found],
            "weights_apart": float((weights[0] - weights[-1]).abs().max()),
            "distributed_type": str(trained.accelerator.distributed_type.value),
            "engine": type(trained.model_wrapped).__name__,
            "partitioned": sum(
                getattr(p, "ds_tensor", p).numel() < getattr(p, "ds_numel", 0) for p in trained.model.parameters()
            ),
            "row_ids": sorted(int(i) for rows in trained._buffered_inputs for i in rows["row_id"]),
        }
    return report
