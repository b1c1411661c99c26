"""Dumps as a run writes them, from literal values."""

from pathlib import Path

import numpy as np


def write_dump(directory: Path, step: int, diff, mask=None) -> None:
    """The .npy pair of a step; everything counts unless a mask is given."""
    diff = np.asarray(diff, dtype=np.float32)
    mask = np.ones(diff.shape, dtype=bool) if mask is None else np.asarray(mask, dtype=bool)
    np.save(directory / f"prob_diff_step_{step}.npy", np.where(mask, diff, 0).astype(np.float32))
    np.save(directory / f"prob_mask_step_{step}.npy", mask)


def write_tokens(directory: Path, step: int, texts: dict[tuple[int, int], str], drop: tuple[str, ...] = ()) -> Path:
    """The Parquet twin: a row for each (sample, position); the engine gives 0.5, the actor 0.25."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    size = len(texts)
    columns = {
        "step": pa.array([step] * size, pa.int64()),
        "sample": pa.array([sample for sample, _ in texts], pa.int32()),
        "position": pa.array([position for _, position in texts], pa.int32()),
        "token_id": pa.array(range(100, 100 + size), pa.int32()),
        "token_text": pa.array(texts.values(), pa.string()),
        "rollout_log_prob": pa.array(np.full(size, np.log(0.5), dtype=np.float32)),
        "old_log_prob": pa.array(np.full(size, np.log(0.25), dtype=np.float32)),
        "policy_version": pa.array([step] * size, pa.int32()),
        "prompt_id": pa.array([f"prompt {sample}" for sample, _ in texts], pa.string()),
    }
    path = directory / f"prob_tokens_step_{step}.parquet"
    pq.write_table(pa.table({name: column for name, column in columns.items() if name not in drop}), path)
    return path
