"""Rows by prompt: which of them are equal token by token, and how groups are dealt to forwards and to slices. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from grpo_ext.batch.micro_batches import Chunks
from grpo_ext.batch.padding import Lengths, lengths_of
from grpo_ext.batch.rollouts import Rows

Groups = list[list[int]]


@dataclass(frozen=True)
class Inputs:
    """What a log-prob pass is made of. ids, mask: (B, P + T), prompts padded on the left, completions on the right. T:
    completion columns."""

    ids: torch.Tensor
    mask: torch.Tensor
    T: int

    @classmethod
    def of(cls, rows: Rows) -> "Inputs":
        ids, mask = (torch.cat([rows[f"prompt_{kind}"], rows[f"completion_{kind}"]], dim=1) for kind in ("ids", "mask"))
        return cls(ids, mask, rows["completion_ids"].size(1))

    @property
    def P(self) -> int:
        return self.ids.size(1) - self.T

    @cached_property
    def lengths(self) -> Lengths:
        return lengths_of(self.mask[:, : self.P], self.mask[:, self.P :])

    @cached_property
    def is_regular(self) -> bool:
        """Whether every row has a prompt, and no mask a hole in its prompt or completion."""
        return bool((self.lengths.prompt > 0).all() and (self.mask.sum(dim=1) == self.lengths.total).all())

    @cached_property
    def groups(self) -> Groups:
        """Row numbers by prompt, equal token by token, wherever they stand; in order of first appearance."""
        groups: dict[tuple[int, ...], list[int]] = {}
        for i, (row, p) in enumerate(zip(self.ids[:, : self.P].tolist(), self.lengths.prompt.tolist(), strict=True)):
            groups.setdefault(tuple(row[self.P - p :]), []).append(i)
        return list(groups.values())

    def few(self) -> "Inputs":
        """At most three rows that tell trees from rows: the shortest and the longest of the largest group, and one of another;
        rows with a completion, where there are any."""
        completion = self.lengths.completion.tolist()
        groups = [sorted((i for i in group if completion[i]), key=lambda i: completion[i]) for group in self.groups]
        first, *others = sorted((group for group in groups if group), key=len, reverse=True) or [[0]]
        index = sorted({first[0], first[-1], *(others[0][:1] if others else ())})
        p, t = int(self.lengths.prompt[index].max()), max(int(self.lengths.completion[index].max()), 1)
        columns = slice(self.P - p, self.P + t)
        return Inputs(self.ids[index, columns], self.mask[index, columns], t)


def line_tokens(groups: Groups, lengths: Lengths) -> tuple[int, int]:
    """(distinct, processed) tokens of the line of these rows; the last token of a prompt is processed once a branch."""
    prompt, completion = lengths.prompt.tolist(), lengths.completion.tolist()
    branches = [[completion[i] for i in group if completion[i]] for group in groups]
    processed = sum(prompt[group[0]] - 1 + sum(each) for group, each in zip(groups, branches, strict=True) if each)
    return processed - sum(len(each) - 1 for each in branches if each), processed


def cut_groups(groups: Groups, lengths: Lengths, max_rows: int | None = None, max_tokens: int | None = None) -> Chunks:
    """Rows cut into lines of at most `max_rows` rows and `max_tokens` tokens (each None: no limit), groups together where they
    fit. A group that goes over several lines has its trunk in each; a row longer than the budget makes a line of its own."""
    prompt, completion = lengths.prompt.tolist(), lengths.completion.tolist()

    def fits(rows: int, tokens: int) -> bool:
        return (max_rows is None or rows <= max_rows) and (max_tokens is None or tokens <= max_tokens)

    chunks: list[list[int]] = [[]]
    rows = tokens = alone = 0
    for group in groups:
        trunk = prompt[group[0]] - 1
        whole = trunk + sum(completion[i] for i in group)
        if not fits(rows + len(group), tokens + whole) and fits(len(group), whole):
            chunks.append([])
            rows = tokens = 0
        begun = False  # whether the trunk is in this line already
        for i in group:
            more = completion[i] + (0 if begun else trunk)
            if chunks[-1] and not fits(rows + 1, tokens + more):
                chunks.append([])
                rows, tokens, more = 0, 0, trunk + completion[i]
            alone += not chunks[-1] and not fits(1, more)
            chunks[-1].append(i)
            rows, tokens, begun = rows + 1, tokens + more, True
    return Chunks(tuple(tuple(sorted(chunk)) for chunk in chunks), alone=alone)


def group_order(groups: Groups, sizes: Sequence[int]) -> list[int]:
    """An order of rows that keeps groups whole once it is cut into slices of `sizes` rows, as far as sizes allow.

    Large groups first, each into the fullest slice that still holds it; one that fits nowhere is cut where most room is left.
    """
    room = list(sizes)
    slices: list[list[int]] = [[] for _ in sizes]
    waiting = sorted(groups, key=len, reverse=True)
    while waiting:
        group = waiting.pop(0)
        holding = [i for i in range(len(room)) if room[i] >= len(group)]
        best = min(holding, key=lambda i: room[i]) if holding else max(range(len(room)), key=lambda i: room[i])
        part, rest = group[: room[best]], group[room[best] :]
        slices[best] += part
        room[best] -= len(part)
        if rest:
            waiting.append(rest)
            waiting.sort(key=len, reverse=True)
    return [i for rows in slices for i in rows]
