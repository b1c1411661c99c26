"""What a run shows while it trains: one readable line a step above a progress bar, and a look at the first batch."""

from collections.abc import Callable, Sequence
from typing import Any

from tqdm.auto import tqdm
from transformers import TrainerCallback

from grpo_ext.batch.look import Piece, TensorLook, first_row, tensor_looks
from grpo_ext.batch.rollouts import Rows


class StepLines(TrainerCallback):
    """One readable line per log on the main process, under which a progress bar moves. Replaces transformers' printing.

    Use: `trainer.add_callback(StepLines())` with `disable_tqdm=True`, and `trainer.remove_callback(PrinterCallback)`.
    """

    def __init__(self) -> None:
        self._bar: tqdm | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            self._bar = tqdm(total=state.max_steps, unit="step", dynamic_ncols=True, leave=False)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._bar is not None:
            self._bar.update(state.global_step - self._bar.n)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        if self._bar is not None and logs and "reward" in logs:
            tqdm.write(step_line(state.global_step, state.max_steps, logs))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def step_line(step: int, max_steps: int, logs: dict[str, float]) -> str:
    """`step  12/300 | reward 0.61 | kl 3.1e-04 | prob-diff 1.2e-07 | 1,234 tok/s | gen 0.05 s, sync_weights 0.03 s ...`"""
    parts = [f"step {step:>{len(str(max_steps))}}/{max_steps}", f"reward {_or_none(logs['reward'])}"]
    if "kl" in logs:
        parts.append(f"kl {logs['kl']:.1e}")
    if "training/rollout_probs_diff_mean" in logs:
        parts.append(f"prob-diff {logs['training/rollout_probs_diff_mean']:.1e}")
    if "perf/tokens_per_s" in logs:
        parts.append(f"{logs['perf/tokens_per_s']:,.0f} tok/s")
    times = {k.removeprefix("timing_s/"): v for k, v in logs.items() if k.startswith("timing_s/")}
    if times:
        parts.append(", ".join(f"{name} {seconds:.2f} s" for name, seconds in times.items()))
    return " | ".join(parts)


def _or_none(reward: float | None) -> str:
    """TRL logs None where no reward of a step could be used."""
    return "none" if reward is None else f"{reward:.3f}"


class BatchLook:
    """Prints what the first loss of a process is given, above whatever progress bar there is."""

    def __init__(self, wanted: bool, decode: Callable[[list[int]], str]):
        self._wanted, self._decode = wanted, decode

    def __call__(self, rows: Rows) -> Rows:
        if self._wanted:
            self._wanted = False
            tqdm.write(batch_look(tensor_looks(rows), first_row(rows, self._decode)))
        return rows


def batch_look(tensors: Sequence[TensorLook], row: Sequence[Piece]) -> str:
    """A table, and the first row: `[-what the loss does not see-]` in brackets, and dim where there is colour."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title="What the first loss is given", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in ("tensor", "shape", "dtype", "real", "shortest", "longest", "NaN"):
        table.add_column(heading, justify="left" if heading in ("tensor", "dtype") else "right", no_wrap=heading == "tensor")
    for t in tensors:
        counts = ("" if n is None else f"{n:,}" for n in (t.real, t.shortest, t.longest))
        shape = " x ".join(map(str, t.shape)) or "scalar"
        table.add_row(Text(t.name), shape, t.dtype, *counts, Text(f"{t.nans:,}", style="bold red" if t.nans else ""))
    text = Text("First row, [-what is not in the loss-] in brackets\n")
    for piece in row:
        shown = piece.text.replace("\n", "\\n")
        text.append(shown if piece.kind == "learned" else f"[-{shown}-]", style="" if piece.kind == "learned" else "dim")
        text.append("\n" if piece.kind == "prompt" else "")
    console = Console()
    with console.capture() as capture:
        console.print(table)
        console.print(text)
    return capture.get().rstrip("\n")
