"""A push tried out on names and shapes alone, before a byte moves.

A name that the engine refuses in the middle of a real push leaves it half on the meta device, and a part of a fused layer
(q without k and v) would be accepted and corrupt it. So the engine's own loading code is run once on tensors without storage,
with every write counted; names then need not be compared with parameters, which they rarely equal.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from grpo_ext import _trl


def rehearse_push(llm: Any, outlines: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Check that pushing `outlines` ((checkpoint name, tensor on the meta device)) writes the whole model and nothing is ignored.

    Raises:
        ValueError: naming the weight that the engine does not know, ignores, or would be left without.
    """
    outlines = list(outlines)
    model = _trl.engine_model(llm)
    shared = _storages(model)
    current: list[str] = []
    ignored: list[str] = []
    with _trl.rehearsal(llm) as written:

        def supply() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in outlines:
                current[:] = [name]
                before = sum(written.values())
                yield name, tensor
                if sum(written.values()) == before:
                    ignored.append(name)

        try:
            model.load_weights(supply())
        except Exception as error:
            raise ValueError(
                f"The engine ({type(model).__name__}) refused the actor's weight {current[0] if current else '?'!r}: {error}. "
                "Actor and engine are not the same architecture, or the actor was given modules that the engine lacks. "
                "Pass the trainer a model whose directory holds this architecture, or set use_vllm=False."
            ) from error
        missing = _unwritten(llm, written, shared)
    if len(ignored) == len(outlines):
        ignored = []  # this model collects its weights before it loads any: who was ignored cannot be told, what is missing can
    if ignored:
        raise ValueError(
            f"The engine ({type(model).__name__}) ignores {len(ignored)} of the actor's weights, for example {ignored[0]!r}: it "
            "would sample from another model than the one that is trained. Take the extra modules out of the actor, or set "
            "use_vllm=False."
        )
    if missing:
        name, got, wanted = missing[0]
        raise ValueError(
            f"A push would leave {len(missing)} of the engine's weights unwritten, for example {name!r} ({got} of {wanted} "
            "elements): it would keep sampling from old values. Pass the trainer the whole model, or set use_vllm=False."
        )


def _storages(model: torch.nn.Module) -> dict[str, int]:
    """Parameter name -> address, for those that have one: shared addresses are tied weights."""
    return {n: p.data_ptr() for n, p in model.named_parameters(remove_duplicate=False) if p.numel() and p.data_ptr()}


def _unwritten(llm: Any, written: dict[int, int], storages: dict[str, int]) -> list[tuple[str, int, int]]:
    """(name, elements it would get, elements it has) of the parameters that a push leaves incomplete."""
    complete: set[int] = set()
    missing: list[tuple[str, int, int]] = []
    for layer_name, layer in _trl.loaded_layers(llm):
        for name, parameter in layer.named_parameters(recurse=False):
            full_name = f"{layer_name}.{name}" if layer_name else name
            got, wanted = written.get(id(parameter), 0), _trl.expected_elements(layer, name, parameter)
            if got >= wanted:
                complete.add(storages.get(full_name, 0))
            else:
                missing.append((full_name, got, wanted))
    return [entry for entry in missing if storages.get(entry[0], -1) not in complete]
