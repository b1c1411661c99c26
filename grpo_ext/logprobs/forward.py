"""How log-probs are computed: micro-batches of like length where no gradient is needed, the same number on every rank.

Everything goes through the trainer's own `_get_per_token_logps_and_entropies`, so that a user's override of it, TRL's fused
head, autocast and PEFT keep doing their work. Knows the trainer; the arithmetic is in `grpo_ext.batch`.
"""

import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from grpo_ext.batch.micro_batches import Chunks, cut, in_lockstep, put_back
from grpo_ext.batch.padding import lengths_of, position_ids, rounded
from grpo_ext.batch.rollouts import MULTIMODAL_KEYS

Scored = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]

# Modules that hold one vector per absolute position (GPT-2 and GPT-Neo: wpe; OPT, XGLM, BioGPT: embed_positions; ...).
_ABSOLUTE_POSITIONS = re.compile(r"(^|\.)(wpe|embed_positions|positions?_embed(ding)?s?|pos_emb(ed)?)$")


def agree_on_maximum(accelerator: Any, value: int) -> int:
    """The largest `value` of any rank. A collective."""
    if accelerator.num_processes == 1:
        return value
    return int(accelerator.gather(torch.tensor([value], device=accelerator.device)).max())


def micro_batched(
    score: Callable[..., Scored],
    model: Any,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    logits_to_keep: int,
    *,
    max_rows: int | None,
    max_tokens: int | None,
    trims: bool,
    multiple: int | None,
    accelerator: Any,
    on_alone: Callable[[int], None],
    compute_entropy: bool = False,
    **per_token: torch.Tensor | None,
) -> Scored:
    """`score` of (B, P + T) rows, forward by forward, each trimmed to its own rows; results (B, T) in the rows' order.

    Args:
        score: the method that makes log-probs, `score(model, input_ids, attention_mask, logits_to_keep, ...)`.
        max_rows, max_tokens: at most so many rows, or padded tokens, to a forward (None: no limit).
        trims: whether padding may be cut off (False where it is not neutral: rows are chunked only).
        multiple: `pad_to_multiple_of`.
        on_alone: told how many rows exceed `max_tokens` by themselves.
        per_token: further (B, P + T) inputs, such as token-type ids.
    """
    T = logits_to_keep
    P = input_ids.size(1) - T
    lengths = rounded(lengths_of(attention_mask[:, :P], attention_mask[:, P:]), multiple)
    if not trims:
        lengths = type(lengths)(torch.full_like(lengths.prompt, P), torch.full_like(lengths.completion, T))
    chunks = cut(lengths, max_rows, max_tokens)
    on_alone(chunks.alone)
    chunks = in_lockstep(chunks, agree_on_maximum(accelerator, len(chunks)))
    logps, entropies = [], []
    for number, chunk in enumerate(chunks.rows):
        index = torch.tensor(chunk, device=input_ids.device)
        p, t = (min(int(each[list(chunk)].max()), most) for each, most in ((lengths.prompt, P), (lengths.completion, T)))
        columns = slice(P - p, P + t)
        extra: dict[str, Any] = {key: value[index, columns] for key, value in per_token.items() if value is not None}
        extra |= {"compute_entropy": True} if compute_entropy else {}
        part = score(model, input_ids[index, columns], attention_mask[index, columns], t, **extra)
        if number < len(chunks.real):
            logps.append(part[0])
            entropies.append(part[1])
    back = _back(chunks, input_ids.size(0), T)
    return back(logps), back(entropies) if compute_entropy else None, None


def _back(chunks: Chunks, n_rows: int, width: int) -> Callable[[list], torch.Tensor]:
    return lambda parts: put_back(parts, chunks, n_rows, width)


def is_plain(kwargs: dict[str, Any]) -> bool:
    """Whether a call can be cut into micro-batches: text only, and no loss over the whole batch beside the log-probs."""
    return not kwargs.get("compute_aux_loss") and all(kwargs.get(key) is None for key in MULTIMODAL_KEYS)


def is_prompt_learning(model: Any) -> bool:
    """Whether an adapter of `model` puts virtual tokens before the row (prompt, prefix and P-tuning)."""
    return any(getattr(adapter, "is_prompt_learning", False) for adapter in getattr(model, "peft_config", {}).values())


def has_absolute_positions(model: Any) -> bool:
    """Whether a text model has an embedding per absolute position, which left padding shifts unless it is told positions."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    config = getattr(base, "config", None)
    if config is None or config.get_text_config() is not config:
        return False  # a composite model numbers its own positions, images included
    if is_prompt_learning(model):
        return False  # PEFT drops position ids there, with a warning
    if "position_ids" not in inspect.signature(base.forward).parameters:
        return False
    return any(_ABSOLUTE_POSITIONS.search(name) for name, _ in base.named_modules())


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
