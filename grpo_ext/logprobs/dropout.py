"""Where dropout is at work in a model. Pure."""

from torch import nn


def active_dropout(model: nn.Module) -> dict[str, float]:
    """{module name: probability} of what drops something out in training mode, whatever mode the model is in.

    Dropout modules, and attention layers that pass their `attention_dropout` on to a kernel.
    """
    found: dict[str, float] = {}
    for name, module in model.named_modules():
        p = module.p if isinstance(module, nn.modules.dropout._DropoutNd) else getattr(module, "attention_dropout", 0.0)
        if isinstance(p, (int, float)) and p > 0:
            found[name] = float(p)
    return found
