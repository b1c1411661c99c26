"""What ranks say to each other. Every function is a collective: all ranks call it, in the same order."""

from typing import Any

import torch


def is_alone(accelerator: Any) -> bool:
    return accelerator.num_processes == 1


def reduced(accelerator: Any, sums: torch.Tensor, maxima: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`sums` added and `maxima` taken over all ranks: one SUM and one MAX reduction, in the dtype given."""
    if is_alone(accelerator):
        return sums, maxima
    sums, maxima = sums.clone(), maxima.clone()
    operations = torch.distributed.ReduceOp
    under_way = [
        torch.distributed.all_reduce(tensor, op=op, async_op=True)
        for tensor, op in ((sums, operations.SUM), (maxima, operations.MAX))
    ]
    for work in under_way:  # both at once: what they cost is the way there and back
        work.wait()
    return sums, maxima


def gathered_on_main(accelerator: Any, item: Any) -> list[Any] | None:
    """The `item` of every rank, in the order of ranks, on the main process; None on the others."""
    if is_alone(accelerator):
        return [item]
    items = [None] * accelerator.num_processes if accelerator.is_main_process else None
    torch.distributed.gather_object(item, items)
    return items


def from_all(accelerator: Any, item: Any) -> list[Any]:
    """The `item` of every rank, in the order of ranks, on all of them."""
    if is_alone(accelerator):
        return [item]
    items = [None] * accelerator.num_processes
    torch.distributed.all_gather_object(items, item)
    return items


def from_main(accelerator: Any, item: Any) -> Any:
    """The main process's `item`, on every rank."""
    if is_alone(accelerator):
        return item
    items = [item]
    torch.distributed.broadcast_object_list(items)
    return items[0]
