"""A tree of tensors and plain values as one safetensors file, without pickle. Pure.

The tree (dicts with string keys, lists, tuples, tensors, numbers, strings, None) is JSON in the file's metadata, each tensor in it
replaced by {"$tensor": its name in the file, ...}. A file is whole or not there, and what was changed after it was written is
noticed: the metadata hold a digest of everything else.
"""

import json
import os
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from grpo_ext.files import replacing

VERSION = "1"
_KEY, _TREE, _DIGEST = "grpo_ext_state", "tree", "digest"


class StateError(ValueError):
    """A state file that cannot be used; the message names it and says why."""


class Unsavable(TypeError):
    """A tree that holds something else than tensors and plain values; the message says what, and where in the tree."""


def write_state(path: str | os.PathLike, tree: Any) -> None:
    """Write `tree` to `path`. Raises `Unsavable`, before anything is written."""
    found: dict[str, torch.Tensor] = {}
    text = json.dumps(_packed(tree, "", found))
    tensors = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in found.items()}
    metadata = {_KEY: VERSION, _TREE: text, _DIGEST: _digest(text, tensors)}
    with replacing(path) as unfinished:
        save_file(tensors, unfinished, metadata)


def check_savable(tree: Any) -> None:
    """Raises `Unsavable` where `write_state` would."""
    _packed(tree, "", {})


def read_state(path: str | os.PathLike, device: torch.device | str = "cpu") -> Any:
    """The tree that was written to `path`: same bits, same strides. Tensors that were on an accelerator go to `device`.

    Raises `StateError` for a file that is missing, damaged, not ours, or of another version of this format."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
    except (OSError, SafetensorError) as error:
        raise StateError(f"{path} is damaged or cannot be read ({error}).") from error
    if _KEY not in metadata:
        raise StateError(f"{path} was not written by grpo_ext.")
    if metadata[_KEY] != VERSION:
        raise StateError(f"{path} is a state of version {metadata[_KEY]}, and this grpo_ext reads version {VERSION}.")
    if metadata.get(_DIGEST) != _digest(metadata.get(_TREE, ""), tensors):
        raise StateError(f"{path} is damaged: its digest is not that of its content.")
    return _unpacked(json.loads(metadata[_TREE]), tensors, device)


def _digest(text: str, tensors: dict[str, torch.Tensor]) -> str:
    digest = blake2b(text.encode(), digest_size=16)
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _packed(value: Any, at: str, tensors: dict[str, torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        if value.layout != torch.strided:
            raise Unsavable(f"{at or 'the tree'} is a tensor of layout {value.layout}")
        name = f"{len(tensors):05d}"
        tensors[name] = value
        here = {"$tensor": name, "device": "cpu" if value.device.type == "cpu" else "accelerator"}
        return here if value.is_contiguous() else {**here, "stride": list(value.stride())}
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, dict):
        wrong = [key for key in value if not isinstance(key, str) or key.startswith("$")]
        if wrong:
            raise Unsavable(f"{at or 'the tree'} has the key {wrong[0]!r}")
        return {key: _packed(entry, f"{at}[{key!r}]", tensors) for key, entry in value.items()}
    if type(value) in (list, tuple):
        entries = [_packed(entry, f"{at}[{i}]", tensors) for i, entry in enumerate(value)]
        return entries if isinstance(value, list) else {"$tuple": entries}
    raise Unsavable(f"{at or 'the tree'} is a {type(value).__module__}.{type(value).__qualname__}")


def _unpacked(value: Any, tensors: dict[str, torch.Tensor], device: torch.device | str) -> Any:
    if isinstance(value, list):
        return [_unpacked(entry, tensors, device) for entry in value]
    if not isinstance(value, dict):
        return value
    if "$tuple" in value:
        return tuple(_unpacked(entry, tensors, device) for entry in value["$tuple"])
    if "$tensor" not in value:
        return {key: _unpacked(entry, tensors, device) for key, entry in value.items()}
    tensor = tensors[value["$tensor"]]
    if 0 not in value.get("stride", [0]):  # sums run in the order of memory: other strides could give other last bits
        tensor = torch.empty_strided(tensor.shape, value["stride"], dtype=tensor.dtype).copy_(tensor)
    return tensor if value["device"] == "cpu" else tensor.to(device)
