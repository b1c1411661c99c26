"""The actor's weights as a checkpoint would name them, read in buckets of bounded size.

What is read at once is a *unit*: one parameter, or one adapted module with all it takes to fold its adapter in. Units are
packed into buckets; under ZeRO-3 a bucket is what is gathered at once. The actor is never changed: an adapter is merged
into copies, and the parameters keep their storage, bit for bit.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from grpo_ext import _trl
from grpo_ext.rollout.names import CheckpointNames


@dataclass(frozen=True)
class WeightUnit:
    """Parameters that are read together.

    names: the actor's own names of what `read` returns.
    gathered: the parameters that must be whole while `read` runs (a base layer and its adapter, say).
    read: returns one tensor for each name. `merged`: the tensors are copies already.
    """

    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]
    dtypes: tuple[torch.dtype, ...]
    gathered: tuple[nn.Parameter, ...]
    read: Callable[[], list[torch.Tensor]]
    merged: bool

    @property
    def nbytes(self) -> int:
        return sum(full_shape(p).numel() * p.element_size() for p in self.gathered)


def full_shape(parameter: nn.Parameter) -> torch.Size:
    """Shape of a parameter, also while ZeRO-3 has it partitioned (its own shape is then (0,))."""
    return torch.Size(getattr(parameter, "ds_shape", parameter.shape))


def buckets(units: Iterable[WeightUnit], max_bytes: float) -> Iterator[list[WeightUnit]]:
    """Consecutive units of at most `max_bytes` together; a larger unit stands alone."""
    bucket: list[WeightUnit] = []
    filled = 0
    for unit in units:
        if bucket and filled + unit.nbytes > max_bytes:
            yield bucket
            bucket, filled = [], 0
        bucket.append(unit)
        filled += unit.nbytes
    if bucket:
        yield bucket


def iter_weights(
    units: Iterable[WeightUnit],
    names: CheckpointNames,
    max_bytes: float,
    gather: Callable[[list[nn.Parameter]], AbstractContextManager],
    partitioned: bool,
) -> Iterator[tuple[str, torch.Tensor]]:
    """(checkpoint name, tensor) for every weight of the actor.

    `gather` makes the parameters of one bucket whole and is entered by all ranks alike, in the same order. With
    `partitioned` each tensor is cloned as it is handed out, for the engine may keep it until the rest of its (fused) layer
    has come, and the bucket it lies in is gone by then: one bucket and the pending layer is all that exists at a time.
    """
    for bucket in buckets(units, max_bytes):
        with gather([p for unit in bucket for p in unit.gathered]):
            for unit in bucket:
                for own_name, tensor in zip(unit.names, unit.read(), strict=True):
                    for name, piece in names.convert(own_name, tensor.detach()):
                        yield name, piece.clone() if partitioned and not unit.merged else piece
                    del tensor


# ---- from a model to its units -------------------------------------------------------------------------------------


def weight_units(model: nn.Module) -> list[WeightUnit]:
    """Units of a transformers model or a `PeftModel`, tied weights once, in module order."""
    base = base_model(model)
    units: list[WeightUnit] = []
    seen: set[int] = set()
    adapted = base is not model

    def visit(module: nn.Module, prefix: str) -> None:
        layers: list[Any] = []
        if adapted:
            module, layers = _unwrap(module)
        own = {n: p for n, p in module.named_parameters(recurse=False) if id(p) not in seen}
        seen.update(id(p) for p in own.values())
        if layers and own:
            units.append(_merged_unit(module, layers, own, prefix))
        else:
            units.extend(_plain_unit(_join(prefix, name), parameter) for name, parameter in own.items())
        for name, child in module.named_children():
            visit(child, _join(prefix, name))

    visit(base, "")
    return units


def base_model(model: Any) -> Any:
    """The transformers model inside a `PeftModel`, or the model itself."""
    return model.get_base_model() if hasattr(model, "peft_config") and hasattr(model, "get_base_model") else model


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def _plain_unit(name: str, parameter: nn.Parameter) -> WeightUnit:
    return WeightUnit(
        (name,), (full_shape(parameter),), (parameter.dtype,), (parameter,), lambda: [parameter.data], merged=False
    )


def _unwrap(module: Any) -> tuple[nn.Module, list[Any]]:
    """(module that holds the base weights, adapter layers around it from the outside in) of what PEFT put in its place."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import ModulesToSaveWrapper, TrainableTokensWrapper

    if isinstance(module, ModulesToSaveWrapper):
        active = [] if module.disable_adapters else [a for a in module.active_adapters if a in module.modules_to_save]
        return (module.modules_to_save[active[0]] if active else module.original_module), []
    if isinstance(module, TrainableTokensWrapper):
        module = module.token_adapter
    layers: list[Any] = []
    while isinstance(module, BaseTunerLayer):
        layers.append(module)
        module = getattr(module, "base_layer")  # noqa: B009 - a submodule, unknown to the type
    return module, layers


def _merged_unit(base: nn.Module, layers: list[Any], own: dict[str, nn.Parameter], prefix: str) -> WeightUnit:
    gathered = {id(p): p for p in [*own.values(), *(p for layer in layers for p in _adapter_parameters(layer))]}
    return WeightUnit(
        tuple(_join(prefix, name) for name in own),
        tuple(full_shape(p) for p in own.values()),
        tuple(p.dtype for p in own.values()),
        tuple(gathered.values()),
        lambda: _read_merged(base, layers, list(own)),
        merged=True,
    )


def _adapter_parameters(layer: Any) -> Iterator[nn.Parameter]:
    for name, child in layer.named_children():
        if name != "base_layer":
            yield from child.parameters()
    yield from layer.parameters(recurse=False)


def _read_merged(base: nn.Module, layers: list[Any], names: list[str]) -> list[torch.Tensor]:
    """Base weights with the active adapters folded in, as new tensors; base and adapter are as before afterwards.

    PEFT's own `merge` decides what folding means, for every kind of adapter. It works on copies, since in low precision
    unmerging does not give the old bits back.
    """
    parameters = {name: p for name, p in base._parameters.items() if p is not None}
    storages = {name: p.data for name, p in parameters.items()}
    try:
        for name, data in storages.items():
            parameters[name].data = data.clone()
        for layer in layers:
            if not layer.disable_adapters:
                layer.merge()  # not `safe_merge`: that copies and checks once more what is a copy already
        return [getattr(base, name).data for name in names]
    finally:
        base._parameters.update(parameters)
        for name, data in storages.items():
            parameters[name].data = data
        for layer in layers:
            _trl.forget_merge(layer)
