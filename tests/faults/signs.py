"""What a run that is going to be killed tells whoever kills it."""

import os
import time
from pathlib import Path
from typing import Any

from transformers import TrainerCallback


class Sign(TrainerCallback):
    """Keeps, in `folder`, the process id of every rank and the latest step, and waits to be killed where training is over."""

    def __init__(self, folder: Any, stay: bool = False):
        self.folder, self.stay = Path(folder), stay

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        (self.folder / f"step{args.process_index}").write_text(str(state.global_step))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        (self.folder / f"pid{args.process_index}").write_text(str(os.getpid()))
        (self.folder / f"step{args.process_index}").write_text(str(state.global_step))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.stay:
            time.sleep(600)
