"""What watching a run costs: steps of the demo with the monitor on or off by chance, in one run, everything on but dumps; and timers.

    accelerate launch --config_file recipes/accelerate/cpu_zero3.yaml benchmarks/monitor.py

Two numbers: the time spent in the monitor and the callback as a share of the steps they were on for, and the ratio of the median
step, on / off, with the interval that holds nine tenths of its bootstrap. The first is exact, but for what the reductions take
from the backward they travel beside; the second has that in it, and the noise of the machine."""

import json
import random
import statistics
import sys
import time
import timeit
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "recipes")]

from grpo_ext.quiet import quiet

quiet()

from arithmetic_task import exact_match, sums, warm_up
from datasets import Dataset
from transformers import PrinterCallback, TrainerCallback
from trl import TrlParser

from grpo_ext import GRPOExtConfig, GRPOExtTrainer, ProbDiffCallback
from grpo_ext.timing import PhaseTimes

STEPS, WARM, RESAMPLED = 420, 20, 2000


class ByChance(TrainerCallback):
    """Switches the monitor on or off at each step, and keeps each step's wall time and the monitor's own part of it."""

    def __init__(self, trainer: Any):
        self.trainer, self.own, self.inside, self.steps = trainer, 0.0, False, {True: [], False: []}
        self.observe = self._timed(trainer.monitor, "observe")
        for name in ("send", "close", "drain"):
            self._timed(trainer.monitor, name)
        (callback,) = (each for each in trainer.callback_handler.callbacks if isinstance(each, ProbDiffCallback))
        self._timed(callback, "on_step_end")

        self.timers, phase = 0, trainer.phase_times.phase

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.timers += 1
            return phase(*args, **kwargs)

        trainer.phase_times.phase = counted

    def _timed(self, owner: Any, name: str) -> Any:
        method = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            if self.inside:  # of another that is timed
                return method(*args, **kwargs)
            start, self.inside = time.perf_counter(), True
            try:
                return method(*args, **kwargs)
            finally:
                self.own, self.inside = self.own + time.perf_counter() - start, False

        setattr(owner, name, timed)
        return timed

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.on = random.Random(state.global_step).random() < 0.5  # the same on all ranks
        self.trainer.monitor.observe = self.observe if self.on else lambda *args, **kwargs: None
        self.start, self.own = time.perf_counter(), 0.0

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step > WARM and hasattr(self, "start"):
            self.steps[self.on].append((time.perf_counter() - self.start, self.own))


def cost_of_a_timer() -> float:
    """Seconds that one phase takes by itself."""
    times = PhaseTimes()

    def phase() -> None:
        with times.phase("gen"):
            pass

    return min(timeit.repeat(phase, number=1000)) / 1000


def ratio_of_medians(on: list[float], off: list[float]) -> dict[str, float]:
    draw = random.Random(0).choices
    ratios = [statistics.median(draw(on, k=len(on))) / statistics.median(draw(off, k=len(off))) for _ in range(RESAMPLED)]
    low, *_, high = statistics.quantiles(ratios, n=20)
    return {"ratio": statistics.median(on) / statistics.median(off), "low": low, "high": high}


def main() -> None:
    out = ROOT / "outputs" / "monitor"
    sys.argv += ["--config", str(ROOT / "recipes/grpo_arithmetic.yaml"), "--output_dir", str(out), "--max_steps", str(STEPS)]
    (config,) = TrlParser((GRPOExtConfig,)).parse_args_and_config()
    config.enable_token_level_prob_diff = True
    with config.distributed_state.main_process_first():
        if config.distributed_state.is_main_process:
            warm_up(out / "start", 20)
    trainer = GRPOExtTrainer(str(out / "start"), exact_match, config, Dataset.from_list(sums()[0]))
    trainer.remove_callback(PrinterCallback)
    turns = ByChance(trainer)
    trainer.add_callback(turns)
    trainer.train()
    if not config.distributed_state.is_main_process:
        return
    on, off = turns.steps[True], turns.steps[False]
    result = {
        "steps": {"on": len(on), "off": len(off)},
        "monitor_ms_per_step": 1e3 * sum(own for _, own in on) / len(on),
        "step_ms": 1e3 * statistics.median(wall for wall, _ in on),
        "share": sum(own for _, own in on) / sum(wall for wall, _ in on),
        "median_step_on_over_off": ratio_of_medians([wall for wall, _ in on], [wall for wall, _ in off]),
        "timers_per_step": turns.timers / STEPS,
        "timers_share": turns.timers / STEPS * cost_of_a_timer() / statistics.median(wall for wall, _ in on),
        "ranks": config.distributed_state.num_processes,
    }
    print(json.dumps(result, indent=1))
    (ROOT / "benchmarks/results/monitor.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
