"""What a report costs: 500 steps of (256, 1024) dumps with their Parquet twins, drawn by `grpo-ext report` in a process of its own.

    python benchmarks/report.py

Prints wall time, peak resident memory and the page's size. A dump's rows end at random lengths; differences are those of float32
rollouts (around 1e-7), with a few steps gone wrong. The dumps take 0.7 GB, plus 1 MB for each Parquet step.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[1]
MIB = 2**20


def write_dumps(directory: Path, steps: int, rows: int, positions: int, tokens_every: int) -> None:
    """Dumps as a run leaves them; a Parquet twin at every `tokens_every`-th step (0: none)."""
    rng = np.random.default_rng(0)
    for step in range(steps):
        mask = np.arange(positions) < rng.integers(1, positions + 1, (rows, 1))
        log_scale = -3 if step % 100 == 60 else -7.5
        diff = np.where(mask, 10 ** rng.normal(log_scale, 0.8, (rows, positions)), 0).clip(0, 1).astype(np.float32)
        np.save(directory / f"prob_diff_step_{step}.npy", diff)
        np.save(directory / f"prob_mask_step_{step}.npy", mask)
        if tokens_every and step % tokens_every == 0:
            write_tokens(directory / f"prob_tokens_step_{step}.parquet", step, diff, mask)


def write_tokens(path: Path, step: int, diff: np.ndarray, mask: np.ndarray) -> None:
    """The Parquet twin of a dump, with made-up tokens whose log-probs differ as `diff` says."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    sample, position = (a.astype(np.int32) for a in np.nonzero(mask))
    token_id = (sample * 31 + position * 7) % 5000
    actor = 0.25 + 0.5 * (token_id % 100) / 100
    columns = {
        "step": np.full(len(sample), step, dtype=np.int64),
        "sample": sample,
        "position": position,
        "token_id": token_id,
        "token_text": [f" t{i}" for i in token_id],
        "rollout_log_prob": np.log(np.clip(actor + diff[mask], 1e-9, 1)).astype(np.float32),
        "old_log_prob": np.log(actor).astype(np.float32),
        "policy_version": np.full(len(sample), step, dtype=np.int32),
        "prompt_id": [f"prompt-{i // 8}" for i in sample],
    }
    pq.write_table(pa.table(columns), path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--positions", type=int, default=1024)
    parser.add_argument("--tokens-every", type=int, default=1, help="Parquet twins at every N-th step; 0 for none")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "report.json")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        directory, page = Path(folder) / "dumps", Path(folder) / "report.html"
        directory.mkdir()
        write_dumps(directory, arguments.steps, arguments.rows, arguments.positions, arguments.tokens_every)
        command = [sys.executable, "-m", "grpo_ext", "report", str(directory), "-o", str(page)]
        start = time.perf_counter()
        subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
        seconds = time.perf_counter() - start
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        peak = used.ru_maxrss / 1024
        results = {
            "steps": arguments.steps,
            "shape": [arguments.rows, arguments.positions],
            "tokens_every": arguments.tokens_every,
            "seconds": seconds,
            "cpu_seconds": used.ru_utime + used.ru_stime,
            "peak_mib": peak,
            "page_mib": page.stat().st_size / MIB,
        }
    print(
        f"{arguments.steps} steps: {seconds:.1f} s ({results['cpu_seconds']:.1f} s of processor time), peak {peak:.0f} MiB resident, page of {results['page_mib']:.1f} MiB"
    )
    arguments.out.parent.mkdir(exist_ok=True)
    arguments.out.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
