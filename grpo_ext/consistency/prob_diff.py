"""Probability differences between rollout and actor, of a batch from anywhere. Pure, but for the files it is asked to write.

A batch maps these names to (B, T) tensors (arrays and nested lists serve, None being an unscored token):

    rollout_log_probs   the engine's log-probs of the sampled tokens, nats
    old_log_probs       the actor's
    responses           the sampled tokens
    response_mask       1 where a token counts; without it the last T columns of
    attention_mask      (B, P + T) serve

A `DataProto` of verl serves as well, by its `batch`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from typing import Any

import numpy as np
import torch

from grpo_ext.consistency import keys
from grpo_ext.consistency.sums import consistency_metrics, consistency_sums
from grpo_ext.rollout.scores import POSITIVE_TOLERANCE


@dataclass(frozen=True)
class Scored:
    """mu, pi (B, T) in nats and the mask (B, T, bool) of the tokens that count."""

    mu: torch.Tensor
    pi: torch.Tensor
    mask: torch.Tensor


def calculate_prob_diff_metrics(batch: Any) -> dict[str, float]:
    """Maximum, mean, sample standard deviation, Pearson correlation, quantiles and the further metrics of `keys`.

    {} where an input is missing or no token counts. Unscored (NaN, None) and infinite log-probs are counted, and never make
    a metric NaN.

    Raises:
        TypeError, ValueError: for no mapping, shapes that do not fit, or a log-prob above 0.
    """
    scored = _scored(batch)
    return {} if scored is None else consistency_metrics(consistency_sums(scored.mu, scored.pi, scored.mask))


def calculate_token_level_prob_diff(
    batch: Any,
    save_dir: str | PathLike[str] | None = None,
    step: int | None = None,
    token_max_print: int = 10,
    sample_max_print: int = 8,
) -> dict[str, float]:
    """The differences of single tokens: `training/rollout_probs_diff/s{sample}_p{position:04d}` for the first ones.

    Args:
        save_dir: where to write prob_diff_step_{step}.npy (float32 (B, T): 0 where masked, NaN where unscored) and
            prob_mask_step_{step}.npy (bool (B, T)); made if it does not exist.
        step: number in the file names; needed with `save_dir`.
        token_max_print, sample_max_print: how many positions, and how many rows, are returned.

    Returns: one entry per token under the mask that was scored; {} where an input is missing.

    Raises:
        TypeError, ValueError: for no mapping, shapes that do not fit, a log-prob above 0, a negative count, or a `save_dir`
            without a whole `step`.
    """
    for name, count in (("token_max_print", token_max_print), ("sample_max_print", sample_max_print)):
        if count < 0:
            raise ValueError(f"{name}={count}: at least 0 is needed. Leave it out, or set 0 to get no single token.")
    scored = _scored(batch)
    if scored is None:
        return {}
    diff = token_diff(scored.mu, scored.pi, scored.mask)
    if save_dir is not None:
        from grpo_ext.consistency.dump import write_pair

        if step is None or step != int(step) or step < 0:
            raise ValueError(f"save_dir with step={step!r}: file names need a whole number. Pass step=<optimizer step>.")
        write_pair(save_dir, int(step), diff.cpu().numpy(), scored.mask.cpu().numpy())
    return diff_grid(diff, scored.mask, token_max_print, sample_max_print)


def token_diff(mu_BT: torch.Tensor, pi_BT: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    """|exp(mu) - exp(pi)| (B, T) in float32: 0 where masked, NaN where a token that counts has no log-prob."""
    return torch.where(mask_BT.bool(), (mu_BT.double().exp() - pi_BT.double().exp()).abs(), 0.0).float()


def diff_grid(diff_BT: torch.Tensor, mask_BT: torch.Tensor, tokens: int, samples: int) -> dict[str, float]:
    """Entries of the first rows and positions, named by `keys.CELL`, without masked and unscored tokens."""
    values, mask = diff_BT[:samples, :tokens].tolist(), mask_BT[:samples, :tokens].tolist()
    return {
        keys.CELL.format(sample=i, position=j): value
        for i, row in enumerate(values)
        for j, value in enumerate(row)
        if mask[i][j] and not math.isnan(value)
    }


def _scored(batch: Any) -> Scored | None:
    """The three tensors of a batch, or None where one of its inputs is missing."""
    inner = getattr(batch, "batch", None)
    found = batch if inner is None or isinstance(batch, Mapping) else inner
    if not hasattr(found, "keys"):
        raise TypeError(f"a batch maps rollout_log_probs, old_log_probs, ... to tensors (B, T); {type(found)} does not.")
    names = {"rollout_log_probs", "old_log_probs", "responses", "response_mask", "attention_mask"} & set(found.keys())
    given = {name: found[name] for name in names if found[name] is not None}
    of_mask = "response_mask" if "response_mask" in given else "attention_mask"
    if not {"rollout_log_probs", "old_log_probs", "responses", of_mask} <= given.keys():
        return None
    mu, pi, responses, mask = (
        _matrix(name, given[name]) for name in ("rollout_log_probs", "old_log_probs", "responses", of_mask)
    )
    if of_mask == "attention_mask":
        mask = mask[:, max(mask.size(1) - responses.size(1), 0) :]
    if len({x.shape for x in (mu, pi, responses, mask)}) > 1:
        raise ValueError(
            f"rollout_log_probs {tuple(mu.shape)}, old_log_probs {tuple(pi.shape)}, responses {tuple(responses.shape)} and the "
            f"mask {tuple(mask.shape)} must have one shape (B, T). Cut each to the T columns of the responses."
        )
    mask = mask.to(mu.device) != 0
    mu, pi = mu.float() if not mu.is_floating_point() else mu, pi.to(mu.device)
    for name, logps in (("rollout_log_probs", mu), ("old_log_probs", pi)):
        _refuse_positive(name, logps, mask)
    return Scored(mu, pi, mask)


def _matrix(name: str, value: Any) -> torch.Tensor:
    """`value` as a tensor of two dimensions, without gradient; None in a list becomes NaN."""
    try:
        matrix = value.detach() if isinstance(value, torch.Tensor) else torch.from_numpy(np.array(value, dtype=np.float64))
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"{name} cannot be read as numbers (B, T): {error}. Pad its rows to one length, and mask the padding with 0."
        ) from None
    if matrix.dim() != 2:
        raise ValueError(f"{name} has the shape {tuple(matrix.shape)}, where rows and tokens (B, T) belong. Reshape it.")
    return matrix


def _refuse_positive(name: str, logps: torch.Tensor, mask: torch.Tensor) -> None:
    above = mask & (logps > POSITIVE_TOLERANCE)
    if above.any():
        row, position = above.nonzero()[0].tolist()
        raise ValueError(
            f"{name}[{row}, {position}] = {float(logps[row, position]):.4g}: a log-prob is at most 0. Pass natural "
            "logarithms of probabilities, neither probabilities nor logits."
        )
