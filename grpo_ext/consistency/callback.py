"""ProbDiffCallback: dumps the differences of single tokens, warns when rollouts and actor part, and stops the run if asked to."""

from itertools import islice
from typing import Any

import numpy as np
import torch
from accelerate.logging import get_logger
from transformers import TrainerCallback

from grpo_ext import ranks
from grpo_ext.consistency import keys
from grpo_ext.consistency.dump import TokenRecords, check_writable, keep_last, write_pair, write_tokens
from grpo_ext.consistency.monitor import ObservedRows, VersionReport
from grpo_ext.consistency.prob_diff import token_diff
from grpo_ext.notices import Notices
from grpo_ext.rollout.seeds import prompt_key

logger = get_logger(__name__)  # the main process speaks for all


class ProbDiffCallback(TrainerCallback):
    """Decides on what the monitor of a `GRPOExtTrainer` measured. The trainer attaches one by itself, set as its config says;
    one of your own, given in `callbacks` or to `add_callback`, takes its place.

    Args (the fields of `GRPOExtConfig`; probabilities in [0, 1]):
        enable_token_level_prob_diff: log the differences of the first tokens, and dump all of them to `prob_diff_save_dir`.
        prob_diff_save_dir: where to; written by the main process, for the rows of all ranks in the order of generation.
        prob_diff_token_max_print, prob_diff_sample_max_print: positions and rows that are logged.
        prob_diff_warn: mean difference above which a warning names the likely cause; None never warns.
        prob_diff_stop: mean difference above which training stops, with a checkpoint; None never stops.
        prob_diff_patience: policy versions in a row above `prob_diff_stop` before it does.
        prob_diff_keep_last: steps of which dumps are kept.
        prob_diff_save_tokens: a Parquet file beside each dump, with the tokens and both log-probs.

    Everything it decides on is reduced over ranks, so all of them decide alike.
    """

    def __init__(
        self,
        *,
        enable_token_level_prob_diff: bool = False,
        prob_diff_save_dir: str | None = None,
        prob_diff_token_max_print: int = 10,
        prob_diff_sample_max_print: int = 8,
        prob_diff_warn: float | None = 0.005,
        prob_diff_stop: float | None = None,
        prob_diff_patience: int = 1,
        prob_diff_keep_last: int = 100,
        prob_diff_save_tokens: bool = False,
        automatic: bool = False,
    ):
        self.token_level = enable_token_level_prob_diff
        self.save_dir = prob_diff_save_dir if enable_token_level_prob_diff else None
        self.tokens, self.samples = prob_diff_token_max_print, prob_diff_sample_max_print
        self.warn, self.stop, self.patience = prob_diff_warn, prob_diff_stop, prob_diff_patience
        self.keep_last, self.save_tokens = prob_diff_keep_last, prob_diff_save_tokens
        self.automatic = automatic
        self._trainer: Any = None
        self._notices = Notices()

    def bind(self, trainer: Any) -> None:
        """Take the trainer whose monitor is followed. A collective.

        Raises:
            ValueError: on every rank, if nothing can be written to `prob_diff_save_dir`.
        """
        if self._trainer is trainer:
            return
        self._trainer = trainer
        if self.token_level:
            trainer.monitor.grid_shape = (self.samples, self.tokens)
            trainer.monitor.keeps_rows |= self.save_dir is not None
        if self.save_dir is not None:
            accelerator = trainer.accelerator
            mine = check_writable(self.save_dir, trainer.args.output_dir) if accelerator.is_main_process else None
            if fault := ranks.from_main(accelerator, mine):
                raise ValueError(f"prob_diff_save_dir={str(self.save_dir)!r}: {fault}.")

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._trainer is None:
            self._notices.once(
                "unbound",
                "ProbDiffCallback follows the monitor of a GRPOExtTrainer, which this trainer has not got; nothing is compared. "
                "Use GRPOExtTrainer, or put GRPOExtMixin before your trainer.",
            )
            return
        report = self._trainer.monitor.close(state.global_step)
        if report is None:
            self._nothing_seen()
            return
        if self.save_dir is not None:
            self._dump(self.save_dir, report)
        self._judge(report, control)

    def _nothing_seen(self) -> None:
        asked = self.token_level or self.stop is not None or not self.automatic
        if asked and not self._trainer.monitor.reports:
            self._notices.once(
                "no log-probs",
                "Rollouts came without log-probs of the engine, so they cannot be compared with the actor. Set use_vllm=True, or "
                "return 'logprobs' from rollout_func.",
            )

    # ---- dumps -----------------------------------------------------------------------------------------------------
    def _dump(self, directory: str, report: VersionReport) -> None:
        """A collective: the rows of all ranks meet on the main process, in the order in which they were generated."""
        rows = [_arrays(rows) for rows in self._trainer.monitor.closed_rows]
        parts = ranks.gathered_on_main(self._trainer.accelerator, rows)
        if parts is None:
            return
        mu, pi, mask, ids, version, prompt_ids = _in_order([part for of_rank in parts for part in of_rank])
        diff = token_diff(torch.from_numpy(mu), torch.from_numpy(pi), torch.from_numpy(mask))
        try:
            write_pair(directory, report.step, diff.numpy(), mask)
            if self.save_tokens:
                records = TokenRecords(ids, mu, pi, version, prompt_ids)
                write_tokens(directory, report.step, mask, records, self._text_of)
            keep_last(directory, self.keep_last)
        except OSError as error:
            self._notices.once(
                "dump",
                f"The token differences of step {report.step} could not be written to {str(directory)!r} ({error}); training "
                "goes on without. Free some space there, or lower prob_diff_keep_last.",
            )

    def _text_of(self, token_id: int) -> str:
        return self._trainer.processing_class.decode([token_id])

    # ---- thresholds ------------------------------------------------------------------------------------------------
    def _judge(self, report: VersionReport, control: Any) -> None:
        if keys.MEAN not in report.metrics:
            return
        newest = reversed(self._trainer.monitor.reports)
        known = (each.metrics[keys.MEAN] for each in newest if keys.MEAN in each.metrics)
        means = list(islice(known, max(2, self.patience)))[::-1]
        stops = self.stop is not None and len(means) >= self.patience and min(means[-self.patience :]) > self.stop
        sick = [self.warn is not None and mean > self.warn for mean in means[-2:]]
        if stops or sick in ([True], [False, True]):
            self._say(report, means[-1], stops)
        if stops:
            control.should_save = control.should_training_stop = True

    def _say(self, report: VersionReport, mean: float, stops: bool) -> None:
        from grpo_ext.consistency.probe import examine

        limit = f"prob_diff_stop={self.stop:g}" if stops else f"prob_diff_warn={self.warn:g}"
        findings = examine(self._trainer)
        logger.warning(
            f"Step {report.step}: rollouts of policy version {report.version} differ from the actor by {mean:.2e} in mean "
            f"probability, above {limit} (largest {report.metrics[keys.MAX]:.2e}, bias "
            f"{report.metrics.get(keys.BIAS, float('nan')):+.3f} nats). {' '.join(map(str, findings))}"
            + (" Training stops with a checkpoint." if stops else "")
        )


Part = tuple[np.ndarray, ...]


def _arrays(rows: ObservedRows) -> Part:
    """One slice as arrays: generation, row_id, mu, pi, mask, ids, version, prompt id."""
    n = len(rows.row_id)
    prompts = np.array([prompt_key(ids) for ids in rows.prompts])
    tensors = (rows.mu.float(), rows.pi.float(), rows.mask, rows.ids)
    arrays = [tensor.detach().cpu().numpy() for tensor in tensors]
    return (np.full(n, rows.generation), rows.row_id.cpu().numpy(), *arrays, np.full(n, rows.version), prompts)


def _in_order(parts: list[Part]) -> tuple[Any, ...]:
    """mu, pi, mask, ids (B, T), version (B,) and prompt ids of all parts, rows by generation and row_id."""
    width = max(part[2].shape[1] for part in parts)
    generation, row_id, mu, pi, mask, ids, version, prompts = (
        np.concatenate([_widened(part[i], width) if part[i].ndim == 2 else part[i] for part in parts]) for i in range(8)
    )
    order = np.lexsort((row_id, generation))
    return mu[order], pi[order], mask[order], ids[order], version[order], prompts[order].tolist()


def _widened(array: np.ndarray, width: int) -> np.ndarray:
    return np.pad(array, ((0, 0), (0, width - array.shape[1])))
