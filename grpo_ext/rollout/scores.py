"""The log-probs an engine returned, held against the tokens it sampled. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

# A log-softmax in float32 may land a rounding error above 0.
POSITIVE_TOLERANCE = 1e-4


@dataclass(frozen=True)
class RolloutScores:
    """scored: tokens with a log-prob (-inf included). unscored: tokens for which the engine gave none."""

    scored: int
    unscored: int


def check_rollout_scores(completion_ids: Sequence[Sequence[int]], logprobs: Sequence[Sequence[float | None]]) -> RolloutScores:
    """Count scored and unscored tokens of rollouts (nats; None or NaN where the engine gave no value).

    Raises:
        ValueError: naming the row whose lengths differ, or that holds a positive log-prob.
    """
    if len(completion_ids) != len(logprobs):
        raise ValueError(
            f"{len(completion_ids)} completions came with log-probs for {len(logprobs)} rows; every completion needs its own. "
            "Return one list of log-probs for each completion."
        )
    unscored = scored = 0
    for row, (ids, values) in enumerate(zip(completion_ids, logprobs, strict=True)):
        if len(ids) != len(values):
            raise ValueError(
                f"Row {row}: {len(ids)} completion tokens but {len(values)} log-probs. Return one log-prob for each sampled "
                "token, None where there is none."
            )
        for position, value in enumerate(values):
            if value is None or value != value:
                unscored += 1
                continue
            if value > POSITIVE_TOLERANCE:
                raise ValueError(
                    f"Row {row}, token {position}: log-prob {value} is positive, a probability above 1. Return natural "
                    "logarithms of probabilities (vLLM: logprobs_mode='processed_logprobs')."
                )
            scored += 1
    return RolloutScores(scored, unscored)
