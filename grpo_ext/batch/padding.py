"""No padding that need not be: cut a slice to its own longest prompt and completion, put rows of like length together. Pure.

Padding after the last token changes nothing of a causal model's output. Padding before the first one does nothing either where
positions are relative (RoPE, ALiBi); learned absolute positions need `position_ids`, which a model counts from the left edge
otherwise. B rows, P prompt tokens (padded on the left), T completion tokens (padded on the right).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import pad

from grpo_ext.batch.rollouts import Rows, join, n_rows, span


@dataclass(frozen=True)
class Lengths:
    """(B,) each: real tokens of every row, counted from the prompt's first and to the completion's last."""

    prompt: torch.Tensor
    completion: torch.Tensor

    @property
    def total(self) -> torch.Tensor:
        return self.prompt + self.completion


def lengths_of(prompt_mask_BP: torch.Tensor, completion_mask_BT: torch.Tensor) -> Lengths:
    """Lengths by the attention masks. A row that `mask_truncated_completions` blanked has completion length 0."""
    P, T = prompt_mask_BP.size(1), completion_mask_BT.size(1)
    from_right = torch.arange(P, 0, -1, device=prompt_mask_BP.device)
    from_left = torch.arange(1, T + 1, device=completion_mask_BT.device)

    def longest(mask: torch.Tensor, distance: torch.Tensor) -> torch.Tensor:
        if not distance.numel():
            return mask.new_zeros(mask.size(0), dtype=torch.long)
        return (mask.bool() * distance).amax(dim=1)

    return Lengths(longest(prompt_mask_BP, from_right), longest(completion_mask_BT, from_left))


def row_lengths(rows: Rows) -> Lengths:
    return lengths_of(rows["prompt_mask"], rows["completion_mask"])


def width(longest: int, available: int, multiple: int | None = None) -> int:
    """Columns to keep for a longest row of `longest`: at least 1, a multiple where asked for, never more than there are."""
    kept = max(longest, 1)
    if multiple:
        kept = -(-kept // multiple) * multiple
    return min(kept, available)


def trim(rows: Rows, pad_to_multiple_of: int | None = None) -> Rows:
    """The same rows without the columns in which no row has a token; text batches only (see `rollouts.is_multimodal`).

    Masks decide, not ids: a truncated row that is blanked by its mask holds no width. Per-token values of any kind are cut
    alike: log-probs, tool masks, advantages of shape (B, T), token-type ids of shape (B, P + T).
    """
    P, T = rows["prompt_ids"].size(1), rows["completion_ids"].size(1)
    longest = row_lengths(rows)
    p = width(int(longest.prompt.max()), P, pad_to_multiple_of)
    t = width(int(longest.completion.max()), T, pad_to_multiple_of)
    cut = {"prompt": slice(P - p, P), "completion": slice(0, t), "both": slice(P - p, P + t)}
    kinds = {key: span(key, value, rows) for key, value in rows.items()}
    return {key: value[:, cut[kinds[key]]] if kinds[key] in cut else value for key, value in rows.items()}


def rounded(lengths: Lengths, multiple: int | None = None) -> Lengths:
    """Columns that rows need, each alone: at least one for the completion, multiples where asked for."""
    step = multiple or 1
    up = [-(-each // step) * step for each in (lengths.prompt.clamp(min=1), lengths.completion.clamp(min=1))]
    return Lengths(*up)


def stack(parts: Sequence[Rows]) -> Rows:
    """Rows of slices that were trimmed to different widths, padded to the widest and joined."""
    P = max(rows["prompt_ids"].size(1) for rows in parts)
    T = max(rows["completion_ids"].size(1) for rows in parts)

    def widen(key: str, value: Any, rows: Rows) -> Any:
        left, right = P - rows["prompt_ids"].size(1), T - rows["completion_ids"].size(1)
        sides = {"prompt": (left, 0), "completion": (0, right), "both": (left, right)}.get(span(key, value, rows), (0, 0))
        return pad(value, (*(0, 0) * (value.dim() - 2), *sides)) if any(sides) else value

    return join([{key: widen(key, value, rows) for key, value in rows.items()} for rows in parts])


def length_order(lengths: Lengths, sizes: Sequence[int]) -> list[int]:
    """An order of rows that leaves little padding once they are cut into slices of `sizes` rows.

    By completion length, by total length, or by prompt then completion, whichever leaves least; short rows first. The sort is
    stable: rows of equal lengths keep their order.
    """
    prompt, completion = lengths.prompt.tolist(), lengths.completion.tolist()
    keys = (
        lambda i: completion[i],
        lambda i: (completion[i], prompt[i]),
        lambda i: prompt[i] + completion[i],
        lambda i: (prompt[i], completion[i]),
    )
    orders = [sorted(range(len(prompt)), key=key) for key in keys]
    return min(orders, key=lambda order: _processed(prompt, completion, order, sizes))


def _processed(prompt: list[int], completion: list[int], order: Sequence[int], sizes: Sequence[int]) -> int:
    """Tokens processed, padding included, when rows in `order` are cut into slices of `sizes` rows and trimmed."""
    start = total = 0
    for size in sizes:
        part = order[start : start + size]
        total += size * (max(prompt[i] for i in part) + max(completion[i] for i in part))
        start += size
    return total


def order_by_length(slices: Sequence[Rows]) -> list[int]:
    """`length_order` of the joined rows of slices."""
    each = [row_lengths(rows) for rows in slices]
    lengths = Lengths(torch.cat([e.prompt for e in each]), torch.cat([e.completion for e in each]))
    return length_order(lengths, [n_rows(rows) for rows in slices])


def token_counts(slices: Sequence[Rows]) -> tuple[int, int]:
    """(real, processed) tokens of slices as they stand, prompts included; their quotient is the real-token share."""
    real = sum(int(rows["prompt_mask"].sum() + rows["completion_mask"].sum()) for rows in slices)
    processed = sum(rows["prompt_mask"].numel() + rows["completion_mask"].numel() for rows in slices)
    return real, processed


def position_ids(attention_mask_BL: torch.Tensor) -> torch.Tensor:
    """(B, L): positions counted from each row's first real token, as an engine that pads nothing counts them; 0 on padding."""
    mask = attention_mask_BL.long()
    return ((mask.cumsum(dim=1) - 1) * mask).clamp(min=0)
