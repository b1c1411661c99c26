"""PEFT adapters and the engine: which can be pushed, and the payload of a push that carries the adapter alone."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


def check_pushable_adapter(model: Any, weight_sync: str) -> None:
    """Refuse an adapter with which engine and actor could not agree.

    Raises:
        ValueError: prompt learning; an adapter on one side of tied embeddings; more than plain LoRA in adapter mode.
    """
    config = model.active_peft_config
    kind = config.peft_type.value if hasattr(config.peft_type, "value") else config.peft_type
    if config.is_prompt_learning:
        raise ValueError(
            f"{kind} adds virtual tokens, which cannot be folded into weights, so the engine could not sample from this actor. "
            "Use an adapter that merges (LoRA, DoRA, IA3, OFT, LoHa ...), or set use_vllm=False."
        )
    _check_bias(model)
    _check_tied_embeddings(model)
    if weight_sync == "adapter":
        _check_plain_lora(config, kind)


def _check_bias(model: Any) -> None:
    for name, module in model.named_modules():
        flags = getattr(module, "lora_bias", None)  # {adapter: bool} on LoRA layers
        if isinstance(flags, dict) and any(flags.values()) and getattr(module.get_base_layer(), "bias", None) is None:
            raise ValueError(
                f"lora_bias=True on {name}, whose base layer has no bias that the adapter's could be folded into. Set "
                "lora_bias=False, or take the module out of target_modules."
            )


def _check_tied_embeddings(model: Any) -> None:
    base = model.get_base_model()
    text_config = base.config.get_text_config()
    if not getattr(text_config, "tie_word_embeddings", False):
        return
    embedding, head = base.get_input_embeddings(), base.get_output_embeddings()
    if head is None or not (_is_adapted(embedding) or _is_adapted(head)):
        return
    if _is_adapted(embedding) and _is_adapted(head) and _trained_weight(embedding) is _trained_weight(head):
        return
    side = "input embeddings" if _is_adapted(embedding) else "output head"
    raise ValueError(
        f"The model ties its embeddings, and the adapter changes the {side} only: input and output then use different "
        "weights, while the engine has one matrix for both (31 nats apart in a trial). Take the embeddings out of the "
        "adapter, or train them whole and tied with modules_to_save=['embed_tokens'] and ensure_weight_tying=True."
    )


def _is_adapted(module: nn.Module) -> bool:
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    return isinstance(module, (BaseTunerLayer, AuxiliaryTrainingWrapper))


def _trained_weight(module: Any) -> Any:
    """The parameter by which an adapted embedding differs from its base; equal objects on both sides mean they are tied."""
    from peft.utils.other import ModulesToSaveWrapper, TrainableTokensWrapper

    if isinstance(module, ModulesToSaveWrapper):
        return module.modules_to_save[module.active_adapters[0]].weight
    if isinstance(module, TrainableTokensWrapper):
        adapter = module.token_adapter
        return adapter.trainable_tokens_delta[adapter.active_adapters[0]]
    return object()


def _check_plain_lora(config: Any, kind: str) -> None:
    extras = [
        name
        for name in (
            "use_dora",
            "lora_bias",
            "modules_to_save",
            "trainable_token_indices",
            "target_parameters",
            "layer_replication",
        )
        if getattr(config, name, None)
    ]
    if getattr(config, "bias", "none") != "none":
        extras.append(f"bias={config.bias!r}")
    if kind != "LORA" or extras:
        what = kind if kind != "LORA" else f"LoRA with {', '.join(extras)}"
        raise ValueError(
            f"vllm_weight_sync='adapter' was given with {what}; the engine applies plain LoRA matrices only. Set "
            "vllm_weight_sync='merged', which takes every adapter that merges."
        )


def adapter_payload(model: Any, gather: Callable[[list[nn.Parameter]], Any]) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """(configuration, {PEFT name: matrix}) of the active LoRA adapter, as copies. All ranks take part in the gather."""
    name = model.active_adapter
    infix = f".{name}."
    owned = {n: p for n, p in model.named_parameters() if ".lora_" in n and infix in n}
    with gather(list(owned.values())):
        tensors = {n.replace(infix, "."): p.detach().clone() for n, p in owned.items()}
    return model.peft_config[name].to_dict(), tensors
