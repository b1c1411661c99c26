"""The dumps of a directory, checked as they are read: damaged files are named and left out, the rest goes on. Needs numpy only.

- `prob_diff_step_{step}.npy`: float (B, T), |p_rollout - p_actor|, NaN where a token has no log-prob
- `prob_mask_step_{step}.npy`: bool (B, T), the tokens that count
- `prob_tokens_step_{step}.parquet`, optional: one row per token that counts, with its text and both log-probs
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

_NAME = re.compile(r"prob_(diff|mask|tokens)_step_(.*)\.(npy|parquet)")
_KINDS = {("diff", "npy"), ("mask", "npy"), ("tokens", "parquet")}
# What a difference of two probabilities may exceed 1 by, when both were rounded.
_ROUNDING = 1e-3


class DumpError(Exception):
    """No report can be made; the message says why, and what would help."""


class _Damaged(Exception):
    """One file cannot be used: (its name, what is wrong)."""


@dataclass
class Problems:
    """What is wrong, with the files it is wrong with, in the order found."""

    files: dict[str, list[str]] = field(default_factory=dict)

    def add(self, name: str, what: str) -> None:
        self.files.setdefault(what, []).append(name)

    def lines(self) -> list[str]:
        """One line for each fault: `prob_mask_step_0.npy and 499 more: not there`."""
        return [f"{names[0]}{f' and {len(names) - 1} more' if names[1:] else ''}: {what}" for what, names in self.files.items()]


@dataclass(frozen=True)
class StepFiles:
    """Where one step's dump is."""

    step: int
    diff: Path
    mask: Path | None
    tokens: Path | None


@dataclass(frozen=True)
class Dump:
    """One step: `diff_BT` in [0, 1] with NaN where unscored, and the tokens that count."""

    step: int
    diff_BT: np.ndarray
    mask_BT: np.ndarray
    tokens: Path | None


def find_steps(directory: Path, problems: Problems) -> list[StepFiles]:
    """Steps with a prob_diff_step_*.npy, by number. Raises DumpError where there is no directory or no such file."""
    try:
        names = sorted(path.name for path in directory.iterdir())
    except OSError as error:
        raise DumpError(
            f"{directory}: {error.strerror or error}. Give a run's prob_diff_save_dir, which holds prob_diff_step_*.npy."
        ) from None
    found: dict[str, dict[int, Path]] = {"diff": {}, "mask": {}, "tokens": {}}
    for name in names:
        match = _NAME.fullmatch(name)
        if match is None or (match[1], match[3]) not in _KINDS:
            continue
        if not re.fullmatch(r"[0-9]{1,15}", match[2]):
            problems.add(name, "left out: the name has no step number of at most 15 digits, as in prob_diff_step_12.npy")
        elif int(match[2]) in found[match[1]]:
            problems.add(name, f"left out: the same step as {found[match[1]][int(match[2])].name}")
        else:
            found[match[1]][int(match[2])] = directory / name
    for kind in ("mask", "tokens"):
        for step in sorted(found[kind].keys() - found["diff"].keys()):
            problems.add(found[kind][step].name, "left out: no prob_diff_step_*.npy of this step is beside it")
    if not found["diff"]:
        raise DumpError(
            f"{directory} holds no prob_diff_step_*.npy. A run writes them with enable_token_level_prob_diff=True and "
            f"prob_diff_save_dir set to this directory.{_also(problems)}"
        )
    return [
        StepFiles(step, path, found["mask"].get(step), found["tokens"].get(step))
        for step, path in sorted(found["diff"].items())
    ]


def read_dumps(steps: list[StepFiles], problems: Problems) -> Iterator[Dump]:
    """One dump after the other, so that only one is in memory; raises DumpError at the end if none could be read."""
    read = 0
    for files in steps:
        try:
            dump = _read(files, problems)
        except _Damaged as damaged:
            problems.add(*damaged.args)
            continue
        read += 1
        yield dump
    if not read:
        directory = steps[0].diff.parent
        raise DumpError(f"{directory}: none of its {len(steps)} prob_diff_step_*.npy can be used.{_also(problems)}")


def _also(problems: Problems) -> str:
    return "".join(f"\n  {line}" for line in problems.lines())


def _read(files: StepFiles, problems: Problems) -> Dump:
    diff = _load(files.diff, "f", "floats")
    if files.mask is None:
        problems.add(files.diff.name, "no prob_mask_step_*.npy beside it, so padding counts too, and the mean may be too low")
        mask = np.ones(diff.shape, dtype=bool)
    else:
        mask = _load(files.mask, "biuf", "booleans") != 0
        if mask.shape != diff.shape:
            raise _Damaged(files.mask.name, f"step left out: the mask is {mask.shape}, the differences are {diff.shape}")
    counted = diff[mask]
    wrong = np.count_nonzero((counted < 0) | (counted > 1 + _ROUNDING))
    if wrong:
        raise _Damaged(
            files.diff.name, f"step left out: {wrong} values outside [0, 1], which no difference of probabilities can be"
        )
    return Dump(files.step, diff, mask, files.tokens)


def _load(path: Path, kinds: str, wanted: str) -> np.ndarray:
    """A (B, T) array whose dtype is of one of numpy's `kinds`. Never unpickles."""
    if path.is_fifo():
        raise _Damaged(path.name, "step left out: a pipe, which would be waited for")
    try:
        with path.open("rb") as file:
            array = np.load(file, allow_pickle=False)
    except EOFError:
        raise _Damaged(path.name, "step left out: the file is empty") from None
    except OSError as error:
        raise _Damaged(path.name, f"step left out: {error.strerror or error}") from None
    except MemoryError:
        raise _Damaged(path.name, "step left out: damaged, the header promises more than fits into memory") from None
    except Exception as error:  # numpy's parser of a damaged header lets more through than it documents
        if "pickle" in str(error):
            raise _Damaged(path.name, "step left out: no .npy file of numbers, and pickled objects are never loaded") from None
        raise _Damaged(path.name, f"step left out: damaged or cut short ({error})") from None
    if not isinstance(array, np.ndarray):
        raise _Damaged(path.name, "step left out: an archive (.npz), where one array belongs")
    if array.dtype.kind not in kinds:
        raise _Damaged(path.name, f"step left out: dtype {array.dtype}, where {wanted} belong")
    if array.ndim != 2:
        raise _Damaged(path.name, f"step left out: shape {array.shape}, where (rows, tokens) belongs")
    return array
