"""What a run shows while it trains: one readable line a step, above a progress bar."""

from typing import Any

from tqdm.auto import tqdm
from transformers import TrainerCallback


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
    parts = [f"step {step:>{len(str(max_steps))}}/{max_steps}", f"reward {logs['reward']:.3f}"]
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
