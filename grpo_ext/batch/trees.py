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

from dataclasses import dataclass, field
from typing import Any

import torch

from grpo_ext.batch.groups import Inputs

IGNORED = -100  # the label of a token from which nothing is predicted


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
    tree, branch: (N,) which tree a token belongs to, and which branch (a number of its own in the whole line; 0 in a trunk).
    token, row, column: (M,) each, of the M labelled tokens: the place in the line, the row and the completion token.
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


def lay_out(rows: Inputs) -> Layout:
    """The line of trees of regular rows. Rows without completion need no tokens; where no row has one, a single unlabelled branch
    keeps the line from being empty."""
    P, prompts, completions = rows.P, rows.lengths.prompt.tolist(), rows.lengths.completion.tolist()
    trees: list[Tree] = []
    pieces: list[tuple[int, int, int, int, int]] = []  # row, first column, tokens, tree, branch
    groups = [[i for i in group if completions[i]] for group in rows.groups]
    for group in [group for group in groups if group] or [[0]]:
        trunk, branches = prompts[group[0]] - 1, tuple(max(completions[i], 1) for i in group)
        pieces.append((group[0], P - 1 - trunk, trunk, len(trees), 0))
        for i, tokens in zip(group, branches, strict=True):
            pieces.append((i, P - 1, tokens, len(trees), len(pieces)))
        trees.append(Tree(trees[-1].stop if trees else 0, trunk, branches))
    device = rows.ids.device
    row, first, tokens, tree, branch = torch.tensor(pieces).T
    row, tree, branch = (each.repeat_interleave(tokens).to(device) for each in (row, tree, branch))
    column = torch.cat([torch.arange(a, a + n) for a, n in zip(first.tolist(), tokens.tolist(), strict=True)]).to(device)
    labelled = (branch > 0) & (column - (P - 1) < rows.lengths.completion[row])
    token = labelled.nonzero()[:, 0]
    labels = torch.full_like(column, IGNORED)
    labels[token] = rows.ids[row[token], column[token] + 1]
    return Layout(
        trees=tuple(trees),
        input_ids=rows.ids[row, column],
        position_ids=column - (P - rows.lengths.prompt[row]),
        labels=labels,
        tree=tree,
        branch=branch,
        token=token,
        row=row[token],
        column=column[token] - (P - 1),
        n_rows=rows.ids.size(0),
        width=rows.T,
    )
