"""What a run that is going to be killed tells whoever kills it."""

import os
import time
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from grpo_ext.files import replacing


class Sign(TrainerCallback):
    """Keeps, in `folder`, the process id of every rank and the latest step, and waits to be killed where training is over."""

    def __init__(self, folder: Any, stay: bool = False):
        self.folder, self.stay = Path(folder), stay

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._leave(f"step{args.process_index}", state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._leave(f"pid{args.process_index}", os.getpid())
        self._leave(f"step{args.process_index}", state.global_step)

    def _leave(self, name: str, number: int) -> None:
        with replacing(self.folder / name) as unfinished:  # the kill may come at any point
            unfinished.write_text(str(number))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.stay:
            time.sleep(600)
