"""Where the phases of a run begin and end, and how much work they do. Knows the trainer; the arithmetic is in `timing` and `flops`."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from grpo_ext import _trl
from grpo_ext.batch.rollouts import Rows
from grpo_ext.flops import peak_flops, training_flops_per_token
from grpo_ext.timing import PhaseTimes, StepTimes, timing_metrics


class Clock:
    """One per trainer."""

    def __init__(self, trainer: Any):
        self._trainer = trainer
        self.phases, self.steps = PhaseTimes(), StepTimes()
        self._peak: float | None = None
        self._flops_per_token = 0.0
        self._computed_at: float | None = None  # end of the last backward before an optimizer step

    def train_begins(self) -> None:
        """Find out what the devices can do, and where DeepSpeed's optimizer steps, which is inside the backward."""
        trainer = self._trainer
        device = trainer.accelerator.device
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
        peak = peak_flops(name)
        self._peak = peak * trainer.accelerator.num_processes if peak else None
        self._flops_per_token = training_flops_per_token(trainer.model.parameters())
        _trl.time_deepspeed_step(trainer.model_wrapped, lambda: self.phases.phase("optimizer"))

    @contextmanager
    def generation(self, rows: int) -> Iterator[None]:
        """Around the generation of `rows` rollouts on this rank."""
        trainer = self._trainer
        with self.phases.phase("gen"):
            yield
        if trainer.model.training:
            mean = trainer._metrics["train"]["completions/mean_length"][-1]
            self.steps.generated(mean * rows * trainer.accelerator.num_processes)

    @contextmanager
    def micro_step(self) -> Iterator[None]:
        with self.phases.phase("forward_backward"):
            yield
        if self._trainer.accelerator.sync_gradients:
            self._computed_at = time.perf_counter()

    def trains_on(self, rows: Rows) -> None:
        """A loss over `rows` is about to be computed."""
        if self._peak is not None:
            self.steps.trained(float(rows["real_tokens"]) * self._flops_per_token)

    def optimizer_stepped(self) -> None:
        if self._computed_at is not None:
            self.phases.add("optimizer", time.perf_counter() - self._computed_at)
            self._computed_at = None

    def drain(self) -> dict[str, float]:
        """Metrics since the last log."""
        return timing_metrics(self.phases.drain(), self.steps.drain(), self._peak)
