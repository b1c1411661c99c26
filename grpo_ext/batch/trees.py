"""Rows that share a prompt, laid out as a tree: the prompt once, then a branch per completion. Nothing is padding. Pure.

    row 0   p0 p1 p2 | a0 a1 a2            trunk    branch 0    branch 1
    row 1   p0 p1 p2 | b0 b1         =>    p0 p1    p2 a0 a1    p2 b0
                          positions        0  1     2  3  4     2  3
                          labels           -  -     a0 a1 a2    b0 b1

Every token is labelled with the one that follows it in its row. So the trunk is the prompt without its last token, each
branch begins with that token, and no completion's last token is there, for nothing is predicted from it. A branch sees its
trunk and itself. All trees of a slice stand one after another in a single line of N tokens.

B rows; P prompt columns, padded on the left; T completion columns, padded on the right; N tokens of a line.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from grpo_ext.batch.micro_batches import Chunks
from grpo_ext.batch.padding import Lengths, lengths_of

IGNORED = -100  # the label of a token from which nothing is predicted
Groups = list[list[int]]


@dataclass(frozen=True)
class Tree:
    """Where a tree stands in the line. start: its first token. trunk: tokens of the trunk. branches: tokens of each branch; they
    follow the trunk, one after another."""

    start: int
    trunk: int
    branches: tuple[int, ...]

    @property
    def stop(self) -> int:
        return self.start + self.trunk + sum(self.branches)


@dataclass(frozen=True)
class Layout:
    """A line of trees, and the way back to rows.

    input_ids, position_ids, labels: (N,); a label is the next token of the row, or IGNORED.
    tree, branch: (N,) which tree a token belongs to, and which branch, counted over the whole line from 1; 0 in a trunk.
    token, row, column: (M,) each, of the M labelled tokens: the place in the line, the row and the completion token.
    distinct: tokens of the line without the repeated last ones of prompts.
    """

    trees: tuple[Tree, ...]
    input_ids: torch.Tensor
    position_ids: torch.Tensor
    labels: torch.Tensor
    tree: torch.Tensor
    branch: torch.Tensor
    token: torch.Tensor
    row: torch.Tensor
    column: torch.Tensor
    n_rows: int
    width: int
    _masks: dict[Any, torch.Tensor] = field(default_factory=dict, repr=False)

    def __len__(self) -> int:
        return self.input_ids.numel()

    @property
    def distinct(self) -> int:
        return len(self) - sum(len(tree.branches) - 1 for tree in self.trees)

    def back(self, values_N: torch.Tensor) -> torch.Tensor:
        """(B, T): values of the labelled tokens where they belong, 0 elsewhere, as TRL's head gives on padding."""
        rows = values_N.new_zeros(self.n_rows, self.width)
        return rows.index_put((self.row, self.column), values_N[self.token])

    # ---- who sees whom: one rule, several faces ----------------------------------------------------------------------
    def sees(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """Whether the tokens at `query` attend to those at `key` (places in the line, broadcast together): same tree, not
        later, and in the trunk or in the same branch."""
        of_key = self.branch[key]
        shared = (of_key == 0) | (of_key == self.branch[query])
        return shared & (self.tree[query] == self.tree[key]) & (key <= query)

    def dense_mask(self) -> torch.Tensor:
        """(1, 1, N, N) bool. Eager attention *adds* its mask: give it `additive_mask`."""
        places = torch.arange(len(self), device=self.input_ids.device)
        return self.sees(places[:, None], places[None, :])[None, None]

    def additive_mask(self, dtype: torch.dtype) -> torch.Tensor:
        """(1, 1, N, N): 0 where seen, the lowest finite value elsewhere."""
        unseen = torch.zeros((), dtype=dtype, device=self.input_ids.device).new_full((), torch.finfo(dtype).min)
        return torch.where(self.dense_mask(), torch.zeros_like(unseen), unseen)

    def block_mask(self) -> Any:
        """The `BlockMask` of flex attention: blocks without a visible pair are skipped, so the cost is that of the branches."""
        from torch.nn.attention.flex_attention import create_block_mask

        def visible(batch: Any, head: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
            return self.sees(query, key)

        return create_block_mask(visible, None, None, len(self), len(self), device=str(self.input_ids.device))

    def branch_mask(self, tree: Tree, tokens: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """(tokens, trunk + tokens) additive: a branch of that length against its trunk and itself. A view of one mask for all."""
        trunk, longest = max(t.trunk for t in self.trees), max(max(t.branches) for t in self.trees)
        if (dtype, device) not in self._masks:
            empty = torch.full((longest, trunk + longest), -torch.inf, dtype=dtype, device=device)
            self._masks[dtype, device] = empty.triu(trunk + 1)
        return self._masks[dtype, device][:tokens, trunk - tree.trunk : trunk + tokens]


def equal_prompts(input_ids: torch.Tensor, lengths: Lengths, P: int) -> Groups:
    """Row numbers by prompt, token by token, wherever they stand among the (B, P + T) rows; in order of first appearance."""
    groups: dict[tuple[int, ...], list[int]] = {}
    ids, prompts = input_ids[:, :P].tolist(), lengths.prompt.tolist()
    for i, (row, p) in enumerate(zip(ids, prompts, strict=True)):
        groups.setdefault(tuple(row[P - p :]), []).append(i)
    return list(groups.values())


def is_regular(attention_mask: torch.Tensor, lengths: Lengths) -> bool:
    """Whether every row has a prompt, and neither prompt nor completion a hole in its mask."""
    return bool((lengths.prompt > 0).all() and (attention_mask.sum(dim=1) == lengths.total).all())


def lay_out(input_ids: torch.Tensor, attention_mask: torch.Tensor, T: int) -> Layout:
    """The line of trees of (B, P + T) rows, all with a prompt (see `is_regular`). Rows without completion need no tokens; where
    no row has one, a single unlabelled token keeps the line from being empty."""
    P = input_ids.size(1) - T
    lengths = lengths_of(attention_mask[:, :P], attention_mask[:, P:])
    prompts, completions = lengths.prompt.tolist(), lengths.completion.tolist()
    trees: list[Tree] = []
    pieces: list[tuple[int, int, int]] = []  # row, first column, tokens
    groups = [[i for i in group if completions[i]] for group in equal_prompts(input_ids, lengths, P)]
    groups = [group for group in groups if group] or [[0]]
    for group in groups:
        trunk, branches = prompts[group[0]] - 1, tuple(max(completions[i], 1) for i in group)
        trees.append(Tree(trees[-1].stop if trees else 0, trunk, branches))
        pieces.append((group[0], P - 1 - trunk, trunk))
        pieces += [(i, P - 1, tokens) for i, tokens in zip(group, branches, strict=True)]

    def line(values: Sequence[int]) -> torch.Tensor:
        sizes = torch.tensor([tokens for _, _, tokens in pieces])
        return torch.tensor(list(values)).repeat_interleave(sizes).to(input_ids.device)

    row = line([i for i, _, _ in pieces])
    column = torch.cat([torch.arange(start, start + tokens) for _, start, tokens in pieces]).to(input_ids.device)
    in_branch = line([start == P - 1 and tokens > 0 for _, start, tokens in pieces]).bool()
    in_branch &= (column + 1 < P + T) & (column - P + 1 < lengths.completion.to(input_ids.device)[row])
    following = input_ids[row, (column + 1).clamp(max=P + T - 1)]
    numbers, kinds = [], []
    for number, tree in enumerate(trees):
        numbers += [number] * (1 + len(tree.branches))
        done = sum(len(each.branches) for each in trees[:number])
        kinds += [0, *range(done + 1, done + 1 + len(tree.branches))]
    token = in_branch.nonzero()[:, 0]
    return Layout(
        trees=tuple(trees),
        input_ids=input_ids[row, column],
        position_ids=column - (P - lengths.prompt.to(input_ids.device)[row]),
        labels=torch.where(in_branch, following, IGNORED),
        tree=line(numbers),
        branch=line(kinds),
        token=token,
        row=row[token],
        column=column[token] - (P - 1),
        n_rows=input_ids.size(0),
        width=T,
    )


# ---- which rows share a line -------------------------------------------------------------------------------------------


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
