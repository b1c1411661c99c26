"""The state file of one rank in a checkpoint: its name, and to which run it belongs. Knows the trainer."""

import json
from pathlib import Path
from typing import Any

from transformers.trainer import TRAINER_STATE_NAME

from grpo_ext.resume.state import StateError, read_state, write_state

_KEYS = {"rank", "global_step", "settings", "rollouts", "loop", "completions", "parts"}


def state_name(rank: int) -> str:
    return f"grpo_ext_state_{rank}.safetensors"


class RankFile:
    """This rank's, in whichever checkpoint."""

    def __init__(self, trainer: Any):
        self._trainer = trainer

    @property
    def rank(self) -> int:
        return self._trainer.accelerator.process_index

    @property
    def ranks(self) -> int:
        return self._trainer.accelerator.num_processes

    def path(self, checkpoint: Path) -> Path:
        return checkpoint / state_name(self.rank)

    def rng_path(self, checkpoint: Path) -> Path:
        """Upstream's file beside it."""
        return checkpoint / ("rng_state.pth" if self.ranks == 1 else f"rng_state_{self.rank}.pth")

    def write(self, checkpoint: Path, content: dict[str, Any]) -> None:
        origin = {"rank": self.rank, "global_step": self._trainer.state.global_step, "settings": self._settings()}
        checkpoint.mkdir(parents=True, exist_ok=True)
        write_state(self.path(checkpoint), {**origin, **content})

    def read(self, checkpoint: Path) -> dict[str, Any]:
        """What was written; `StateError` where it cannot be read, or belongs to another run than the one that wants it."""
        path = self.path(checkpoint)
        state = read_state(path, self._trainer.accelerator.device)
        if not isinstance(state, dict) or not state.keys() >= _KEYS:
            raise StateError(f"{path} is not the state of a run.")
        step = json.loads((checkpoint / TRAINER_STATE_NAME).read_text())["global_step"]
        there = {"rank": state["rank"], "global_step": state["global_step"], **state["settings"]}
        here = {"rank": self.rank, "global_step": step, **self._settings()}
        different = [
            f"{name}={there.get(name)!r} there, {value!r} here" for name, value in here.items() if there.get(name) != value
        ]
        if different:
            raise StateError(f"{path} belongs to another run: {'; '.join(different)}.")
        return state

    def _settings(self) -> dict[str, Any]:
        """Under other values of these, buffered rollouts would be cut, used or scored in another way."""
        args = self._trainer.args
        names = ("per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation", "num_generations")
        return {
            "ranks": self.ranks,
            **{name: getattr(args, name) for name in (*names, "num_iterations", "temperature", "use_vllm")},
            "old_logps": self._trainer._setting("old_logps"),
            "beta > 0": args.beta != 0.0,
            "kl_in_reward": self._trainer._setting("kl_in_reward"),
        }
