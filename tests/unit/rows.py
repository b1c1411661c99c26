"""Rows as TRL buffers them, made from lengths: what the tests of batches, windows and ratios are fed."""

from collections.abc import Sequence
from typing import Any

import torch


def make_rows(prompts: Sequence[int], completions: Sequence[int], P: int | None = None, T: int | None = None) -> dict[str, Any]:
    """A text batch with the given real lengths; every token's id tells its row and place (row * 1000 + place + 1, 0 is
    padding)."""
    P, T = P or max(max(prompts), 1), T or max(max(completions), 1)
    n = len(prompts)
    rows: dict[str, Any] = {
        "prompt_ids": torch.zeros(n, P, dtype=torch.long),
        "prompt_mask": torch.zeros(n, P, dtype=torch.long),
        "completion_ids": torch.zeros(n, T, dtype=torch.long),
        "completion_mask": torch.zeros(n, T, dtype=torch.long),
        "advantages": torch.arange(n, dtype=torch.float32),
        "num_items_in_batch": torch.tensor(sum(completions)),
        "row_id": torch.arange(n),
        "sampling_per_token_logps": torch.zeros(n, T),
    }
    for i, (p, t) in enumerate(zip(prompts, completions, strict=True)):
        rows["prompt_ids"][i, P - p :] = torch.arange(p) + i * 1000 + 1
        rows["prompt_mask"][i, P - p :] = 1
        rows["completion_ids"][i, :t] = torch.arange(t) + i * 1000 + 501
        rows["completion_mask"][i, :t] = 1
        rows["sampling_per_token_logps"][i, :t] = -(torch.arange(t) + i * 1000 + 1) / 1000
    return rows


def cut(rows: dict[str, Any], n: int) -> list[dict[str, Any]]:
    """TRL's `split_tensor_dict`: n equal slices."""
    size = rows["prompt_ids"].size(0) // n

    def part(value: Any, i: int) -> Any:
        whole = not isinstance(value, list) and (not isinstance(value, torch.Tensor) or value.dim() == 0)
        return value if whole else value[i * size : (i + 1) * size]

    return [{key: part(value, i) for key, value in rows.items()} for i in range(n)]
