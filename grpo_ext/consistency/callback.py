"""ProbDiffCallback: dumps the differences of single tokens, warns when rollouts and actor part, and stops the run if asked to."""

from typing import Any

import numpy as np
import torch
from accelerate.logging import get_logger
from transformers import TrainerCallback

from grpo_ext import ranks
from grpo_ext.consistency import keys
from grpo_ext.consistency.dump import TokenRecords, check_writable, files_by_step, keep_last, write_pair, write_tokens
from grpo_ext.consistency.monitor import ObservedRows, VersionReport
from grpo_ext.consistency.prob_diff import token_diff
from grpo_ext.notices import Notices
from grpo_ext.rollout.seeds import prompt_key
from grpo_ext.rules.consistency import prob_diff_counts, prob_diff_thresholds

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

    Raises:
        ValueError: for a negative count, or a threshold outside [0, 1].
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
        self.enable_token_level_prob_diff = enable_token_level_prob_diff
        self.prob_diff_save_dir = prob_diff_save_dir
        self.prob_diff_token_max_print = prob_diff_token_max_print
        self.prob_diff_sample_max_print = prob_diff_sample_max_print
        self.prob_diff_warn = prob_diff_warn
        self.prob_diff_stop = prob_diff_stop
        self.prob_diff_patience = prob_diff_patience
        self.prob_diff_keep_last = prob_diff_keep_last
        self.prob_diff_save_tokens = prob_diff_save_tokens
        self.automatic = automatic
        for problem in (*prob_diff_counts(self, 1), *prob_diff_thresholds(self, 1)):
            raise ValueError(problem.text)
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
        self._name_what_has_no_effect()
        if self.enable_token_level_prob_diff:
            trainer.monitor.grid_shape = (self.prob_diff_sample_max_print, self.prob_diff_token_max_print)
            trainer.monitor.keeps_rows |= self._dumps_to is not None
        if self._dumps_to is not None:
            accelerator = trainer.accelerator
            mine = check_writable(self._dumps_to, trainer.args.output_dir) if accelerator.is_main_process else None
            if fault := ranks.from_main(accelerator, mine):
                raise ValueError(f"prob_diff_save_dir={str(self._dumps_to)!r}: {fault}.")

    @property
    def _dumps_to(self) -> str | None:
        return self.prob_diff_save_dir if self.enable_token_level_prob_diff else None

    def _name_what_has_no_effect(self) -> None:
        given = {"prob_diff_save_dir": self.prob_diff_save_dir, "prob_diff_save_tokens": self.prob_diff_save_tokens}
        idle = [f"{name}={value!r}" for name, value in given.items() if value]
        if idle and self._dumps_to is None:
            self._notices.once(
                "idle",
                f"{' and '.join(idle)} without effect: single tokens are dumped with enable_token_level_prob_diff=True and "
                "prob_diff_save_dir set, and not otherwise. Set both.",
            )

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._trainer is None or self._dumps_to is None or not self._trainer.accelerator.is_main_process:
            return
        later = [step for step in files_by_step(self._dumps_to) if step > state.global_step]
        if later:
            self._notices.once(
                "later dumps",
                f"prob_diff_save_dir={str(self._dumps_to)!r} holds dumps of {len(later)} step(s) after step {state.global_step}, up "
                f"to {max(later)}: those of an earlier run. A report shows both until this run has written over them. Move them "
                "away, or name another directory.",
            )

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
        if self._dumps_to is not None:
            self._dump(self._dumps_to, report)
        self._judge(report, control)

    def _nothing_seen(self) -> None:
        asked = self.enable_token_level_prob_diff or self.prob_diff_stop is not None or not self.automatic
        if asked and not self._trainer.monitor.reports and not self._trainer.monitor.means:
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
            if self.prob_diff_save_tokens:
                records = TokenRecords(ids, mu, pi, version, prompt_ids)
                write_tokens(directory, report.step, mask, records, self._text_of)
            keep_last(directory, self.prob_diff_keep_last)
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
        warn, stop, patience = self.prob_diff_warn, self.prob_diff_stop, self.prob_diff_patience
        means = list(self._trainer.monitor.means)
        stops = stop is not None and len(means) >= patience and min(means[-patience:]) > stop
        sick = [warn is not None and mean > warn for mean in means[-2:]]
        if stops or sick in ([True], [False, True]):
            self._say(report, means[-1], stops)
        if stops:
            control.should_save = control.should_training_stop = True

    def _say(self, report: VersionReport, mean: float, stops: bool) -> None:
        from grpo_ext.consistency.probe import examine

        name = "prob_diff_stop" if stops else "prob_diff_warn"
        found = " ".join(map(str, examine(self._trainer))) or (
            "A few fresh rollouts agree with the actor within rounding, so no cause is named. Try: look at how these rollouts were "
            "made (a rollout_func, weights changed since), or a higher prob_diff_warn where the dtype is a low one."
        )
        logger.warning(
            f"Step {report.step}: rollouts of policy version {report.version} differ from the actor by {mean:.2e} in mean "
            f"probability, above {name}={getattr(self, name):g} (largest {report.metrics[keys.MAX]:.2e}, bias "
            f"{report.metrics.get(keys.BIAS, float('nan')):+.3f} nats). {found}"
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
