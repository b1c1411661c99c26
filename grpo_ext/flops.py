"""Floating-point operations: what training on a token takes, and what a device can do at most. Pure.

The count is the usual one (Kaplan et al. 2020, "Scaling Laws for Neural Language Models"; PaLM, appendix B): a multiply and an add for
each weight in the forward, the same again for the gradient of the activations, and for that of a weight that is trained. Attention's
own products are left out, so that long rows come out too low.
"""

from collections.abc import Iterable
from typing import Any

# Dense peak in bfloat16, TFLOP/s, from the makers' data sheets; the longest name that a device's own name contains counts.
PEAK_TFLOPS = {
    "A100": 312, "A800": 312, "H100 PCIE": 756, "H100 NVL": 835, "H100": 989, "H200": 989, "H800": 989, "H20": 148,
    "B200": 2250, "L4": 121, "L40S": 362, "A10": 125, "RTX 4090": 165, "RTX 3090": 71, "V100": 125, "MI300X": 1307, "MI250X": 383,
}  # fmt: skip


def peak_flops(device_name: str) -> float | None:
    """FLOP/s of a device in bfloat16, by its name as the driver gives it; None for one that is not listed."""
    words = device_name.upper().replace("-", " ").split()
    names = [name for name in PEAK_TFLOPS if _contains(words, name.split())]
    return PEAK_TFLOPS[max(names, key=len)] * 1e12 if names else None


def _contains(words: list[str], name: list[str]) -> bool:
    return any(words[i : i + len(name)] == name for i in range(len(words)))


def training_flops_per_token(parameters: Iterable[Any]) -> float:
    """6 for every trained parameter and 4 for every frozen one: a LoRA step spares the gradient of the base weights."""
    sizes = [(getattr(p, "ds_numel", p.numel()), p.requires_grad) for p in parameters]
    return float(sum((6 if trained else 4) * size for size, trained in sizes))
