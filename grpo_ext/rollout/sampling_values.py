"""Which values of sampling parameters vLLM takes: what it would refuse at the first generation, with all models loaded. Pure.

`generation_kwargs` are merged over the fields of a `GRPOConfig`, so both are looked at.
"""

import math
from collections.abc import Callable
from numbers import Real
from types import SimpleNamespace
from typing import Any

from grpo_ext.rollout.sampling import OFF, as_mapping

TEMPERATURES = (0.01, 2.0)  # lower ones vLLM raises to the first without failing, higher ones it refuses


def is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_bias(value: Any) -> bool:
    return isinstance(value, dict) and all(str(token).isdigit() and is_number(bias) for token, bias in value.items())


def _is_tokens(value: Any) -> bool:
    return isinstance(value, list | tuple) and bool(value) and all(_is_whole(token) and token >= 0 for token in value)


_WANTED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "top_p": (lambda v: is_number(v) and 0 < v <= 1, "a number above 0 and at most 1"),
    "top_k": (lambda v: _is_whole(v) and v >= -1, "a whole number of tokens, 0 for all,"),
    "min_p": (lambda v: is_number(v) and 0 <= v <= 1, "a number from 0 to 1"),
    "repetition_penalty": (lambda v: is_number(v) and v > 0, "a number above 0"),
    "frequency_penalty": (lambda v: is_number(v) and -2 <= v <= 2, "a number from -2 to 2"),
    "presence_penalty": (lambda v: is_number(v) and -2 <= v <= 2, "a number from -2 to 2"),
    "logit_bias": (lambda v: v is None or _is_bias(v), "a mapping of token ids to numbers"),
    "allowed_token_ids": (lambda v: v is None or _is_tokens(v), "a list of token ids"),
    "min_tokens": (lambda v: _is_whole(v) and v >= 0, "a whole number, 0 or more,"),
}


def refused_fields(s: Any) -> dict[str, str]:
    """{field: what is needed there} of those that vLLM would refuse."""
    return _refused({name: getattr(s, name) for name in OFF if getattr(s, name) is not None})


def refused_kwargs(s: Any) -> dict[str, str]:
    """The same of `generation_kwargs`."""
    return _refused(generation_kwargs(s) or {})


def _refused(given: dict[str, Any]) -> dict[str, str]:
    return {name: _WANTED[name][1] for name, value in given.items() if name in _WANTED and not _WANTED[name][0](value)}


def generation_kwargs(s: Any) -> dict[str, Any] | None:
    """As they come to; None where they are no mapping."""
    try:
        kwargs = as_mapping(s.generation_kwargs) or {}
    except ValueError:
        return None
    return kwargs if isinstance(kwargs, dict) else None


def mended_kwargs(s: Any) -> dict[str, Any] | None:
    """`generation_kwargs` without a temperature, which belongs into the field, and without what vLLM would refuse."""
    out = {"temperature", *refused_kwargs(s)}
    return {name: value for name, value in (generation_kwargs(s) or {}).items() if name not in out} or None


def mended(s: Any) -> SimpleNamespace:
    """All that decides how tokens are drawn, as it is once the problems of its values are solved."""
    fields = {name: getattr(s, name) for name in (*OFF, "vllm_structured_outputs_regex")}
    off = {name: OFF[name] for name in refused_fields(s)}
    return SimpleNamespace(**fields | off, temperature=1.0, generation_kwargs=mended_kwargs(s))
