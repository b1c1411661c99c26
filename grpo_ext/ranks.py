"""What ranks say to each other. Every function is a collective: all ranks call it, in the same order."""

from typing import Any

import torch


def is_alone(accelerator: Any) -> bool:
    return accelerator.num_processes == 1


class Reduction:
    """`sums` added and `maxima` taken over all ranks, in the dtype given: one SUM and one MAX reduction, under way from here on.
    `result` waits for both."""

    def __init__(self, accelerator: Any, sums: torch.Tensor, maxima: torch.Tensor):
        self._tensors, self._work = (sums, maxima), []
        if not is_alone(accelerator):
            self._tensors = sums.clone(), maxima.clone()
            operations = torch.distributed.ReduceOp.SUM, torch.distributed.ReduceOp.MAX
            for tensor, operation in zip(self._tensors, operations, strict=True):
                self._work.append(torch.distributed.all_reduce(tensor, op=operation, async_op=True))

    def result(self) -> tuple[torch.Tensor, torch.Tensor]:
        while self._work:
            self._work.pop().wait()
        return self._tensors


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
