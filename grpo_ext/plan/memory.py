"""Memory of a device under ZeRO-3: DeepSpeed's own estimate of the model states, the reference, and the engine's share.

The model is built from its configuration on the meta device: no weight is loaded, nothing is fetched. torch, transformers and
DeepSpeed are imported by the functions that need them.
"""

import math
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from grpo_ext.plan.arithmetic import has_reference, is_colocated
from grpo_ext.plan.zero import Zero

GB = 10**9
# GB as in the makers' data sheets, taken as 10^9 bytes, the cautious reading. A device that is not here: give its GB.
DEVICES = {
    "A10": 24, "A100-40": 40, "A100-80": 80, "B200": 180, "GH200-96": 96, "H100": 80, "H200": 141, "L4": 24, "L40S": 48,
    "MI250X": 128, "MI300X": 192, "MI325X": 256, "RTX3090": 24, "RTX4090": 24, "RTX5090": 32, "T4": 16, "V100-32": 32,
}  # fmt: skip


class NoEstimate(ValueError):
    """No estimate can be made; says why, and what to give."""


@dataclass(frozen=True)
class Memory:
    """Bytes of one device, if not said otherwise; None where the device is unknown.

    states: weights, gradients and optimizer states by DeepSpeed's estimate; cpu_per_machine: what it asks of CPU memory.
    engine: what the engine reserves, weights and cache together. left: for activations, logits and fragmentation."""

    model: str
    parameters: int
    largest_layer: int
    states: int
    cpu_per_machine: int
    reference: int
    engine_weights: int
    engine: int | None
    device: str | None
    device_memory: int | None
    left: int | None


def estimate(s: Any, processes: int, zero: Zero, model: str, device: str | None = None, adapter: bool = False) -> Memory:
    """Memory of a device in a ZeRO-3 run. adapter: whether a PEFT adapter is trained, whose base is the reference.

    Raises NoEstimate where the model's configuration is not at hand, or DeepSpeed is not installed."""
    name, memory = device_of(device)
    parameters, largest = parameters_of(model)
    cpu, states = deepspeed_estimate(parameters, largest, processes, zero)
    width = 4 if s.bf16 is False and not s.fp16 else 2  # TRL trains in bfloat16 unless told otherwise
    holds_reference = has_reference(s) and not adapter and not zero.offload_param
    reference = width * parameters // processes if holds_reference else 0
    weights, engine = 0, 0 if memory else None
    if is_colocated(s):
        engine_width = {None: width, "float32": 4}.get(s.vllm_dtype, 2)
        weights = engine_width * parameters // s.vllm_tensor_parallel_size
        engine = int(s.vllm_gpu_memory_utilization * memory) if memory else None
    left = memory - states - reference - engine if memory and engine is not None else None
    return Memory(model, parameters, largest, states, cpu, reference, weights, engine, name, memory, left)


def device_of(given: str | None) -> tuple[str | None, int | None]:
    """(name, bytes) of a device in `DEVICES`, of "48" GB, or, None given, of the one that is here; (None, None) without any."""
    if given is None:
        import torch

        if not torch.cuda.is_available():
            return None, None
        found = torch.cuda.get_device_properties(0)
        return found.name, found.total_memory
    known = {name.lower(): (name, size * GB) for name, size in DEVICES.items()}
    if given.lower() in known:
        return known[given.lower()]
    with suppress(ValueError):
        if 0 < float(given) < math.inf:
            return f"{float(given):g} GB", int(float(given) * GB)
    raise NoEstimate(
        f"device {given!r} is not known. Give one of {', '.join(DEVICES)}, or its memory in GB, as in --device 48."
    )


def parameters_of(model: str) -> tuple[int, int]:
    """(all parameters, those of the largest layer) of a model directory or a cached hub id; tied weights count once."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    try:  # code that a checkpoint brings along is never run
        config = AutoConfig.from_pretrained(model, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers validates as it reads: any kind may come
        raise NoEstimate(
            f"The configuration of {model!r} is not at hand ({_said(error)}). Give a local directory with its config.json, or "
            "download the model first."
        ) from None
    refused: list[Exception] = []
    for kind in (AutoModelForCausalLM, AutoModelForImageTextToText):
        try:
            with torch.device("meta"):
                built = kind.from_config(config)
            break
        except Exception as error:
            refused.append(error)
    else:
        raise NoEstimate(
            f"No model can be built from the configuration of {model!r} ({_said(refused[0])}). Give that of a decoder."
        )
    largest = max(sum(p.numel() for p in module.parameters(recurse=False)) for module in built.modules())
    return sum(p.numel() for p in built.parameters()), largest


def _said(error: Exception) -> str:
    """The first line of an error that says something."""
    lines = [line.strip().rstrip(".") for line in str(error).splitlines() if line.strip() and not line.endswith(":")]
    return lines[0] if lines else type(error).__name__


def deepspeed_estimate(parameters: int, largest: int, processes: int, zero: Zero) -> tuple[int, int]:
    """(bytes of CPU memory a machine, bytes of a device) by DeepSpeed's own function for the states of ZeRO-3."""
    try:
        from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs
    except ImportError:
        raise NoEstimate(
            "DeepSpeed is not installed, and the estimate is its own. pip install 'grpo-ext[deepspeed]'."
        ) from None
    cpu, device, _ = estimate_zero3_model_states_mem_needs(
        parameters,
        largest,
        num_gpus_per_node=max(1, processes // zero.machines),
        num_nodes=zero.machines,
        cpu_offload=zero.offload_optimizer,
        cpu_offload_params=zero.offload_param,
        zero_init=True,
    )
    return cpu, device
