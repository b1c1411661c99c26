"""What the ranks do in the distributed tests. Each function runs on every rank and returns something JSON can hold."""

from pathlib import Path
from typing import Any

import torch


def _trainer(model: str, out: str, *, adapter: str | None = None, mixin: tuple = (), **config: Any) -> Any:
    from grpo_ext import GRPOExtConfig, GRPOExtTrainer
    from tests.engine.test_floor import ADAPTERS, MIXTURE
    from tests.floor import FloorMixin
    from tests.tiny import config_kwargs, distinct_characters, sums

    class Trainer(*mixin, FloorMixin, GRPOExtTrainer):
        pass

    kwargs = config_kwargs(out, use_vllm=True, **config)
    del kwargs["use_cpu"]  # chosen by the configuration
    peft_config = (ADAPTERS | MIXTURE)[adapter]() if adapter else None
    return Trainer(model, distinct_characters, GRPOExtConfig(**kwargs), sums(), peft_config=peft_config)


def _shards(model: Any) -> dict[str, torch.Tensor]:
    """This rank's part of every parameter that is not trained."""
    return {n: getattr(p, "ds_tensor", p).detach().clone() for n, p in model.named_parameters() if not p.requires_grad}


def floors(model: str, out: str, runs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Train each of `runs` in turn and report the floor, and what shows that ZeRO-3 was really at work."""
    report = {}
    for name, run in runs.items():
        trainer = _trainer(model, f"{out}/{name}", max_steps=4, **run)
        before = _shards(trainer.model)
        trainer.train()
        after = _shards(trainer.model)
        reference = trainer.ref_model
        report[name] = {
            "floor": trainer.floor,
            "distributed_type": str(trainer.accelerator.distributed_type.value),
            "zero_stage": trainer.accelerator.state.deepspeed_plugin.zero_stage,
            "engine": type(trainer.model_wrapped).__name__,
            "partitioned": sum(p.numel() == 0 for p in trainer.model.parameters()),
            "parameters": sum(1 for _ in trainer.model.parameters()),
            "reference_partitioned": None if reference is None else sum(p.numel() == 0 for p in reference.parameters()),
            "frozen": len(before),
            "frozen_changed": [n for n, p in before.items() if not torch.equal(p, after[n])],
            "kl": [entry.get("kl") for entry in trainer.state.log_history if "loss" in entry],
        }
    return report


def save(model: str, out: str, runs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Train a step and save: {name: directory}, and logits of the trained actor on a fixed input."""
    report = {}
    for name, run in runs.items():
        trainer = _trainer(model, f"{out}/{name}", max_steps=1, **run)
        trainer.train()
        trainer.save_model(f"{out}/{name}/saved")
        with torch.no_grad():
            logits = trainer.model(input_ids=torch.arange(5, 25).reshape(1, 20)).logits
        report[name] = {"directory": str(Path(out) / name / "saved"), "logits": logits[0, :, :95].tolist()}
    return report


def wait_to_be_killed(model: str, out: str, started: str) -> None:
    import time

    trainer = _trainer(model, out, vllm_tensor_parallel_size=2, max_steps=1)
    trainer.train()
    (Path(started) / f"up{trainer.accelerator.process_index}").write_text("")
    time.sleep(600)
