"""How a model counts positions, which is what padding can move. Needs no trainer."""

import inspect
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from grpo_ext.batch.padding import position_ids

# Modules that hold one vector per absolute position (GPT-2 and GPT-Neo: wpe; OPT, XGLM, BioGPT: embed_positions; ...).
_ABSOLUTE_POSITIONS = re.compile(r"(^|\.)(wpe|embed_positions|positions?_embed(ding)?s?|pos_emb(ed)?)$")

# Models that count so without such a module: sines computed once, and a norm with a weight per dimension after the rotation, which
# makes it one of absolute angles. Every causal model of transformers 5.17 was tried, left-padded against alone.
_ABSOLUTE_MODELS = ("ctrl", "hunyuan_v1_dense", "hunyuan_v1_moe")


def is_prompt_learning(model: Any) -> bool:
    """Whether an adapter of `model` puts virtual tokens before the row (prompt, prefix and P-tuning)."""
    return any(getattr(adapter, "is_prompt_learning", False) for adapter in getattr(model, "peft_config", {}).values())


def has_absolute_positions(model: Any) -> bool:
    """Whether a text model counts absolute positions, which left padding shifts unless it is told positions."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    config = getattr(base, "config", None)
    if config is None or config.get_text_config() is not config:
        return False  # a composite model numbers its own positions, images included
    if is_prompt_learning(model):
        return False  # PEFT drops position ids there, with a warning
    if "position_ids" not in inspect.signature(base.forward).parameters:
        return False
    return config.model_type in _ABSOLUTE_MODELS or any(_ABSOLUTE_POSITIONS.search(name) for name, _ in base.named_modules())


@contextmanager
def positions_passed(model: Any) -> Iterator[None]:
    """Forwards of `model` within get position ids that count from each row's first real token.

    Source: vLLM and `generate` count so; TRL's log-prob forward passes none, and is up to 0.8 nats off on a left-padded GPT-2.
    """

    def add(module: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        mask = kwargs.get("attention_mask")
        if kwargs.get("position_ids") is None and mask is not None and mask.dim() == 2:
            kwargs = {**kwargs, "position_ids": position_ids(mask)}
        return args, kwargs

    handle = model.register_forward_pre_hook(add, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def dynamic_rope_limit(config: Any) -> int | None:
    """Width beyond which rotary frequencies follow the longest row of the batch, padding included; None where they never do."""
    text = config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    variants = [each for each in (rope, *rope.values()) if isinstance(each, dict)]
    limits = [
        each.get("original_max_position_embeddings") or text.max_position_embeddings
        for each in variants
        if each.get("rope_type", each.get("type")) in ("dynamic", "longrope")
    ]
    return min(limits, default=None)
