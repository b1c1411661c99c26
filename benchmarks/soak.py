"""Whether a long run leaks: 500 steps of the demo on two ZeRO-3 ranks, with dumps at every step and a checkpoint at every 50th.

    accelerate launch --config_file recipes/accelerate/cpu_zero3.yaml benchmarks/soak.py

Every rank looks at itself at the end of every step: resident memory, open files, threads. Passes if resident memory grows by less
than 2% from step 100 to step 500 on every rank, open files and threads do not grow, and engine and actor still agree to 1e-6."""

import argparse
import json
import shutil
import statistics
import sys
import threading
from pathlib import Path
from typing import Any

import psutil
from accelerate.utils import gather_object

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "recipes")]

from grpo_ext.quiet import quiet

quiet()

from arithmetic_task import exact_match, sums, warm_up
from datasets import Dataset
from transformers import PrinterCallback, TrainerCallback
from trl import TrlParser

from grpo_ext import GRPOExtConfig, GRPOExtTrainer
from grpo_ext.consistency import keys

SPAN = 10  # steps whose median stands for the last of them: a garbage collection more or less is no leak
MIB = 2**20


class Watch(TrainerCallback):
    """Keeps, of every step, what this process holds of the machine."""

    def __init__(self) -> None:
        self.process = psutil.Process()
        self.seen: dict[int, dict[str, float]] = {}

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seen[state.global_step] = {
            "resident_mib": self.process.memory_info().rss / MIB,
            "open_files": self.process.num_fds(),
            "threads": self.process.num_threads(),
            "python_threads": threading.active_count(),
        }


def around(seen: dict[int, dict[str, float]], step: int) -> dict[str, float]:
    """Medians over the `SPAN` steps that end at `step`."""
    steps = [seen[each] for each in range(step - SPAN + 1, step + 1)]
    return {name: statistics.median(found[name] for found in steps) for name in steps[0]}


def verdict(ranks: list[dict[int, dict[str, float]]], first: int, last: int) -> dict[str, Any]:
    """What each rank held at both steps, and whether it grew."""
    found = [{"first": around(seen, first), "last": around(seen, last)} for seen in ranks]
    growth = [rank["last"]["resident_mib"] / rank["first"]["resident_mib"] - 1 for rank in found]
    steady = all(
        rank["last"][name] <= rank["first"][name] for rank in found for name in ("open_files", "threads", "python_threads")
    )
    return {"ranks": found, "resident_growth": growth, "passed": max(growth) < 0.02 and steady}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--first", type=int, default=100)
    own, rest = parser.parse_known_args()
    out = ROOT / "outputs" / "soak"
    settings = {
        "output_dir": out, "max_steps": own.steps, "save_strategy": "steps", "save_steps": 50, "save_total_limit": 2,
        "enable_token_level_prob_diff": True, "prob_diff_save_dir": out / "dumps", "prob_diff_keep_last": 50,
    }  # fmt: skip
    given = [str(part) for name, value in settings.items() for part in (f"--{name}", value)]
    sys.argv[1:] = ["--config", str(ROOT / "recipes/grpo_arithmetic.yaml"), *given, *rest]
    (config,) = TrlParser((GRPOExtConfig,)).parse_args_and_config()
    with config.distributed_state.main_process_first():
        if config.distributed_state.is_main_process:
            shutil.rmtree(out, ignore_errors=True)
            warm_up(out / "start")
    trainer = GRPOExtTrainer(str(out / "start"), exact_match, config, Dataset.from_list(sums()[0]))
    trainer.remove_callback(PrinterCallback)
    watch = Watch()
    trainer.add_callback(watch)
    trainer.train()
    ranks = gather_object([watch.seen])
    if not config.distributed_state.is_main_process:
        return
    result = {"steps": own.steps, "from_step": own.first, **verdict(ranks, own.first, own.steps)}
    means = [entry[keys.MEAN] for entry in trainer.state.log_history if keys.MEAN in entry]
    result["mean_prob_diff"] = {"largest": max(means), "last": means[-1]}
    result["passed"] &= max(means) <= 1e-6
    result["dumps_left"] = len(list((out / "dumps").glob("*.npy")))
    result["checkpoints_left"] = sorted(path.name for path in out.glob("checkpoint-*"))
    result["every_50_steps"] = [
        {"step": s, **{f"rank{r}": seen[s] for r, seen in enumerate(ranks)}} for s in ranks[0] if s % 50 == 0
    ]
    print(json.dumps(result, indent=1))
    (ROOT / "benchmarks/results/soak.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
