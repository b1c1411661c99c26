"""A forward over trees where a forward over rows was asked for. Needs a model, but no trainer.

TRL's method builds its inputs from (ids, mask) and hands them to the model; a hook on the model turns what it built for a single
line of tokens into a tree's: position ids, labels that are shifted already, and who sees whom. The method, the fused head,
autocast, PEFT and DeepSpeed do their work as they do for rows.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from grpo_ext.batch.branch_attention import branch_attention
from grpo_ext.batch.groups import Inputs
from grpo_ext.batch.trees import Layout, lay_out

Scored = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]

# How trees are attended to, by the model's own attention implementation.
ATTENTIONS = ("sdpa", "flex_attention", "eager")


def attention_inputs(layout: Layout, attention: str, dtype: torch.dtype) -> dict[str, Any]:
    """What tells a model who sees whom: a function that attends so, a block mask, or an additive dense one."""
    if attention == "flex_attention":
        return {"attention_mask": layout.block_mask()}
    if attention == "eager":
        return {"attention_mask": layout.additive_mask(dtype)}
    # A mask of one element, which is handed through: for None transformers would build one of N x N.
    seen = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=layout.input_ids.device)
    return {"attention_mask": seen, "tree_attention": partial(branch_attention, layout=layout)}


@contextmanager
def tree_passed(model: Any, layout: Layout, attention: str, dtype: torch.dtype) -> Iterator[None]:
    """The forward of `model` within, called for the line's tokens, is one over the trees of `layout`."""

    def turn(module: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        kept = {name: value for name, value in kwargs.items() if name != "labels"}
        own = {"position_ids": layout.position_ids[None], "shift_labels": layout.labels[None]}
        return args, {**kept, **own, **attention_inputs(layout, attention, dtype)}

    handle = model.register_forward_pre_hook(turn, with_kwargs=True, prepend=True)
    try:
        yield
    finally:
        handle.remove()


def score_as_trees(
    method: Callable[..., Any],
    model: Any,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    logits_to_keep: int,
    *,
    attention: str,
    dtype: torch.dtype,
    compute_entropy: bool = False,
) -> Scored:
    """`method` (TRL's) for (B, P + T) rows by one forward over their trees; log-probs and entropies (B, T), 0 on padding."""
    layout = lay_out(Inputs(input_ids, attention_mask, logits_to_keep))
    line = layout.input_ids[None]
    options = {"compute_entropy": True} if compute_entropy else {}
    with tree_passed(model, layout, attention, dtype):
        logps, entropies, _ = method(model, line, torch.ones_like(line), line.size(1), **options)
    return layout.back(logps[0]), layout.back(entropies[0]) if compute_entropy else None, None
