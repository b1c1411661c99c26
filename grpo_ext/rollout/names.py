"""From the names of the actor's parameters to those of its checkpoint, which are what an engine loads.

In transformers 5 the two differ for some architectures (fused experts, renamed prefixes). The library's own conversion, run
backwards, gives the checkpoint's; here it is applied to one tensor at a time, so that a push needs no second copy of the model.
"""

from collections.abc import Iterator
from typing import Any

import torch

# Wrappers that leave a trace in parameter names.
_TRACES = ("_checkpoint_wrapped_module.", "_orig_mod.")


class CheckpointNames:
    """Conversion of a model's parameters, one at a time.

    Args:
        model: the transformers model (inside a `PeftModel`, its base model).
        parameters: name -> tensor on the meta device, for all parameters that will be converted.

    Raises:
        ValueError: if some checkpoint tensor is made of several parameters, so that they cannot be converted one by one.
    """

    def __init__(self, model: Any, parameters: dict[str, torch.Tensor]):
        self._model = model
        self._as_is: set[str] = set()
        self.outlines: list[tuple[str, torch.Tensor]] = []  # (checkpoint name, tensor on the meta device), as they will come
        together = {name: t.shape for name, t in self._revert({_clean(n): t for n, t in parameters.items()}).items()}
        for name, tensor in parameters.items():
            pieces = self._revert({_clean(name): tensor})
            if list(pieces) == [_clean(name)]:
                self._as_is.add(name)
            self.outlines.extend(pieces.items())
        if {name: t.shape for name, t in self.outlines} != together:
            odd = sorted(set(together).symmetric_difference(name for name, _ in self.outlines))[:4]
            raise ValueError(
                f"{type(model).__name__} stores several parameters in one checkpoint tensor ({', '.join(odd) or 'shapes differ'}), "
                "so its weights cannot be pushed one at a time. Set use_vllm=False for this architecture."
            )

    def convert(self, name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """The checkpoint tensors that the parameter `name` becomes, as views where possible."""
        if name in self._as_is:
            yield _clean(name), tensor
        else:
            yield from self._revert({_clean(name): tensor}).items()

    def _revert(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        from transformers.core_model_loading import revert_weight_conversion

        return revert_weight_conversion(self._model, tensors)


def _clean(name: str) -> str:
    for trace in _TRACES:
        name = name.replace(trace, "")
    return name
