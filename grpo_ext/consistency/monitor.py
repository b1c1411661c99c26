"""Follows what rollouts and actor gave the same tokens through a run, at no forward of its own, exact over all ranks.

Sums are kept by mode and reduced when an optimizer step ends: one SUM and one MAX reduction. What was gathered between two
steps belongs to one policy version, since rollouts are only compared at the version that generated them.
"""

from collections import deque
from dataclasses import dataclass
from typing import Any

import torch

from grpo_ext import ranks
from grpo_ext.consistency import keys
from grpo_ext.consistency.prob_diff import diff_grid, token_diff
from grpo_ext.consistency.sums import ConsistencySums, consistency_metrics, consistency_sums

HISTORY, REMEMBERED = 1000, 50  # versions kept, and kept over a resume
NO_CELL = -1.0


@dataclass(frozen=True)
class VersionReport:
    """What one policy version's rollouts gave: the step that ended it, the version, metrics by the names of `keys`."""

    step: int
    version: int
    metrics: dict[str, float]


@dataclass(frozen=True)
class ObservedRows:
    """Rows of one rank with what a dump needs: mu, pi, mask, ids (B, T); row_id (B,); prompts, one list of ids per row;
    which generation batch of the run they belong to."""

    mu: torch.Tensor
    pi: torch.Tensor
    mask: torch.Tensor
    ids: torch.Tensor
    row_id: torch.Tensor
    prompts: list[list[int]]
    version: int
    generation: int


class ProbDiffMonitor:
    """One per trainer. `observe` rows as their actor log-probs become known, `close` at a step's end, `drain` at a log."""

    def __init__(self, accelerator: Any):
        self._accelerator = accelerator
        self._open: dict[str, ConsistencySums] = {}  # of this rank
        self._closed: dict[str, ConsistencySums] = {}  # of all ranks, since the last log
        self._version = -1
        self._closed_step: int | None = None
        self.keeps_rows = False
        self.grid_shape = (0, 0)  # rows and positions whose single tokens are logged
        self.generation = 0  # number of the generation batch that rows come from
        self._newest: tuple[torch.Tensor, torch.Tensor] | None = None
        self._rows: list[ObservedRows] = []
        self.closed_rows: list[ObservedRows] = []  # what the last report is made of, where rows are kept
        self._cells: torch.Tensor | None = None  # of this rank and step, NO_CELL where another rank has the token or none
        self._grid: dict[str, float] = {}
        self.reports: deque[VersionReport] = deque(maxlen=HISTORY)

    def observe(self, mode: str, version: int, rows: dict[str, Any], mask: torch.Tensor, weights: torch.Tensor | None) -> None:
        """Add rollouts of policy `version`: `rows` with both log-probs, the loss mask, and the importance weights in use."""
        mu, pi = rows["sampling_per_token_logps"], rows["old_per_token_logps"]
        sums = consistency_sums(mu, pi, mask, weights)
        self._open[mode] = self._open[mode] + sums if mode in self._open else sums
        if mode != "train":
            return
        self._version = max(self._version, version)
        self._newest = rows["prompt_ids"], rows["prompt_mask"]
        self._keep_cells(rows, mu, pi, mask)
        if self.keeps_rows and "row_id" in rows:
            ids, row_id = rows["completion_ids"], rows["row_id"]
            self._rows.append(
                ObservedRows(mu, pi, mask.bool(), ids, row_id, _unpadded(*self._newest), version, self.generation)
            )

    def _keep_cells(self, rows: dict[str, Any], mu: torch.Tensor, pi: torch.Tensor, mask: torch.Tensor) -> None:
        """Single tokens of the step's first generation batch, by their place in it over all ranks."""
        samples, tokens = self.grid_shape
        if not samples * tokens or "row_id" not in rows:
            return
        if self._cells is None:
            self._cells = mu.new_full((samples, tokens), NO_CELL, dtype=torch.float64)
            self._cells_of = self.generation
        if self._cells_of != self.generation:
            return
        first = rows["row_id"] < samples
        d = token_diff(mu[first, :tokens], pi[first, :tokens], mask[first, :tokens])
        shown = mask[first, :tokens].bool() & ~d.isnan()
        self._cells[rows["row_id"][first], : d.size(1)] = torch.where(shown, d.double(), NO_CELL)

    def close(self, step: int) -> VersionReport | None:
        """The report of what was observed in training since the last step; None if nothing was. A collective, once per step."""
        if self._closed_step != step:
            self._closed_step = step
            self.closed_rows, self._rows = self._rows, []
            if self._reduce("train"):
                self.reports.append(VersionReport(step, self._version, consistency_metrics(self._last)))
        return self.reports[-1] if self.reports and self.reports[-1].step == step else None

    def _reduce(self, mode: str) -> bool:
        """Reduce what is open. Ranks observe alike, in slices of equal number, so either all of them get past the first line."""
        if mode not in self._open:
            return False
        mine = self._open.pop(mode)
        cells = self._cells if mode == "train" and self._cells is not None else mine.maxima.new_zeros(0, 0)
        maxima = torch.cat([mine.maxima, cells.flatten()])  # a cell is known to one rank: the others have less
        sums, maxima = ranks.reduced(self._accelerator, mine.sums, maxima)
        self._last = ConsistencySums(sums, maxima[: len(mine.maxima)])
        if mode == "train":
            cells = maxima[len(mine.maxima) :].reshape(cells.shape)
            self._grid = diff_grid(cells, cells != NO_CELL, cells.size(1), cells.size(0))
            self._cells = None
        self._closed[mode] = self._closed[mode] + self._last if mode in self._closed else self._last
        return True

    def drain(self, mode: str) -> dict[str, float]:
        """Metrics of all that was observed in `mode` since the last call; {} where nothing was. A collective."""
        self._reduce(mode)
        if mode not in self._closed:
            return {}
        metrics = consistency_metrics(self._closed.pop(mode))
        if mode == "train":
            metrics |= {keys.VERSION: float(self._version)} | self._grid
            self._grid = {}
        return metrics

    def newest_prompts(self) -> list[list[int]]:
        """Token ids of the prompts of the rows observed last, on this rank."""
        return _unpadded(*self._newest) if self._newest is not None else []

    def train_begins(self) -> None:
        self.reports.clear()

    # ---- over a resume -----------------------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        sums = {mode: {"sums": of.sums, "maxima": of.maxima} for mode, of in self._closed.items()}
        reports = [[report.step, report.version, report.metrics] for report in list(self.reports)[-REMEMBERED:]]
        return {"closed": sums, "version": self._version, "grid": self._grid, "reports": reports}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._closed = {mode: ConsistencySums(**sums) for mode, sums in state["closed"].items()}
        self._version, self._grid = state["version"], state["grid"]
        self.reports.extend(VersionReport(*report) for report in state["reports"])


def _unpadded(ids: torch.Tensor, mask: torch.Tensor) -> list[list[int]]:
    return [row[real].tolist() for row, real in zip(ids, mask.bool(), strict=True)]
