"""Where dropout is at work in a model, and what takes it away. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

# PEFT's adapters whose config does not call the probability what their layers call it.
_FIELD_OF = {"oft_dropout": "module_dropout", "delora_dropout": "module_dropout"}


@dataclass(frozen=True)
class Dropout:
    """where: the module's name. kind: "module" of the model, "adapter" for one of an adapter's, or "layer" for one that passes a
    probability on to a function; the latter two hold it as `setting`."""

    where: str
    p: float
    kind: str
    setting: str = ""


def active_dropout(model: nn.Module) -> list[Dropout]:
    """What drops something out in training mode, whatever mode the model is in.

    Dropout modules, layers that pass a probability of their own on to a function (attention's, OPT's, Starcoder 2's, whole layers
    in `layerdrop`), and adapters that keep one for every name."""
    return [each for name, module in model.named_modules() for each in _of_module(name, module)]


def _of_module(name: str, module: nn.Module) -> Iterator[Dropout]:
    if "dropout" in type(module).__name__.lower():
        p, parent = _probability(getattr(module, "p", None)), name.split(".")[-2:][0]
        in_adapter = parent.endswith("_dropout")  # PEFT keeps one for every adapter in a dict: lora_dropout.default
        if p > 0:
            yield Dropout(name, p, "adapter", parent) if in_adapter else Dropout(name, p, "module")
        return
    for attribute, value in vars(module).items():
        if "drop" in attribute and (p := _probability(value)) > 0:
            yield Dropout(f"{name}.{attribute}".lstrip("."), p, "adapter" if isinstance(value, dict) else "layer", attribute)


def _probability(value: Any) -> float:
    """0 for what is no probability. PEFT keeps one for every adapter in a dict."""
    values = value.values() if isinstance(value, dict) else (value,)
    return max((float(v) for v in values if isinstance(v, int | float) and not isinstance(v, bool)), default=0.0)


def remedies(found: Sequence[Dropout], config: Mapping[str, Any]) -> list[str]:
    """The settings that take it away. config: the model's; a layer has its probability from the field of that value."""
    adapter = [
        f"{_FIELD_OF.get(each.setting, each.setting)}=0 in the adapter's config" for each in found if each.kind == "adapter"
    ]
    modules = ["disable_dropout=True" for each in found if each.kind == "module"]
    layers = {each.setting: each.p for each in found if each.kind == "layer"}
    fields = [key for key, value in config.items() if "drop" in key and value in layers.values()]
    model = [f"model_init_kwargs={dict.fromkeys(fields or layers, 0.0)}"] if layers else []
    return list(dict.fromkeys([*adapter, *modules, *model]))
