"""All that the page and the picture show of a run: its steps, its worst tokens, the verdict, what is wrong with its files."""

import heapq
from dataclasses import dataclass
from pathlib import Path

from grpo_ext.consistency.report.read import Problems, StepFiles, read_dumps
from grpo_ext.consistency.report.summary import StepSummary, WorstToken, summarize
from grpo_ext.consistency.report.tokens import TokenFacts, read_tokens

# The pictures of all steps share this many cells, one byte each, so that the page keeps its size over hundreds of steps.
_CELLS = 8_000_000
_CELLS_OF_A_STEP = 65_536
_WORST_OF_RUN = 20


@dataclass(frozen=True)
class Thresholds:
    """On the mean of a step: above `warn` it is marked, above `stop` (if given) a run would be stopped."""

    warn: float
    stop: float | None


@dataclass(frozen=True)
class Run:
    """A run. `facts` by step, then by (sample, position); no entry for a step without a readable Parquet file."""

    directory: Path
    steps: list[StepSummary]
    facts: dict[int, dict[tuple[int, int], TokenFacts]]
    problems: Problems
    thresholds: Thresholds

    @property
    def worst(self) -> list[WorstToken]:
        return heapq.nlargest(
            _WORST_OF_RUN, (token for step in self.steps for token in step.worst), key=lambda token: token.diff
        )

    @property
    def worst_step(self) -> int:
        """Index of the step with the highest mean: the one to look at first."""
        return max(range(len(self.steps)), key=lambda i: self.steps[i].mean or 0.0)


def read_run(directory: Path, files: list[StepFiles], problems: Problems, thresholds: Thresholds) -> Run:
    """Read and summarize every dump, one at a time. Raises DumpError where none can be used."""
    max_cells = max(1, min(_CELLS_OF_A_STEP, _CELLS // len(files)))
    steps, facts = [], {}
    for dump in read_dumps(files, problems):
        summary = summarize(dump.step, dump.diff_BT, dump.mask_BT, max_cells=max_cells)
        steps.append(summary)
        if dump.tokens is not None:
            read = read_tokens(dump.tokens, summary.worst, summary.tokens + summary.unscored, problems)
            if read is not None:
                facts[dump.step] = read
    return Run(directory, steps, facts, problems, thresholds)


def verdict(steps: list[StepSummary], thresholds: Thresholds) -> tuple[str, str]:
    """("healthy" | "warn" | "stop" | "unknown", one sentence)."""
    scored = [(s.step, s.mean, s.tokens) for s in steps if s.mean is not None]
    if not scored:
        return "unknown", "no token was scored on both sides: nothing can be said"
    above = [(step, mean) for step, mean, _ in scored if mean > thresholds.warn]
    over = [(step, mean) for step, mean in above if thresholds.stop is not None and mean > thresholds.stop]
    level = "stop" if over else "warn" if above else "healthy"
    mean = sum(mean * tokens for _, mean, tokens in scored) / sum(tokens for _, _, tokens in scored)
    if not above:
        text = f"mean {mean:.3g}, healthy: below {thresholds.warn:g}"
        text += f" at each of {len(scored)} steps" if len(scored) > 1 else ""
    elif len(scored) == 1:
        text = f"mean {mean:.3g}, above {thresholds.stop if over else thresholds.warn:g}"
    else:
        text = f"{len(above)} of {len(scored)} steps above {thresholds.warn:g}, first at step {above[0][0]} (mean {above[0][1]:.3g})"
        if over:
            text += f"; {len(over)} above {thresholds.stop:g}, first at step {over[0][0]} (mean {over[0][1]:.3g})"
    blank = len(steps) - len(scored)
    return level, text + (f"; {blank} step{'s' if blank > 1 else ''} without a scored token" if blank else "")
