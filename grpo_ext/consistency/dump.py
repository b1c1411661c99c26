"""The differences of a step, token by token, on disk: a pair of .npy files and, on request, a Parquet twin with the tokens' text.

    prob_diff_step_{step}.npy      float32 (B, T): 0 where masked, NaN where a token that counts was not scored
    prob_mask_step_{step}.npy      bool (B, T)
    prob_tokens_step_{step}.parquet   one row per token that counts

Every file is written under a temporary name and renamed, the diff last: a kill leaves the old file or the new one, and a diff
whose mask is there.
"""

import os
import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

import numpy as np

from grpo_ext.consistency import keys
from grpo_ext.files import replacing

_STEP = re.compile(r"prob_(?:diff|mask|tokens)_step_(\d+)\.(?:npy|parquet)")


@dataclass(frozen=True)
class TokenRecords:
    """What the Parquet twin adds to a pair: arrays (B, T), `prompt_id` one string per row, `version` (B,)."""

    token_id: np.ndarray
    rollout_log_prob: np.ndarray
    old_log_prob: np.ndarray
    version: np.ndarray
    prompt_id: list[str]


def write_pair(directory: str | PathLike[str], step: int, diff_BT: np.ndarray, mask_BT: np.ndarray) -> list[Path]:
    """Write the .npy pair of a step and return the paths, the directory made if need be."""
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    mask, diff = folder / keys.MASK_FILE.format(step=step), folder / keys.DIFF_FILE.format(step=step)
    for path, array in ((mask, mask_BT.astype(bool)), (diff, diff_BT.astype(np.float32))):
        with replacing(path) as unfinished, open(unfinished, "wb") as file:
            np.save(file, array, allow_pickle=False)
    return [diff, mask]


def write_tokens(
    directory: str | PathLike[str], step: int, mask_BT: np.ndarray, records: TokenRecords, text_of: Callable[[int], str]
) -> Path:
    """Write the Parquet twin: step, sample, position, token_id, token_text, both log-probs, policy_version, prompt_id."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise ImportError("prob_diff_save_tokens=True writes Parquet. Run: pip install 'grpo-ext[report]'") from error
    sample, position = np.nonzero(mask_BT)
    ids = records.token_id[sample, position]
    distinct, at = np.unique(ids, return_inverse=True)
    texts = np.array([text_of(int(i)) for i in distinct], dtype=object)
    table = pa.table(
        {
            "step": pa.array(np.full(len(ids), step, dtype=np.int64)),
            "sample": pa.array(sample.astype(np.int32)),
            "position": pa.array(position.astype(np.int32)),
            "token_id": pa.array(ids.astype(np.int32)),
            "token_text": pa.array(texts[at], type=pa.string()),
            "rollout_log_prob": pa.array(records.rollout_log_prob[sample, position].astype(np.float32)),
            "old_log_prob": pa.array(records.old_log_prob[sample, position].astype(np.float32)),
            "policy_version": pa.array(records.version[sample].astype(np.int32)),
            "prompt_id": pa.array([records.prompt_id[i] for i in sample], type=pa.string()),
        }
    )
    path = Path(directory) / keys.TOKENS_FILE.format(step=step)
    with replacing(path) as unfinished:
        pq.write_table(table, unfinished, compression="zstd")
    return path


def files_by_step(directory: str | PathLike[str]) -> dict[int, list[Path]]:
    """The dumps in a directory."""
    files: dict[int, list[Path]] = {}
    for path in Path(directory).iterdir():
        if match := _STEP.fullmatch(path.name):
            files.setdefault(int(match[1]), []).append(path)
    return files


def keep_last(directory: str | PathLike[str], steps: int) -> None:
    """Delete the files of all but the `steps` steps written last. Where two were written at once, the higher number is the later.

    Not the highest numbers: a run in the directory of an earlier, longer one would delete what it has just written.
    """
    files = files_by_step(directory)
    written = {step: max(path.stat().st_mtime_ns for path in paths) for step, paths in files.items()}
    for step in sorted(files, key=lambda step: (written[step], step))[:-steps]:
        for path in files[step]:
            path.unlink(missing_ok=True)


def check_writable(directory: str | PathLike[str], output_dir: str | PathLike[str]) -> str | None:
    """Make the directory of the dumps and try it; what is wrong with it, or None.

    Only its last part is made, unless it lies in `output_dir`: a directory whose parent is missing is taken for a typing error.
    """
    folder = Path(directory)
    inside = Path(os.path.abspath(folder)).is_relative_to(os.path.abspath(output_dir))
    if not (folder.exists() or inside or folder.absolute().parent.is_dir()):
        return f"its parent {folder.absolute().parent} does not exist. Make it, or name a directory below output_dir"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return None
    except OSError as error:
        return f"nothing can be written there ({error.strerror or error}). Name a directory this process may write to"
