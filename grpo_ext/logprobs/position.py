"""Where a training loop stands: told by its callbacks and by the micro-steps it takes. Knows the trainer; rules: `window`."""

from typing import Any

from transformers.trainer_utils import has_length

from grpo_ext.logprobs.window import Loop, Use, ending_now, epoch_start, updates_per_epoch, uses


class LoopPosition:
    """Counts micro-steps of the epoch and of the optimizer window, as transformers' Trainer does, resume included."""

    def __init__(self, trainer: Any):
        self._trainer = trainer
        self._in_epoch = self._in_window = 0  # micro-steps that are over
        self._resuming = False

    @property
    def loop(self) -> Loop:
        args, loader = self._trainer.args, self._trainer.callback_handler.train_dataloader
        epoch = len(loader) if has_length(loader) else None
        return Loop(args.gradient_accumulation_steps, args.steps_per_generation, self._trainer.num_iterations, epoch)

    @property
    def version(self) -> int:
        """Optimizer steps the actor has taken since the start of training, resume included."""
        return self._trainer.state.global_step

    @property
    def steps_left(self) -> int:
        return self._trainer.state.max_steps - self.version

    @property
    def steps_now(self) -> bool:
        """Whether the micro-step about to be taken ends in an optimizer step: what the loop itself says, set before it."""
        return self._trainer.accelerator.sync_gradients

    @property
    def epochs_over(self) -> int:
        """Epochs that are behind a run which stands between two optimizer steps; 0 on a stream."""
        loop = self.loop
        return self.version // updates_per_epoch(loop.epoch, loop.accumulation) if loop.epoch else 0

    def train_begins(self) -> None:
        self._resuming = True

    def epoch_begins(self) -> None:
        args = self._trainer.args
        start = epoch_start(self.version, self.loop, self._trainer.state.max_steps, args.ignore_data_skip)
        self._in_epoch, self._resuming = start if self._resuming else 0, False

    def window_begins(self) -> None:
        self._in_window = 0

    def advance(self) -> None:
        self._in_epoch += 1
        self._in_window += 1

    def remaining(self) -> list[Use]:
        """Uses left of the buffered slices, the current micro-step's first; what the loop says wins over what was foreseen."""
        loop = self.loop
        left = max(self._trainer.current_gradient_accumulation_steps - self._in_window, 1)
        remaining = uses(loop, self._in_epoch, self._trainer._step % loop.lifetime, window_left=left)
        return ending_now(remaining) if self.steps_now else remaining
