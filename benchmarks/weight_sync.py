"""What a weight push costs: a 24-layer model of 50M parameters, pushed into the colocated engine.

    python benchmarks/weight_sync.py

The yardstick is TRL's own loop where it can run (GPUs), else a plain copy of the same bytes, interleaved with ours in one
process. Peak extra memory is that of one push on two ZeRO-3 ranks, against the size of a bucket.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from grpo_ext.quiet import quiet

quiet()

MIB = 2**20
SHAPE = dict(
    hidden_size=384, intermediate_size=1152, num_hidden_layers=24, num_attention_heads=6, num_key_value_heads=6, vocab_size=8192
)


def build_trainer(model: str, out: str, bucket_mb: float, lora: bool, sync: str = "merged", cpu: bool = True):
    from peft import LoraConfig

    from grpo_ext import GRPOExtConfig, GRPOExtTrainer
    from tests.tiny import config_kwargs, distinct_characters, sums

    kwargs = config_kwargs(out, use_vllm=True, weight_sync_bucket_mb=bucket_mb, vllm_weight_sync=sync, max_steps=1)
    if not cpu:
        del kwargs["use_cpu"]
    peft_config = LoraConfig(r=16, target_modules="all-linear") if lora else None
    return GRPOExtTrainer(model, distinct_characters, GRPOExtConfig(**kwargs), sums(), peft_config=peft_config)


def trl_push(engine) -> bool:
    """TRL's loop, once; False where it cannot run (on CPU: packed layers have no weight_loader)."""
    from trl.generation.vllm_generation import VLLMGeneration

    try:
        VLLMGeneration.sync_weights(engine)
        return True
    except AttributeError:
        return False


def plain_copy(model, targets) -> None:
    for parameter, target in zip(model.parameters(), targets, strict=True):
        target.copy_(parameter)


def measure_time(model: str, out: str, rounds: int) -> dict:
    import torch

    results = {}
    for name, lora, sync in (("full", False, "merged"), ("lora, merged", True, "merged"), ("lora, adapter", True, "adapter")):
        trainer = build_trainer(model, out, 512, lora, sync)
        engine = trainer.vllm_generation
        targets = [torch.empty_like(p) for p in trainer.model.parameters()]
        engine.sync_weights()
        yardstick = "plain copy"
        if torch.cuda.is_available() and sync == "merged" and trl_push(engine):
            yardstick = "TRL's loop"
        ours, theirs = [], []
        with torch.no_grad():
            for _ in range(rounds):
                start = time.perf_counter()
                engine.sync_weights()
                ours.append(time.perf_counter() - start)
                start = time.perf_counter()
                if yardstick == "plain copy":
                    plain_copy(trainer.model, targets)
                else:
                    trl_push(engine)
                theirs.append(time.perf_counter() - start)
        size = sum(p.numel() * p.element_size() for p in trainer.model.parameters())
        results[name] = {
            "push_s": statistics.median(ours),
            "yardstick": yardstick,
            "yardstick_s": statistics.median(theirs),
            "ratio": statistics.median(a / b for a, b in zip(ours, theirs, strict=True)),
            "model_mib": size / MIB,
        }
        r = results[name]
        print(
            f"{name:>14}: push {r['push_s']:.3f} s, {yardstick} {r['yardstick_s']:.3f} s, ratio {r['ratio']:.1f} "
            f"({r['model_mib']:.0f} MiB of weights)",
            flush=True,
        )
        trainer.vllm_generation = None
    return results


def peak_of(action) -> tuple[float, float]:
    """(peak extra resident memory in MiB, seconds) of `action`, by the kernel's own high-water mark."""
    import ctypes
    import gc

    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    start = time.perf_counter()
    action()
    seconds = time.perf_counter() - start
    return _status("VmHWM") - before, seconds


def _status(field: str) -> float:
    line = next(entry for entry in Path("/proc/self/status").read_text().splitlines() if entry.startswith(field))
    return int(line.split()[1]) / 1024


def zero3_job(model: str, out: str, bucket_mb: float) -> dict:
    """On each of two ZeRO-3 ranks: the peak of a push (the second one, when all that is allocated once is there)."""
    report, kept = {}, []
    for name, lora in (("full", False), ("lora, merged", True)):
        trainer = build_trainer(model, out, bucket_mb, lora, cpu=False)
        kept.append(trainer)  # an engine that is collected takes the process group with it
        engine = trainer.vllm_generation
        trainer.train()  # DeepSpeed partitions when training starts
        engine.sync_weights()
        peak, seconds = peak_of(engine.sync_weights)
        report[name] = {"peak_mib": peak, "push_s": seconds}
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--bucket-mb", type=float, default=32)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "weight_sync.json")
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "2")
    # Freed memory goes back at once, so that resident memory is what is alive: kept by malloc it would hide a peak.
    os.environ.update(MALLOC_MMAP_THRESHOLD_="65536", MALLOC_TRIM_THRESHOLD_="0", MALLOC_ARENA_MAX="1")
    from tests.distributed.launch import run_ranks
    from tests.tiny import build_model

    with tempfile.TemporaryDirectory() as folder:
        model = str(build_model(Path(folder) / "model", **SHAPE))
        results = {"times": measure_time(model, folder, arguments.rounds)}
        ranks = run_ranks(
            "benchmarks.weight_sync:zero3_job",
            Path(folder) / "ranks",
            timeout=500,
            model=model,
            out=folder,
            bucket_mb=arguments.bucket_mb,
        )
    results["zero3"] = {"bucket_mib": arguments.bucket_mb, "ranks": ranks}
    for rank, report in enumerate(ranks):
        for name, r in report.items():
            print(
                f"ZeRO-3 rank {rank}, {name}: peak extra {r['peak_mib']:.0f} MiB = {r['peak_mib'] / arguments.bucket_mb:.2f} "
                f"buckets of {arguments.bucket_mb:.0f} MiB, {r['push_s']:.2f} s",
                flush=True,
            )
    arguments.out.parent.mkdir(exist_ok=True)
    arguments.out.write_text(json.dumps(results, indent=2) + "\n")
    print(f"written to {arguments.out}")


if __name__ == "__main__":
    main()
