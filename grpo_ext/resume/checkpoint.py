"""What of a run its checkpoint holds beside upstream's files, and when it is written and read. Knows the trainer.

Each rank writes one file, beside its RNG state and before `trainer_state.json`. That one comes last, so a checkpoint that has it
is complete; one that was killed on the way has not, and is passed over. The state is read back where upstream restores its RNG
state: after the data are skipped, before the first micro-step.

A resumed run begins with an optimizer window. So a checkpoint is written between two of them, where nothing is under way; one
that is written because the run ended within a window, or an evaluation, holds what was there before that began.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from accelerate.utils import gather_object
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from grpo_ext import _trl
from grpo_ext.notices import Notices
from grpo_ext.resume.choice import REMEDY, Choice
from grpo_ext.resume.generators import Generators
from grpo_ext.resume.rank_file import RankFile
from grpo_ext.resume.state import StateError, Unsavable, check_savable
from grpo_ext.rollout.retry import EngineFailed


class Stateful(Protocol):
    """A part of the trainer that has something to remember, per rank: plain values and tensors, which the part does not change
    afterwards."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Checkpoints:
    """Saves and restores what upstream's checkpoints lack. One per trainer, which calls it at the places named below."""

    def __init__(self, trainer: Any, parts: Mapping[str, Stateful]):
        """parts: who else has something to remember, by a name that stays; more may join before training begins."""
        self._trainer, self._notices, self._file = trainer, Notices(), RankFile(trainer)
        self._choice = Choice(trainer, self._file)
        self.parts = dict(parts)
        self.sampler: Any = None  # the one that training draws its prompts from
        self._chosen: str | None = None
        self._running = False  # whether steps are still to come
        self._before: dict[str, Any] | None = None  # what there was before the window or evaluation that is open
        self._generators: Generators | None = None  # as they were then

    # ---- train() is called -----------------------------------------------------------------------------------------
    def chosen(self, wanted: str | os.PathLike | bool | None) -> str | bool | None:
        """The checkpoint to resume from: see `Choice`."""
        wanted = self._choice.of(wanted)
        self._chosen = wanted if isinstance(wanted, str) else None
        return wanted

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

    def begins(self, folder: str) -> None:
        """What stands under that name, from a run that was stopped later on, is incomplete from now on."""
        if self._trainer.args.should_save:
            (Path(folder) / TRAINER_STATE_NAME).unlink(missing_ok=True)
        self._trainer.accelerator.wait_for_everyone()

    @property
    def waits(self) -> bool:
        """Whether a checkpoint asked for now (transformers' on SIGTERM is, before an optimizer step) must wait for the step's end."""
        return self._running and self._before is not None

    @contextmanager
    def one_before_failing(self) -> Iterator[None]:
        """For the duration of training: where the engine fails on all ranks, they write a checkpoint before they raise."""
        try:
            yield
        except EngineFailed as failure:
            if not failure.together:
                raise
            self._running = False  # no step will end for the checkpoint to wait for
            raise EngineFailed(f"{failure} {self._last_words()}", together=True) from failure
        finally:
            self._running = False

    def _last_words(self) -> str:
        """Write a checkpoint, unless there is one of this step, and say where it is. A collective."""
        trainer, step = self._trainer, self._trainer.state.global_step
        if step == 0:
            return "No optimizer step was taken, so there is nothing to save."
        folder = Path(trainer.args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{step}"
        try:
            if self._choice.fault_of(folder) is not None:
                trainer._save_checkpoint(trainer.model, trial=None)
        except OSError as error:
            return str(error)
        return f"{folder} holds the run up to here; go on from it with resume_from_checkpoint=True."

    def save(self, checkpoint: str) -> None:
        content = dict(self._before or self._content())
        if self._generators is not None:
            self._generators.restore()  # upstream saves them next
        if not self._savable(content["rollouts"]):
            content["rollouts"] = None
        content["completions"] = self._table(content["completions"])
        self._file.write(Path(checkpoint), content)

    def _content(self) -> dict[str, Any]:
        """A copy of all that steps change, down to the tensors of a slice, which stay as they are."""
        trainer, slices = self._trainer, self._trainer._buffered_inputs
        return {
            "rollouts": {"step": trainer._step, "slices": [dict(rows) for rows in slices]} if slices is not None else None,
            "loop": _trl.loop_state(trainer),
            "completions": _trl.completions_table(trainer) if trainer.accelerator.is_main_process else {},
            "parts": {name: part.state_dict() for name, part in self.parts.items()},
        }

    def _table(self, table: dict[str, Any]) -> dict[str, Any]:
        """Rows of the next table of completions; none where a column of the user's cannot be saved."""
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
        self._running = True
        self.step_ends()
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
        if checkpoint is None or not self._choice.reads_state or not self._file.path(Path(checkpoint)).is_file():
            return
        trainer, state = self._trainer, self._file.read(Path(checkpoint))
        if state["rollouts"] is not None:
            trainer._step, trainer._buffered_inputs = state["rollouts"]["step"], state["rollouts"]["slices"]
        _trl.load_loop_state(trainer, state["loop"])
        _trl.load_completions_table(trainer, state["completions"])
        for name, part in self.parts.items():
            if name in state["parts"]:
                try:
                    part.load_state_dict(state["parts"][name])
                except (KeyError, TypeError) as error:
                    path = self._file.path(Path(checkpoint))
                    raise StateError(f"{path}: its {name!r} was written by another version ({error!r}). {REMEDY}") from error

    def window_begins(self) -> None:
        self._before, self._generators = self._content(), Generators()

    def step_ends(self) -> None:
        self._before = self._generators = None

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """For the duration of an evaluation. It is not made again on resume, so what one that failed had collected is of no use."""
        between_windows = self._running and self._before is None
        if between_windows:
            self.window_begins()
        yield
        if between_windows:
            self.step_ends()
