"""What a loss is given, described: its tensors one by one, and the first row in words with the loss mask visible. Pure."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from grpo_ext.batch.padding import row_lengths
from grpo_ext.batch.rollouts import Rows, loss_mask, span


@dataclass(frozen=True)
class TensorLook:
    """real: entries that belong to a token, None where the tensor is not per token. shortest, longest: tokens of a row."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    real: int | None
    shortest: int | None
    longest: int | None
    nans: int


@dataclass(frozen=True)
class Piece:
    """A run of tokens of one kind: "prompt", "learned" (under the loss mask) or "masked"."""

    text: str
    kind: str


def tensor_looks(rows: Rows) -> list[TensorLook]:
    """Every tensor of a slice, in the order of the dict."""
    return [_look(name, value, rows) for name, value in rows.items() if isinstance(value, torch.Tensor)]


def _look(name: str, value: torch.Tensor, rows: Rows) -> TensorLook:
    lengths, kind = row_lengths(rows), span(name, value, rows)
    prompt, completion = rows["prompt_mask"].sum(dim=1), rows["completion_mask"].sum(dim=1)
    real = {"prompt": prompt, "completion": completion, "both": prompt + completion}.get(kind)
    longest = {"prompt": lengths.prompt, "completion": lengths.completion, "both": lengths.total}.get(kind)
    return TensorLook(
        name,
        tuple(value.shape),
        str(value.dtype).removeprefix("torch."),
        None if real is None else int(real.sum()),
        None if longest is None else int(longest.min()),
        None if longest is None else int(longest.max()),
        int(torch.isnan(value).sum()) if value.is_floating_point() else 0,
    )


def first_row(rows: Rows, decode: Callable[[list[int]], str]) -> list[Piece]:
    """The first row without its padding, cut where the loss mask changes; of a completion that its mask blanks, nothing."""
    prompt, ids, mask = rows["prompt_ids"][0], rows["completion_ids"][0], loss_mask(rows)[0].bool().tolist()
    pieces = [Piece(decode(prompt[rows["prompt_mask"][0].bool()].tolist()), "prompt")]
    end = int(row_lengths(rows).completion[0])
    start = 0
    for at in range(1, end + 1):
        if at == end or mask[at] != mask[start]:
            pieces.append(Piece(decode(ids[start:at].tolist()), "learned" if mask[start] else "masked"))
            start = at
    return pieces
