"""A training run that SIGKILLs itself at a chosen point of a save, in a process of its own."""

import importlib
import multiprocessing
import os
import signal
from typing import Any

import grpo_ext.files
from tests.distributed.launch import forget_launcher
from tests.resume import runs


def _cut_short(state: Any, path: str) -> None:
    with open(path, "w") as file:
        file.write('{"epoch": 0.1, "global_st')


# Where, in the order of a save: (owner, function), and whether it has done its work, or half of it, by then.
POINTS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "before the weights": ("transformers.Trainer", "save_model", {}),
    "before the optimizer": ("transformers.Trainer", "_save_optimizer_and_scheduler", {}),
    "before our state has its name": ("grpo_ext.files.os", "replace", {}),
    "after our state": ("transformers.Trainer", "_save_rng_state", {}),
    "after the RNG state": ("transformers.Trainer", "_save_rng_state", {"after": True}),
    "within the last file": ("transformers.trainer_callback.TrainerState", "save_to_json", {"spoil": _cut_short}),
    "after the last file": ("transformers.trainer_callback.TrainerState", "save_to_json", {"after": True}),
}


def run(point: str, step: int, **arguments: Any) -> int | None:
    """Train with `tests.resume.runs.train(**arguments)`, killed at `point` of the save at `step`. Returns the exit status, negative
    for a signal. The process is forked from one that has the imports behind it and no engine or thread of anyone's."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.resume.killed"])
    process = context.Process(target=_train, args=(point, step, arguments))
    process.start()
    process.join(timeout=120)
    if process.exitcode is None:
        process.kill()
    return process.exitcode


def _train(point: str, step: int, arguments: dict[str, Any]) -> None:
    forget_launcher()

    def arm(trainer: Any) -> None:
        begins = trainer.checkpoints.begins

        def begins_or_arms(folder: str) -> None:
            begins(folder)
            if trainer.state.global_step == step:
                _arm(*POINTS[point])

        trainer.checkpoints.begins = begins_or_arms

    runs.train(before=arm, **arguments)


def _arm(owner: str, name: str, how: dict[str, Any]) -> None:
    if owner == "grpo_ext.files.os":
        holder: Any = grpo_ext.files.os
    else:
        package, _, attribute = owner.rpartition(".")
        holder = getattr(importlib.import_module(package), attribute)
    original = getattr(holder, name)

    def fatal(*args: Any, **kwargs: Any) -> None:
        if "spoil" in how:
            how["spoil"](*args)
        if how.get("after"):
            original(*args, **kwargs)
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(holder, name, fatal)
