"""Which checkpoint a run goes on from, and what is refused before anything is loaded, on all ranks alike. Knows the trainer."""

import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerate.utils import gather_object
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME, TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from grpo_ext.notices import Notices
from grpo_ext.resume.rank_file import RankFile, state_name
from grpo_ext.resume.state import StateError

REMEDY = (
    "To go on from this checkpoint without its buffered rollouts and their bookkeeping set resume_rollouts=False: the run then "
    "generates afresh, and is not the one that was stopped. Else name an older checkpoint in resume_from_checkpoint."
)


@dataclass(frozen=True)
class View:
    """A checkpoint as one rank sees it. missing: files of upstream's that a resume needs. has_state: whether ours is there."""

    missing: tuple[str, ...]
    has_state: bool


def fault(views: Sequence[View]) -> str | None:
    """Why a checkpoint is not complete, given what every rank sees of it; None where it is. Pure."""
    for rank, view in enumerate(views):
        if view.missing:
            return (
                f"{' and '.join(view.missing)} of rank {rank} {'is' if len(view.missing) == 1 else 'are'} missing or cut short"
            )
    without = [rank for rank, view in enumerate(views) if not view.has_state]
    if without and len(without) < len(views):
        return f"{state_name(without[0])} is missing, while other ranks have theirs"
    return None


class Choice:
    """The newest checkpoint that is complete in the view of every rank, or the one that was asked for."""

    def __init__(self, trainer: Any, file: RankFile):
        self._trainer, self._file, self._notices = trainer, file, Notices()

    @property
    def reads_state(self) -> bool:
        return bool(self._trainer._setting("resume_rollouts"))

    def of(self, wanted: str | os.PathLike | bool | None) -> str | bool | None:
        """What upstream is told to resume from: the newest complete one for True; refused where it cannot be used."""
        if wanted is True:
            wanted = self._newest()
        if isinstance(wanted, str | os.PathLike):
            wanted = os.fspath(wanted)
            self._check(Path(wanted))
        return wanted

    def fault_of(self, checkpoint: Path) -> str | None:
        """Why `checkpoint` is not complete; None where it is. A collective."""
        return fault(self._views([checkpoint])[0])

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
            f"No checkpoint in {found[0].parent} is complete for {self._file.ranks} rank(s), the newest being {found[0].name}: "
            f"{faults[0]}. Start afresh, or with as many ranks as wrote it. {REMEDY}"
        )

    def _found(self, folder: Path) -> list[Path]:
        """Checkpoints, newest first, that any rank sees (a collective)."""
        here = [path.name for path in folder.glob("*") if re.fullmatch(rf"{PREFIX_CHECKPOINT_DIR}-\d+", path.name)]
        names = {name for names in gather_object([here]) for name in names}
        return [folder / name for name in sorted(names, key=lambda name: int(name.rpartition("-")[2]), reverse=True)]

    def _check(self, checkpoint: Path) -> None:
        if not any(gather_object([checkpoint.is_dir()])):
            raise ValueError(
                f"Cannot resume from {checkpoint}: there is no such directory. Name a checkpoint's, or set "
                "resume_from_checkpoint=True for the newest in output_dir."
            )
        wrong = ""
        here = self._view(checkpoint)
        if here.has_state and TRAINER_STATE_NAME not in here.missing:
            try:
                self._file.read(checkpoint)
            except StateError as error:
                wrong = str(error)
        views = self._views([checkpoint])[0]
        wrong = next((each for each in gather_object([wrong]) if each), "") or fault(views) or ""
        if wrong:
            raise ValueError(f"Cannot resume from {checkpoint}: {wrong.rstrip('.')}. {REMEDY}")
        if self.reads_state and not views[0].has_state:
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
        missing = [] if _names_its_step(checkpoint / TRAINER_STATE_NAME) else [TRAINER_STATE_NAME]
        if not self.reads_state:
            return View(tuple(missing), False)
        # Where one of these is not there upstream goes on without a word, and is then another run.
        needed = [self._file.rng_path(checkpoint)]
        if not (self._trainer.is_deepspeed_enabled or self._trainer.is_fsdp_enabled):  # which have files of their own
            needed += [checkpoint / OPTIMIZER_NAME, checkpoint / SCHEDULER_NAME]
        missing += [path.name for path in needed if not path.is_file()]
        return View(tuple(missing), self._file.path(checkpoint).is_file())


def _names_its_step(path: Path) -> bool:
    try:
        return isinstance(json.loads(path.read_text())["global_step"], int)
    except (OSError, ValueError, KeyError, TypeError):
        return False
