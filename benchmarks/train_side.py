"""What a training step costs beside generation: stock TRL and grpo_ext on identical recorded rollouts, interleaved A B A B.

    python benchmarks/train_side.py                  # the table of docs/old_logps.md, about half an hour on two cores
    python benchmarks/train_side.py --only tail-8/8/1 --only equal-8/8/1
    python benchmarks/train_side.py --list           # names of all cases; --all runs every one

A case is named lengths-accumulation/steps_per_generation/iterations, then -ref (a reference model), -lora, -zero3 (two ranks).
Every trainer is warmed up by a step of its own; then both train the same optimizer steps from the same weights, in turns. Time
is the wall time of training without the rollouts, and the CPU time beside it, which other work on the machine does not touch.
The results go to benchmarks/results/train_side.json, and a picture beside it."""

import argparse
import itertools
import json
import os
import platform
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
    max_position_embeddings=1024,
    tie_word_embeddings=True,
)
LENGTHS = ("tail", "uniform", "equal")
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


def all_cases() -> list[str]:
    extras = ["".join(parts) for parts in itertools.product(("", "-ref"), ("", "-lora"), ("", "-zero3"))]
    return [f"{lengths}-{a}/{s}/{i}{extra}" for lengths in LENGTHS for a, s, i in LOOPS for extra in extras]


# ---- one case, on every rank -------------------------------------------------------------------------------------------


def build_model(folder: Path) -> None:
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from benchmarks.replay import plain_tokenizer

    torch.manual_seed(0)
    Qwen2ForCausalLM(Qwen2Config(**SHAPE, eos_token_id=1, pad_token_id=0, bos_token_id=None)).save_pretrained(folder)
    plain_tokenizer(VOCAB).save_pretrained(folder)


def make_trainer(kind: str, case: str, folder: Path, steps: int, seed: int) -> Any:
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import PrinterCallback
    from trl import GRPOTrainer

    from benchmarks.replay import RecordedRollouts, equal, lognormal, recorded, token_reward, uniform
    from grpo_ext import GRPOExtConfig, GRPOExtTrainer

    lengths, loop, *extras = case.split("-")
    accumulation, slices, iterations = map(int, loop.split("/"))
    completion = {"tail": lognormal(55, 0.8, CAP), "uniform": uniform(1, CAP), "equal": equal(128)}[lengths]
    args = GRPOExtConfig(
        output_dir=str(folder / "out"),
        use_vllm=True,
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=ROWS,
        num_generations=ROWS,
        gradient_accumulation_steps=accumulation,
        steps_per_generation=slices,
        num_iterations=iterations,
        beta=0.04 if "ref" in extras else 0.0,
        max_completion_length=CAP,
        learning_rate=1e-5,
        lr_scheduler_type="constant",
        max_steps=steps,
        logging_steps=1,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        **({} if "zero3" in extras else {"use_cpu": True}),
    )
    adapter = LoraConfig(r=8, target_modules="all-linear", init_lora_weights=False) if "lora" in extras else None
    trainer = recorded(GRPOTrainer if kind == "trl" else GRPOExtTrainer)(
        str(folder / "model"),
        token_reward,
        args,
        Dataset.from_dict({"prompt": [f"{i}" for i in range(512)]}),
        rollout_func=Timed(RecordedRollouts(VOCAB, completion, equal(PROMPT), seed)),
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


def run_once(kind: str, case: str, folder: Path, steps: int, seed: int = 0) -> dict[str, Any]:
    """Train `steps` optimizer steps from the same start; seconds without rollouts, forwards, per-step gradient norms."""
    import torch

    from benchmarks.replay import ForwardCount

    torch.manual_seed(0)
    trainer = make_trainer(kind, case, folder, steps, seed)
    counts = ForwardCount()
    with counts.watching(trainer):
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
    }


def steps_of(case: str) -> int:
    """At least three optimizer steps and three generation batches, whole ones."""
    accumulation, slices, iterations = map(int, case.split("-")[1].split("/"))
    steps, lifetime = 3, slices * iterations
    while steps * accumulation % lifetime or steps * accumulation < 3 * lifetime:
        steps += 1
    return steps


def measure(case: str, folder: Path, rounds: int) -> dict[str, Any]:
    """A B A B on this rank, each round with rollouts of its own: ratio of times, work done, how far gradients are apart."""
    steps = steps_of(case)
    for kind in ("trl", "ours"):
        run_once(kind, case, folder, 1)
    runs: dict[str, list[dict[str, Any]]] = {"trl": [], "ours": []}
    for seed in range(rounds):
        for kind in ("trl", "ours"):
            runs[kind].append(run_once(kind, case, folder, steps, seed))

    def ratio(name: str) -> float:
        return sum(run[name] for run in runs["ours"]) / sum(run[name] for run in runs["trl"])

    def count(kind: str, what: str) -> list[int]:
        return [sum(run["forwards"][kind][what] for run in runs[side]) for side in ("trl", "ours")]

    def apart(name: str, relative: bool) -> float:
        both = [(a, b) for trl, ours in zip(*runs.values(), strict=True) for a, b in zip(trl[name], ours[name], strict=True)]
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


HEADER = f"{'case':<24}{'wall':>7}{'cpu':>7}{'no-grad rows':>14}{'ref rows':>12}{'real tokens':>14}{'|dgrad|':>10}{'TRL s':>8}"


def line(result: dict[str, Any]) -> str:
    trl, ours = result["real_token_share"]
    return (
        f"{result['case']:<24}{result['wall_ratio']:>7.3f}{result['cpu_ratio']:>7.3f}"
        f"{'{1} / {0}'.format(*result['no_grad_rows']):>14}{'{1} / {0}'.format(*result['reference_rows']):>12}"
        f"{f'{ours:.2f} / {trl:.2f}':>14}{result['grad_norm_apart']:>10.1e}{sum(result['trl_wall_s']):>8.1f}"
    )


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
    cases = options.only or (all_cases() if options.all else DEFAULT)
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
    made = {"slice_rows": ROWS, "prompt": PROMPT, "cap": CAP, "model": SHAPE, "dtype": "float32"}
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps({**made, **versions, **machine, "rounds": options.rounds, "cases": results}, indent=1))
    plot(results, options.output.with_suffix(".png"))


if __name__ == "__main__":
    main()
