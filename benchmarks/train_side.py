"""What a training step costs beside generation: stock TRL and grpo_ext on identical recorded rollouts, interleaved A B A B.

    python benchmarks/train_side.py                  # the table of docs/old_logps.md, about half an hour on two cores
    python benchmarks/train_side.py --only tail-8/8/1 --only equal-8/8/1
    python benchmarks/train_side.py --list           # names of all cases; --all runs every one

A case is named lengths-accumulation/steps_per_generation/iterations, then -ref (a reference model), -lora, -zero3 (two ranks),
-p512 (prompts of 512 tokens), -g16 (16 rollouts to a prompt), -c64 (completions of at most 64 tokens). Cases with -p also train with
trees wherever possible and with rows only, to hold `shared_prompt="auto"` against the better of both, and make a picture of the
ratio over the prompt length with what the cost model predicts: --shapes runs them.
Every trainer is warmed up by a step of its own; then both train the same optimizer steps from the same weights, in turns. Time
is the wall time of training without the rollouts, and the CPU time beside it, which other work on the machine does not touch.
The results go to benchmarks/results/train_side.json, and a picture beside it."""

import argparse
import ctypes
import itertools
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

from grpo_ext.quiet import quiet

quiet()

RESULTS = ROOT / "benchmarks" / "results"
ROWS, PROMPT, CAP, VOCAB = 8, 8, 256, 4096
SHAPE = dict(
    vocab_size=VOCAB,
    hidden_size=256,
    intermediate_size=1024,
    num_hidden_layers=6,
    num_attention_heads=4,
    num_key_value_heads=4,
    max_position_embeddings=4096,
    tie_word_embeddings=True,
)
LENGTHS = ("tail", "uniform", "equal")
PROMPTS, GROUPS = (16, 128, 512, 2048), (4, 8, 16)
SIDES = {"trl": {}, "ours": {}, "trees": {"shared_prompt": True}, "rows": {"shared_prompt": False}}
LOOPS = ((8, 8, 1), (4, 8, 1), (4, 4, 2), (3, 2, 1))
DEFAULT = [
    *(f"tail-{a}/{s}/{i}" for a, s, i in LOOPS),
    "tail-8/8/1-ref",
    "tail-8/8/1-lora",
    "tail-8/8/1-ref-lora",
    "uniform-8/8/1",
    "equal-8/8/1",
    "equal-3/2/1",
    "tail-8/8/1-zero3",
    "tail-4/8/1-ref-zero3",
]


SHAPES = [f"tail-8/8/1-p{prompt}-g{group}" for prompt in PROMPTS for group in GROUPS] + ["tail-8/8/1-p2048-g8-c64"]


def number(case: str, letter: str, default: int) -> int:
    """The number behind `letter` in a case's name, or the default: 512 for "p" in tail-8/8/1-p512-g8."""
    found = re.search(rf"-{letter}(\d+)", case)
    return int(found[1]) if found else default


def shape_of(case: str) -> tuple[int, int, int, int]:
    """(rows of a slice, rollouts to a prompt, prompt tokens, longest completion)."""
    group = number(case, "g", ROWS)
    return max(ROWS, group), group, number(case, "p", PROMPT), number(case, "c", CAP)


def completions(case: str) -> Any:
    from benchmarks.replay import equal, lognormal, uniform

    cap = shape_of(case)[-1]
    return {"tail": lognormal(55, 0.8, cap), "uniform": uniform(1, cap), "equal": equal(128)}[case.split("-")[0]]


def all_cases() -> list[str]:
    extras = ["".join(parts) for parts in itertools.product(("", "-ref"), ("", "-lora"), ("", "-zero3"))]
    return [f"{lengths}-{a}/{s}/{i}{extra}" for lengths in LENGTHS for a, s, i in LOOPS for extra in extras] + SHAPES


# ---- one case, on every rank -------------------------------------------------------------------------------------------


def build_model(folder: Path) -> None:
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from benchmarks.replay import plain_tokenizer

    torch.manual_seed(0)
    Qwen2ForCausalLM(Qwen2Config(**SHAPE, eos_token_id=1, pad_token_id=0, bos_token_id=None)).save_pretrained(folder)
    plain_tokenizer(VOCAB).save_pretrained(folder)


def make_trainer(side: str, case: str, folder: Path, steps: int, seed: int) -> Any:
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import PrinterCallback
    from trl import GRPOTrainer

    from benchmarks.replay import RecordedRollouts, equal, recorded, token_reward
    from grpo_ext import GRPOExtConfig, GRPOExtTrainer

    _, loop, *extras = case.split("-")
    accumulation, slices, iterations = map(int, loop.split("/"))
    rows, group, prompt, cap = shape_of(case)
    args = GRPOExtConfig(
        output_dir=str(folder / "out"),
        use_vllm=True,
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=rows,
        num_generations=group,
        gradient_accumulation_steps=accumulation,
        steps_per_generation=slices,
        num_iterations=iterations,
        beta=0.04 if "ref" in extras else 0.0,
        max_completion_length=cap,
        learning_rate=1e-5,
        lr_scheduler_type="constant",
        max_steps=steps,
        logging_steps=1,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        **({} if "zero3" in extras else {"use_cpu": True}),
        **SIDES[side],
    )
    adapter = LoraConfig(r=8, target_modules="all-linear", init_lora_weights=False) if "lora" in extras else None
    trainer = recorded(GRPOTrainer if side == "trl" else GRPOExtTrainer)(
        str(folder / "model"),
        token_reward,
        args,
        Dataset.from_dict({"prompt": [f"{i}" for i in range(512)]}),
        rollout_func=Timed(RecordedRollouts(VOCAB, completions(case), equal(prompt), seed)),
        peft_config=adapter,
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


class Timed:
    """A rollout_func that keeps count of its own time, wall and CPU."""

    def __init__(self, rollouts: Any):
        self.rollouts, self.wall, self.cpu = rollouts, 0.0, 0.0

    def __call__(self, *args: Any) -> dict[str, list]:
        wall, cpu = time.perf_counter(), time.process_time()
        try:
            return self.rollouts(*args)
        finally:
            self.wall += time.perf_counter() - wall
            self.cpu += time.process_time() - cpu


class PeakMemory:
    """MiB that training took beyond what the process held before: the kernel's high-water mark (Linux, CPU)."""

    def __enter__(self) -> "PeakMemory":
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # the mark starts anew
        self._before = self._read("VmRSS")
        return self

    def __exit__(self, *exc: Any) -> None:
        self.mib = self._read("VmHWM") - self._before

    def _read(self, name: str) -> float:
        return float(re.search(rf"{name}:\s+(\d+)", Path("/proc/self/status").read_text())[1]) / 1024  # type: ignore[index]


def run_once(side: str, case: str, folder: Path, steps: int, seed: int = 0) -> dict[str, Any]:
    """Train `steps` optimizer steps from the same start; seconds without rollouts, peak memory, forwards, gradient norms."""
    import torch

    from benchmarks.replay import ForwardCount

    torch.manual_seed(0)
    trainer = make_trainer(side, case, folder, steps, seed)
    counts, memory = ForwardCount(), PeakMemory()
    with counts.watching(trainer), memory:
        wall, cpu = time.perf_counter(), time.process_time()
        trainer.train()
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    history = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    return {
        "wall_s": wall - trainer.rollout_func.wall,
        "cpu_s": cpu - trainer.rollout_func.cpu,
        "grad_norm": [entry["grad_norm"] for entry in history],
        "loss": [entry["loss"] for entry in history],
        "forwards": counts.counts,
        "peak_mib": memory.mib,
        "real_token_share": [entry["perf/real_token_share"] for entry in history if "perf/real_token_share" in entry],
    }


def steps_of(case: str) -> int:
    """At least three optimizer steps and three generation batches, whole ones."""
    accumulation, slices, iterations = map(int, case.split("-")[1].split("/"))
    steps, lifetime = 3, slices * iterations
    while steps * accumulation % lifetime or steps * accumulation < 3 * lifetime:
        steps += 1
    return steps


def predicted_ratio(case: str) -> float:
    """What the cost model makes of a case with -p, ours / TRL, forward and backward being three forwards. TRL: one more for the old
    log-probs, everything at the width of the generation batch, every position projected."""
    import random

    import torch
    from transformers import Qwen2Config

    from grpo_ext.batch.costs import Costs
    from grpo_ext.batch.padding import Lengths

    rows, group, prompt, _ = shape_of(case)
    slices = int(case.split("-")[1].split("/")[1])
    costs, rng, length, trl, ours = Costs.of(Qwen2Config(**SHAPE)), random.Random(0), completions(case), 0.0, 0.0
    for _ in range(20):
        batch = torch.tensor([length(rng) for _ in range(rows * slices)])
        width = prompt + int(batch.max())
        trl += 4 * len(batch) * (costs.token * width + costs.pair * width**2 + costs.label * width)
        groups = [list(range(start, start + group)) for start in range(0, rows, group)]
        by_length = [Lengths(torch.full((rows,), prompt), part) for part in batch.sort().values.split(rows)]
        by_prompt = [Lengths(torch.full((rows,), prompt), part) for part in batch.split(rows)]
        as_rows, as_trees = sum(map(costs.rows, by_length)), sum(costs.trees(groups, each) for each in by_prompt)
        ours += 3 * min(as_rows, as_trees)
    return ours / trl


def measure(case: str, folder: Path, rounds: int) -> dict[str, Any]:
    """A B A B on this rank, each round with rollouts of its own: ratio of times, work done, how far gradients are apart."""
    steps, shaped = steps_of(case), "-p" in case
    sides = tuple(SIDES) if shaped else ("trl", "ours")
    for side in sides:
        run_once(side, re.sub(r"-p\d+", "", case), folder, 1)
    runs: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
    for seed in range(rounds):
        for side in sides:
            runs[side].append(run_once(side, case, folder, steps, seed))

    def total(side: str, name: str) -> float:
        return sum(run[name] for run in runs[side])

    def ratio(name: str) -> float:
        return total("ours", name) / total("trl", name)

    def count(kind: str, what: str) -> list[int]:
        return [sum(run["forwards"][kind][what] for run in runs[side]) for side in ("trl", "ours")]

    def apart(name: str, relative: bool) -> float:
        both = [
            (a, b)
            for trl, ours in zip(runs["trl"], runs["ours"], strict=True)
            for a, b in zip(trl[name], ours[name], strict=True)
        ]
        return max(abs(b / a - 1) if relative else abs(b - a) for a, b in both)

    pairs = [(a["wall_s"], b["wall_s"]) for a, b in zip(runs["trl"], runs["ours"], strict=True)]
    return {
        "case": case,
        "steps": steps,
        "wall_ratio": ratio("wall_s"),
        "cpu_ratio": ratio("cpu_s"),
        "pair_ratios": [b / a for a, b in pairs],
        "trl_wall_s": [a for a, _ in pairs],
        "ours_wall_s": [b for _, b in pairs],
        "no_grad_rows": count("no_grad", "rows"),
        "reference_rows": count("reference", "rows"),
        "real_token_share": [a / b for a, b in zip(count("grad", "real"), count("grad", "tokens"), strict=True)],
        "grad_norm_apart": apart("grad_norm", relative=True),
        "loss_apart": apart("loss", relative=False),
        "peak_mib": [max(run["peak_mib"] for run in runs[side]) for side in ("trl", "ours")],
        **(shape_results(case, runs, total) if shaped else {}),
    }


def shape_results(case: str, runs: dict[str, list[dict[str, Any]]], total: Any) -> dict[str, Any]:
    """What is measured of a case with -p beside: trees and rows by themselves, and what the cost model predicts."""
    better = {name: min(total("trees", name), total("rows", name)) for name in ("wall_s", "cpu_s")}
    shares = [share for run in runs["ours"] for share in run["real_token_share"]]
    return {
        "predicted": predicted_ratio(case),
        "trees_cpu_ratio": total("trees", "cpu_s") / total("trl", "cpu_s"),
        "rows_cpu_ratio": total("rows", "cpu_s") / total("trl", "cpu_s"),
        "auto_against_better": {name: total("ours", name) / best for name, best in better.items()},
        "distinct_token_share": sum(shares) / len(shares),
    }


# ---- all cases ---------------------------------------------------------------------------------------------------------


def run_case(case: str, folder: Path, rounds: int, threads: int) -> dict[str, Any]:
    """One case in processes of its own, so that none inherits another's memory: one, or two under ZeRO-3."""
    ranks = 2 if case.endswith("zero3") else 1
    python = [sys.executable]
    if ranks > 1:
        launcher = "accelerate.commands.launch"
        config = str(ROOT / "recipes/accelerate/cpu_zero3.yaml")
        python = [sys.executable, "-m", launcher, "--config_file", config, "--main_process_port", "0"]
    command = [*python, __file__, "--worker", case, "--folder", str(folder), "--rounds", str(rounds)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(max(1, threads // ranks)), "PYTHONPATH": str(ROOT)}
    subprocess.run(command, check=True, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL)
    return json.loads((folder / "result.json").read_text())


HEADER = (
    f"{'case':<24}{'wall':>7}{'cpu':>7}{'no-grad rows':>14}{'ref rows':>12}{'real tokens':>14}{'|dgrad|':>10}{'memory':>8}{'TRL s':>8}"
    "  trees and rows (cpu), predicted, auto / better (cpu)"
)


def line(result: dict[str, Any]) -> str:
    trl, ours = result["real_token_share"]
    text = (
        f"{result['case']:<24}{result['wall_ratio']:>7.3f}{result['cpu_ratio']:>7.3f}"
        f"{'{1} / {0}'.format(*result['no_grad_rows']):>14}{'{1} / {0}'.format(*result['reference_rows']):>12}"
        f"{f'{ours:.2f} / {trl:.2f}':>14}{result['grad_norm_apart']:>10.1e}"
        f"{result['peak_mib'][1] / result['peak_mib'][0]:>8.2f}{sum(result['trl_wall_s']):>8.1f}"
    )
    if "predicted" in result:
        text += f"  {result['trees_cpu_ratio']:.3f} {result['rows_cpu_ratio']:.3f}, {result['predicted']:.3f}, "
        text += f"{result['auto_against_better']['cpu_s']:.2f}"
    return text


def plot_shapes(results: list[dict[str, Any]], path: Path) -> None:
    """The ratio over the prompt length: what was measured, and what the cost model predicts for each group size."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4))
    for group, colour in zip(GROUPS, ("#4878a8", "#c44e52", "#55a868"), strict=True):
        shown = {
            shape_of(case)[2]: result["cpu_ratio"]
            for result in results
            if (case := result["case"]).startswith("tail-8/8/1-p") and shape_of(case)[1:4:2] == (group, CAP)
        }
        foreseen = [predicted_ratio(f"tail-8/8/1-p{prompt}-g{group}") for prompt in PROMPTS]
        axes.plot(PROMPTS, foreseen, "--", color=colour, linewidth=1)
        axes.plot(shown.keys(), shown.values(), "o", color=colour, label=f"{group} rollouts to a prompt")
    axes.set_xscale("log", base=2)
    axes.set_xticks(PROMPTS, [str(prompt) for prompt in PROMPTS])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("prompt, tokens")
    axes.set_ylabel("time but generation, ours / TRL 1.16")
    axes.plot([], [], "--", color="#555555", linewidth=1, label="predicted")
    axes.legend(frameon=False)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=150)


def plot(results: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = [result["case"] for result in results][::-1]
    ratios = [result["wall_ratio"] for result in results][::-1]
    figure, axes = plt.subplots(figsize=(7, 0.34 * len(names) + 1.2))
    axes.barh(names, ratios, color="#4878a8")
    axes.axvline(1, color="#555555", linewidth=1)
    for row, ratio in enumerate(ratios):
        axes.text(ratio + 0.01, row, f"{ratio:.2f}", va="center", fontsize=8)
    axes.set_xlim(0, 1.1)
    axes.set_xlabel("wall time without generation, grpo_ext / TRL 1.16 (1 = as long)")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", help="a case by name; may be given several times")
    parser.add_argument("--all", action="store_true", help="every combination, hours")
    parser.add_argument("--shapes", action="store_true", help="prompt lengths and group sizes, hours")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--rounds", type=int, default=2, help="how often A B is repeated")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--output", type=Path, default=RESULTS / "train_side.json")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        result = measure(options.worker, options.folder, options.rounds)
        if os.environ.get("RANK", "0") == "0":
            (options.folder / "result.json").write_text(json.dumps(result))
        return
    cases = options.only or (all_cases() if options.all else SHAPES if options.shapes else DEFAULT)
    if options.list:
        print("\n".join(all_cases()))
        return
    with tempfile.TemporaryDirectory() as folder:
        build_model(Path(folder) / "model")
        print(HEADER)
        results = []
        for case in cases:
            results.append(run_case(case, Path(folder), options.rounds, options.threads))
            print(line(results[-1]), flush=True)
            save(results, options)
    print(f"{options.output}\n{options.output.with_suffix('.png')}")


def save(results: list[dict[str, Any]], options: argparse.Namespace) -> None:
    import torch
    import transformers
    import trl

    versions = {"torch": torch.__version__, "transformers": transformers.__version__, "trl": trl.__version__}
    machine = {"cpu": platform.processor() or platform.machine(), "threads": options.threads}
    made = {
        "slice_rows": ROWS,
        "prompt": PROMPT,
        "cap": CAP,
        "load_average": os.getloadavg(),
        "model": SHAPE,
        "dtype": "float32",
    }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps({**made, **versions, **machine, "rounds": options.rounds, "cases": results}, indent=1))
    plot(results, options.output.with_suffix(".png"))
    shaped = [result for result in results if "predicted" in result]
    if shaped:
        plot_shapes(shaped, options.output.with_name(f"{options.output.stem}_prompts.png"))


if __name__ == "__main__":
    main()
