"""Follows what rollouts and actor gave the same tokens through a run, at no forward of its own, exact over all ranks.

Sums are kept by mode and reduced once per optimizer step: one SUM and one MAX reduction, which start after the step's last
forward and travel while its backward runs. What was gathered between two steps belongs to one policy version, since rollouts are
only compared at the version that generated them.
"""

from collections import deque
from dataclasses import dataclass
from typing import Any

import torch

from grpo_ext import ranks
from grpo_ext.consistency import keys
from grpo_ext.consistency.prob_diff import diff_grid, token_diff
from grpo_ext.consistency.sums import ConsistencySums, consistency_metrics, consistency_sums
from grpo_ext.rules.consistency import REMEMBERED

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
    """One per trainer. `observe` rows as their actor log-probs become known, `send` after a step's last forward, `close` at its
    end, `drain` at a log."""

    def __init__(self, accelerator: Any):
        self._accelerator = accelerator
        self._open: dict[str, ConsistencySums] = {}  # of this rank
        self._sent: _Sent | None = None  # of a training step, on its way
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
        self.reports: deque[VersionReport] = deque(maxlen=REMEMBERED)  # of this process
        self.means: deque[float] = deque(maxlen=REMEMBERED)  # mean differences, kept over a resume

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

    def send(self) -> None:
        """Start to reduce what was observed in training, where no reduction is under way. A collective: ranks observe alike, in
        slices of equal number, so either all of them have something to send."""
        if self._sent is None and "train" in self._open:
            self._sent = _Sent(self._accelerator, self._open.pop("train"), self._cells)
            self._cells = None

    def close(self, step: int) -> VersionReport | None:
        """The report of what was observed in training since the last step; None if nothing was. A collective, once per step."""
        if self._closed_step != step:
            self._closed_step = step
            self.closed_rows, self._rows = self._rows, []
            sums = self._received()
            if sums is not None:
                metrics = consistency_metrics(sums)
                self.reports.append(VersionReport(step, self._version, metrics))
                if keys.MEAN in metrics:
                    self.means.append(metrics[keys.MEAN])
        return self.reports[-1] if self.reports and self.reports[-1].step == step else None

    def _received(self) -> ConsistencySums | None:
        """The training sums of all ranks that are not in `_closed` yet, put there; None where nothing was observed."""
        found: ConsistencySums | None = None
        grid: dict[str, float] = {}
        self.send()
        while self._sent is not None:  # twice, where rows were observed after the step's last forward
            sums, cells = self._sent.received()
            found = found + sums if found is not None else sums
            if cells is not None:
                grid |= diff_grid(cells, cells != NO_CELL, cells.size(1), cells.size(0))
            self._sent = None
            self.send()
        if found is not None:
            self._add("train", found)
            self._grid = grid
        return found

    def _add(self, mode: str, sums: ConsistencySums) -> None:
        self._closed[mode] = self._closed[mode] + sums if mode in self._closed else sums

    def drain(self, mode: str) -> dict[str, float]:
        """Metrics of all that was observed in `mode` since the last call; {} where nothing was. A collective."""
        if mode == "train":
            self._received()
        elif mode in self._open:
            self._add(mode, _Sent(self._accelerator, self._open.pop(mode), None).received()[0])
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
        """What an earlier `train()` left over, cut off within a step, belongs to another run."""
        self._open.pop("train", None)
        self._sent = self._cells = self._closed_step = None
        self._rows, self.closed_rows = [], []
        self.reports.clear()
        self.means.clear()

    # ---- over a resume -----------------------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        sums = {mode: {"sums": of.sums, "maxima": of.maxima} for mode, of in self._closed.items()}
        return {"closed": sums, "version": self._version, "grid": self._grid, "means": list(self.means)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._closed = {mode: ConsistencySums(**sums) for mode, sums in state["closed"].items()}
        self._version, self._grid = state["version"], state["grid"]
        self.means.extend(state["means"])


class _Sent:
    """Sums of this rank, and single tokens of a step, on their way to all ranks: a token is known to one rank, the others have less."""

    def __init__(self, accelerator: Any, mine: ConsistencySums, cells: torch.Tensor | None):
        self._maxima, self._shape = len(mine.maxima), cells.shape if cells is not None else None
        maxima = torch.cat([mine.maxima, cells.flatten()]) if cells is not None else mine.maxima
        self._reduction = ranks.Reduction(accelerator, mine.sums, maxima)

    def received(self) -> tuple[ConsistencySums, torch.Tensor | None]:
        sums, maxima = self._reduction.result()
        cells = maxima[self._maxima :].reshape(self._shape) if self._shape is not None else None
        return ConsistencySums(sums, maxima[: self._maxima]), cells


def _unpadded(ids: torch.Tensor, mask: torch.Tensor) -> list[list[int]]:
    return [row[real].tolist() for row, real in zip(ids, mask.bool(), strict=True)]
