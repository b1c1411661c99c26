"""A generation batch as TRL buffers it, a dict of rows: what each key spans, and moving rows without losing them. Pure.

B rows; P prompt tokens, padded on the left; T completion tokens, padded on the right. TRL generates one such dict, shuffles
it (`shuffle_sequence_dict`) and cuts it into `steps_per_generation` slices of equal size (`split_tensor_dict`).
"""

from collections.abc import Iterable, Sequence
from typing import Any, Literal

import torch

Rows = dict[str, Any]
Span = Literal["prompt", "completion", "both", "row", "batch"]

ROW_ID = "row_id"
PROMPT_KEYS = ("prompt_ids", "prompt_mask")
COMPLETION_KEYS = ("completion_ids", "completion_mask", "tool_mask")
# What a multimodal batch has and a text batch has not. Several are indexed by image or by tile, not by row.
MULTIMODAL_KEYS = (
    "pixel_values",
    "image_grid_thw",
    "num_images",
    "pixel_attention_mask",
    "spatial_shapes",
    "num_tiles",
    "image_sizes",
    "image_position_ids",
)
# Everything beside ids and mask that a forward of the actor takes.
FORWARD_KEYS = (*MULTIMODAL_KEYS, "token_type_ids", "mm_token_type_ids")


def is_multimodal(rows: Rows) -> bool:
    """Whether images ride along. Such a batch must not be indexed by row: its tensors follow images, tiles or patches."""
    return any(rows.get(key) is not None for key in MULTIMODAL_KEYS)


def n_rows(rows: Rows) -> int:
    return rows["prompt_ids"].size(0)


def loss_mask(rows: Rows) -> torch.Tensor:
    """(B, T): the completion tokens that the policy sampled, without those a tool wrote."""
    mask = rows["completion_mask"]
    return mask * rows["tool_mask"] if rows.get("tool_mask") is not None else mask


def per_token(rows: Sequence[Sequence[float | None]], width: int, fill: float) -> torch.Tensor:
    """(B, `width`) float32: one value for each completion token, `fill` after the last, NaN for None."""
    result = torch.full((len(rows), width), fill)
    for number, values in enumerate(rows):
        result[number, : len(values)] = torch.tensor([torch.nan if value is None else value for value in values])
    return result


def span(key: str, value: Any, rows: Rows) -> Span:
    """What a value of a text batch runs over.

    "prompt" (B, P, ...), "completion" (B, T, ...), "both" (B, P + T, ...), "row" (one entry per row) or "batch" (shared by all
    rows). Keys that are not TRL's are told by their width: a second dimension of T is taken for one entry per completion token.
    """
    if isinstance(value, (list, tuple)):
        return "row" if len(value) == n_rows(rows) else "batch"
    if not isinstance(value, torch.Tensor) or value.dim() == 0 or value.size(0) != n_rows(rows):
        return "batch"
    if key in PROMPT_KEYS:
        return "prompt"
    if key in COMPLETION_KEYS:
        return "completion"
    if value.dim() == 1:
        return "row"
    prompt, completion = rows["prompt_ids"].size(1), rows["completion_ids"].size(1)
    if value.size(1) == completion:
        return "completion"
    return "both" if value.size(1) == prompt + completion else "row"


def take(rows: Rows, index: torch.Tensor | Sequence[int]) -> Rows:
    """The rows at `index`, in that order; values that are not per row stay as they are."""
    at = torch.as_tensor(index, dtype=torch.long, device=rows["prompt_ids"].device)

    def pick(key: str, value: Any) -> Any:
        if span(key, value, rows) == "batch":
            return value
        return value[at] if isinstance(value, torch.Tensor) else [value[i] for i in at.tolist()]

    return {key: pick(key, value) for key, value in rows.items()}


def join(slices: Sequence[Rows]) -> Rows:
    """Slices of equal widths as one batch, row by row; what is not per row comes from the first."""

    def cat(key: str) -> Any:
        values = [rows[key] for rows in slices]
        if span(key, values[0], slices[0]) == "batch":
            return values[0]
        if isinstance(values[0], torch.Tensor):
            return torch.cat(values)
        return [entry for value in values for entry in value]

    return {key: cat(key) for key in slices[0]}


def deal(slices: Sequence[Rows], order: Sequence[int]) -> list[Rows]:
    """Rows of the joined slices in a new order, cut into slices of the old sizes; values not per row stay where they were."""
    whole, start, dealt = join(slices), 0, []
    for rows in slices:
        stop = start + n_rows(rows)
        mine = take(whole, order[start:stop])
        dealt.append({key: mine[key] if span(key, value, rows) != "batch" else value for key, value in rows.items()})
        start = stop
    return dealt


def rearrange(slices: Sequence[Rows], cells: Iterable[Sequence[int]], order_of: Any) -> list[Rows]:
    """Reorder rows within cells (lists of slice numbers). `order_of(slices of a cell)` gives the order of their joined rows."""
    result = list(slices)
    for cell in cells:
        members = [slices[i] for i in cell]
        for i, rows in zip(cell, deal(members, order_of(members)), strict=True):
            result[i] = rows
    return result
