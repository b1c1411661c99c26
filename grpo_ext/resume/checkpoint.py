"""What of a run its checkpoint holds beside upstream's files, when it is written and read, and what is refused. Knows the trainer.

Each rank writes one file, beside its RNG state and before `trainer_state.json`. That one comes last, so a checkpoint that has it
is complete; one that was killed on the way has not, and is passed over. The state is read back where upstream restores its RNG
state: after the data are skipped, before the first micro-step.
"""

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from accelerate.utils import gather_object
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from grpo_ext import _trl
from grpo_ext.notices import Notices
from grpo_ext.resume.state import StateError, Unsavable, check_savable, read_state, write_state
from grpo_ext.rollout.retry import EngineFailed

REMEDY = (
    "To go on from this checkpoint without its buffered rollouts and their bookkeeping set resume_rollouts=False: the run then "
    "generates afresh, and is not the one that was stopped. Else name an older checkpoint in resume_from_checkpoint."
)


class Stateful(Protocol):
    """A part of the trainer that has something to remember: plain values and tensors, per rank."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@dataclass(frozen=True)
class View:
    """A checkpoint as one rank sees it. missing: files of upstream's that a resume needs. has_state: whether ours is there."""

    missing: tuple[str, ...]
    has_state: bool


def fault(views: Sequence[View]) -> str | None:
    """Why a checkpoint is not complete, given what every rank sees of it; None where it is. Pure."""
    for rank, view in enumerate(views):
        if view.missing:
            return f"{' and '.join(view.missing)} of rank {rank} is missing or cut short"
    without = [rank for rank, view in enumerate(views) if not view.has_state]
    if without and len(without) < len(views):
        return f"{state_name(without[0])} is missing, while other ranks have theirs"
    return None


def state_name(rank: int) -> str:
    return f"grpo_ext_state_{rank}.safetensors"


class Checkpoints:
    """Saves and restores what upstream's checkpoints lack. One per trainer, which calls it at the places named below."""

    def __init__(self, trainer: Any, parts: Mapping[str, Stateful]):
        """parts: who else has something to remember, by a name that stays; more may join before training begins."""
        self._trainer, self._notices = trainer, Notices()
        self.parts = dict(parts)
        self.sampler: Any = None  # the one that training draws its prompts from
        self._chosen: str | None = None

    # ---- train() is called -----------------------------------------------------------------------------------------
    def chosen(self, wanted: str | bool | None) -> str | bool | None:
        """The checkpoint to resume from: the newest complete one for True; refused, on all ranks, where it cannot be used."""
        if wanted is True:
            wanted = self._newest()
        if isinstance(wanted, str | os.PathLike):
            wanted = os.fspath(wanted)
            self._check(Path(wanted))
        self._chosen = wanted if isinstance(wanted, str) else None
        return wanted

    def _newest(self) -> str | bool:
        found = self._found(Path(self._trainer.args.output_dir))
        faults = [fault(views) for views in self._views(found)]
        for checkpoint, wrong in zip(found, faults, strict=True):
            if wrong is None:
                return str(checkpoint)
            self._notices.once(checkpoint.name, f"Passed over {checkpoint}, which is not complete: {wrong}.")
        if not found:
            return True  # upstream says so
        raise ValueError(
            f"No checkpoint in {found[0].parent} is complete for {self._ranks} rank(s), the newest being {found[0].name}: "
            f"{faults[0]}. Start afresh, or with as many ranks as wrote it. {REMEDY}"
        )

    def _found(self, folder: Path) -> list[Path]:
        """Checkpoints, newest first, that any rank sees (a collective)."""
        here = [path.name for path in folder.glob("*") if re.fullmatch(rf"{PREFIX_CHECKPOINT_DIR}-\d+", path.name)]
        names = {name for names in gather_object([here]) for name in names}
        return [folder / name for name in sorted(names, key=lambda name: int(name.rpartition("-")[2]), reverse=True)]

    def _check(self, checkpoint: Path) -> None:
        wrong = ""
        here = self._view(checkpoint)
        if here.has_state and TRAINER_STATE_NAME not in here.missing:
            try:
                self._read(checkpoint)
            except StateError as error:
                wrong = str(error)
        views = self._views([checkpoint])[0]
        wrong = next((each for each in gather_object([wrong]) if each), "") or fault(views) or ""
        if wrong:
            raise ValueError(f"Cannot resume from {checkpoint}: {wrong.rstrip('.')}. {REMEDY}")
        if self._reads and not views[0].has_state:
            self._notices.once(
                "stock",
                f"{checkpoint} holds no state of grpo_ext (TRL's own trainer wrote it): resuming with fresh rollouts.",
            )
        if getattr(self._trainer.args, "sync_ref_model", False):
            self._notices.once(
                "reference",
                "sync_ref_model=True: no checkpoint holds the reference model, so the resumed run begins with that of the start.",
            )

    def _views(self, checkpoints: Sequence[Path]) -> list[list[View]]:
        """Every rank's view of each checkpoint; a collective, since ranks on other machines may see other disks."""
        mine = [self._view(checkpoint) for checkpoint in checkpoints]
        everyone = gather_object([mine])
        return [list(views) for views in zip(*everyone, strict=True)]

    def _view(self, checkpoint: Path) -> View:
        missing = [] if _is_json(checkpoint / TRAINER_STATE_NAME) else [TRAINER_STATE_NAME]
        if not self._reads:
            return View(tuple(missing), False)
        if not self._rng_file(checkpoint).is_file():
            missing.append(self._rng_file(checkpoint).name)
        return View(tuple(missing), self._state_file(checkpoint).is_file())

    # ---- a checkpoint is written -----------------------------------------------------------------------------------
    @contextmanager
    def writing(self, folder: str) -> Iterator[None]:
        """For the duration of upstream's saving: what it raises (a full disk, mostly, and without saying where) names the checkpoint."""
        self.begins(folder)
        try:
            yield
        except Exception as error:
            raise OSError(
                f"Checkpoint {folder} could not be written ({type(error).__name__}: {str(error).rstrip('.')}). Earlier ones are as "
                "they were. Make room there, or lower save_total_limit, and go on with resume_from_checkpoint=True, which passes "
                "over what is not complete."
            ) from error

    @contextmanager
    def one_before_failing(self) -> Iterator[None]:
        """For the duration of training: where the engine fails on all ranks, they write a checkpoint before they raise."""
        try:
            yield
        except EngineFailed as failure:
            if not failure.together:
                raise
            raise EngineFailed(f"{failure} {self._last_words()}", together=True) from failure

    def _last_words(self) -> str:
        """Write a checkpoint, unless there is one of this step, and say where it is. A collective."""
        trainer, step = self._trainer, self._trainer.state.global_step
        if step == 0:
            return "No optimizer step was taken, so there is nothing to save."
        folder = Path(trainer.args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{step}"
        trainer.generations.failed()
        try:
            if fault(self._views([folder])[0]) is not None:
                trainer._save_checkpoint(trainer.model, trial=None)
        except OSError as error:
            return str(error)
        return f"{folder} holds the run up to here; go on from it with resume_from_checkpoint=True."

    def begins(self, folder: str) -> None:
        """What stands under that name, from a run that was stopped later on, is incomplete from now on."""
        if self._trainer.args.should_save:
            (Path(folder) / TRAINER_STATE_NAME).unlink(missing_ok=True)
        self._trainer.accelerator.wait_for_everyone()

    def save(self, checkpoint: str) -> None:
        trainer = self._trainer
        slices = trainer._buffered_inputs
        rollouts = {"step": trainer._step, "slices": slices} if slices is not None else None
        # Amid a window the slices may be of a later batch than the window began with: a resumed run generates afresh.
        if not trainer.anchors.position.between_steps or not self._savable(rollouts):
            rollouts = None
        state = {
            "rank": self._rank,
            "global_step": trainer.state.global_step,
            "settings": self._settings(),
            "rollouts": rollouts,
            "loop": _trl.loop_state(trainer),
            "completions": self._table(),
            "parts": {name: part.state_dict() for name, part in self.parts.items()},
        }
        os.makedirs(checkpoint, exist_ok=True)
        write_state(self._state_file(checkpoint), state)

    def _table(self) -> dict[str, Any]:
        """Rows of the next table of completions, on the rank that prints it; none where a column of the user's cannot be saved."""
        table = _trl.completions_table(self._trainer) if self._trainer.accelerator.is_main_process else {}
        try:
            check_savable(table)
        except Unsavable as error:
            self._notices.once(
                "table", f"Checkpoints hold no completions: {error}. The first table after a resume may be short."
            )
            return {}
        return table

    def _savable(self, rollouts: Any) -> bool:
        """Whether every rank can save its rollouts: what one cannot, none does, or they would part ways on resume."""
        try:
            check_savable(rollouts)
            here = ""
        except Unsavable as error:
            here = str(error)
        wrong = next((each for each in gather_object([here]) if each), "")
        if wrong:
            self._notices.once(
                "unsavable",
                f"Checkpoints hold no buffered rollouts: {wrong}, and only tensors, numbers, strings and lists or dicts of them "
                "can be saved. A run resumed from one generates afresh.",
            )
        return not wrong

    # ---- training goes on ------------------------------------------------------------------------------------------
    def train_begins(self) -> None:
        """A resumed run is to see the epoch's permutation: those of the epochs that are over are drawn and thrown away."""
        for _ in range(self._trainer.anchors.position.epochs_over if self.sampler is not None else 0):
            next(iter(self.sampler), None)
        if self.run_is_over:
            self.restore(self._chosen)  # no epoch begins, where upstream restores its own ...
            self._trainer.model.train()  # ... and turns it on; the last log is one of training

    @property
    def run_is_over(self) -> bool:
        """Whether no optimizer step is left: killed past its last checkpoint, say. Upstream would take one more and then look."""
        return self._trainer.state.global_step >= self._trainer.state.max_steps

    def restore(self, checkpoint: str | None) -> None:
        if checkpoint is None or not self._reads or not self._state_file(checkpoint).is_file():
            return
        trainer, state = self._trainer, self._read(Path(checkpoint))
        if state["rollouts"] is not None:
            trainer._step, trainer._buffered_inputs = state["rollouts"]["step"], state["rollouts"]["slices"]
        _trl.load_loop_state(trainer, state["loop"])
        _trl.load_completions_table(trainer, state["completions"])
        for name, part in self.parts.items():
            if name in state["parts"]:
                part.load_state_dict(state["parts"][name])

    def _read(self, checkpoint: Path) -> dict[str, Any]:
        """This rank's state; refused where it belongs to another run than the one that wants it."""
        path = self._state_file(checkpoint)
        state = read_state(path, self._trainer.accelerator.device)
        step = json.loads((checkpoint / TRAINER_STATE_NAME).read_text())["global_step"]
        there = {"rank": state["rank"], "global_step": state["global_step"], **state["settings"]}
        here = {"rank": self._rank, "global_step": step, **self._settings()}
        different = [
            f"{name}={there.get(name)!r} there, {value!r} here" for name, value in here.items() if there.get(name) != value
        ]
        if different:
            raise StateError(f"{path} belongs to another run: {'; '.join(different)}.")
        return state

    # ---- this run --------------------------------------------------------------------------------------------------
    @property
    def _reads(self) -> bool:
        return bool(self._trainer._setting("resume_rollouts"))

    @property
    def _rank(self) -> int:
        return self._trainer.accelerator.process_index

    @property
    def _ranks(self) -> int:
        return self._trainer.accelerator.num_processes

    def _state_file(self, checkpoint: str | Path) -> Path:
        return Path(checkpoint) / state_name(self._rank)

    def _rng_file(self, checkpoint: Path) -> Path:
        return checkpoint / ("rng_state.pth" if self._ranks == 1 else f"rng_state_{self._rank}.pth")

    def _settings(self) -> dict[str, Any]:
        """Under other values of these, buffered rollouts would be cut, used or scored in another way."""
        args = self._trainer.args
        names = ("per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation", "num_generations")
        return {
            "ranks": self._ranks,
            **{name: getattr(args, name) for name in (*names, "num_iterations", "temperature", "use_vllm")},
            "old_logps": self._trainer._setting("old_logps"),
            "beta > 0": args.beta != 0.0,
            "kl_in_reward": self._trainer._setting("kl_in_reward"),
        }


def _is_json(path: Path) -> bool:
    try:
        return isinstance(json.loads(path.read_text()), dict)
    except (OSError, ValueError):
        return False
