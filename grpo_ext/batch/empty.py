"""Completions without a token: what stands in for them. Pure.

TRL looks at the last token of every completion, so one is needed. An end-of-sequence token is put there, with log-prob 0, and
the tool mask keeps it out of the loss and of every statistic: nobody sampled it.
"""

from collections.abc import Collection, Sequence

Ids = list[list[int]]
Logprobs = list[list[float | None]]


def filled(
    completion_ids: Sequence[list[int]], logprobs: Sequence[list] | None, end: int
) -> tuple[Ids, Logprobs | None, set[int]]:
    """Completions and log-probs with a token in every row, and the numbers of the rows that had none."""
    empty = {row for row, ids in enumerate(completion_ids) if len(ids) == 0}
    ids = [[end] if row in empty else ids for row, ids in enumerate(completion_ids)]
    if logprobs is not None:
        logprobs = [[0.0] if row in empty else values for row, values in enumerate(logprobs)]
    return ids, logprobs, empty


def hidden(tool_mask: Ids | None, completion_ids: Sequence[list[int]], empty: Collection[int]) -> Ids | None:
    """The tool mask (1: the policy's token) with what `filled` put there at 0; as it is where nothing was."""
    if not empty:
        return tool_mask
    mask = tool_mask if tool_mask is not None else [[1] * len(ids) for ids in completion_ids]
    return [[0] * len(ids) if row in empty else mask[row] for row, ids in enumerate(completion_ids)]
