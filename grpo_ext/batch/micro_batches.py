"""Micro-batches of passes without gradient: how many rows, or padded tokens, go into one forward, and back into order. Pure.

A chunk is a list of row numbers that one forward takes, trimmed to its own longest prompt and completion. Under ZeRO-3 a
forward is a collective, so ranks agree on the number of chunks and the one that has fewer adds forwards whose result nobody
reads.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from grpo_ext.batch.padding import Lengths


@dataclass(frozen=True)
class Chunks:
    """rows: row numbers of each forward, short rows in the first. idle: trailing forwards that only keep step with other ranks.
    alone: rows longer than the token budget, each of which makes a chunk of its own."""

    rows: tuple[tuple[int, ...], ...]
    idle: int = 0
    alone: int = 0

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def real(self) -> tuple[tuple[int, ...], ...]:
        return self.rows[: len(self.rows) - self.idle]


def padded_tokens(lengths: Lengths, chunk: Sequence[int]) -> int:
    """Tokens one forward over `chunk` processes, padding included."""
    index = list(chunk)
    return len(index) * int(lengths.prompt[index].max() + lengths.completion[index].max())


def cut(lengths: Lengths, max_rows: int | None = None, max_tokens: int | None = None) -> Chunks:
    """Rows in order of length, cut into chunks of at most `max_rows` rows and `max_tokens` padded tokens (each None: no limit).

    The token budget is a hard cap; only a row that is longer than it by itself exceeds it, alone.
    """
    if max_rows is not None and max_rows < 1:
        raise ValueError(f"A micro-batch of {max_rows} rows holds nothing. Give 1 or more, or None for all rows at once.")
    if max_tokens is not None and max_tokens < 1:
        raise ValueError(f"A budget of {max_tokens} tokens fits no row. Give the longest prompt plus completion, or None.")
    prompt, completion = lengths.prompt.tolist(), lengths.completion.tolist()
    order = sorted(range(len(prompt)), key=lambda i: (prompt[i] + completion[i], completion[i]))
    chunks: list[list[int]] = []
    longest_prompt = longest_completion = alone = 0
    for i in order:
        p, t = max(longest_prompt, prompt[i]), max(longest_completion, completion[i])
        size = len(chunks[-1]) + 1 if chunks else 1
        full = max_rows is not None and size > max_rows
        if not chunks or full or (max_tokens is not None and size * (p + t) > max_tokens):
            chunks.append([])
            p, t = prompt[i], completion[i]
            alone += max_tokens is not None and p + t > max_tokens
        chunks[-1].append(i)
        longest_prompt, longest_completion = p, t
    return Chunks(tuple(tuple(sorted(chunk)) for chunk in chunks), alone=alone)


def in_lockstep(chunks: Chunks, n_forwards: int) -> Chunks:
    """Chunks with idle forwards added up to `n_forwards`, the most that any rank needs. An idle one takes the shortest row."""
    missing = n_forwards - len(chunks)
    if missing < 0:
        raise ValueError(
            f"{len(chunks)} forwards are needed here but only {n_forwards} were agreed on. Agree on the maximum over ranks."
        )
    return Chunks(chunks.rows + (((0,) if not chunks.rows else chunks.rows[0][:1]),) * missing, missing, chunks.alone)


def put_back(parts: Sequence[torch.Tensor], chunks: Chunks, n_rows: int, width: int) -> torch.Tensor:
    """(n_rows, width): per-token values of the chunks' forwards, each (rows of the chunk, its own T), in the rows' own order.

    Columns that a chunk had trimmed off are 0, which is what TRL's fused head gives on padding.
    """
    result = parts[0].new_zeros((n_rows, width, *parts[0].shape[2:]))
    for part, chunk in zip(parts, chunks.real, strict=True):
        result[list(chunk), : part.size(1)] = part
    return result
