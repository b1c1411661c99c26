"""Attention over a line of trees, branch by branch: the trunk causally, each branch against its trunk and itself. Pure.

Its cost is that of the pairs that see each other (a branch's later half of itself apart), where a dense mask costs the square of
the line. Every part goes through torch's own kernel, so nothing of size N x N is ever there.
"""

from itertools import accumulate, pairwise
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention as attend

from grpo_ext.batch.trees import Layout


def branch_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layout: Layout,
    scale: float | None = None,
    dropout: float = 0.0,
) -> torch.Tensor:
    """(1, H, N, D) from query (1, H, N, D), key and value (1, H or fewer, N, D); as many key heads as divide H."""
    repeats = query.size(1) // key.size(1)
    if repeats > 1:
        key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
    options: dict[str, Any] = {"scale": scale, "dropout_p": dropout}
    parts = []
    for tree in layout.trees:
        start, forked = tree.start, tree.start + tree.trunk
        if len(tree.branches) == 1 or not tree.trunk:  # plain rows: no mask is needed
            edges = accumulate((start, tree.trunk + tree.branches[0], *tree.branches[1:]))
            for a, b in pairwise(edges):
                q, k, v = (each[:, :, a:b] for each in (query, key, value))
                parts.append(attend(q, k, v, is_causal=True, **options))
            continue
        q, trunk_key, trunk_value = (each[:, :, start:forked] for each in (query, key, value))
        parts.append(attend(q, trunk_key, trunk_value, is_causal=True, **options))
        at = forked
        for tokens in tree.branches:
            q, k, v = (each[:, :, at : at + tokens] for each in (query, key, value))
            k, v = torch.cat([trunk_key, k], dim=2), torch.cat([trunk_value, v], dim=2)
            mask = layout.branch_mask(tree, tokens, q.dtype, q.device)
            parts.append(attend(q, k, v, attn_mask=mask, **options))
            at += tokens
    return torch.cat(parts, dim=2)
