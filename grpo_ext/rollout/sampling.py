"""How the engine is asked to sample, and where that departs from what the trainer scores. Pure, and needs no torch.

The engine's log-probs are those of the distribution it sampled from, renormalised; the trainer scores the whole vocabulary at the
temperature alone. The two agree where `SamplingSettings.departures` is empty. What the settings do to logits: `logprobs.support`.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

# Restrictions whose effect on a token depends on text or state that is not replayed.
_STATEFUL = ("structured_outputs", "bad_words", "thinking_token_budget")

# Fields of `GRPOConfig` with the values at which they change nothing.
OFF: dict[str, Any] = {"top_p": 1.0, "top_k": 0, "min_p": None, "repetition_penalty": 1.0}


@dataclass(frozen=True)
class SamplingSettings:
    """How tokens are drawn. Defaults change nothing. top_k: tokens kept, 0 for all; top_p, min_p: shares in [0, 1]."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: Sequence[int] = ()
    min_tokens: int = 0
    stateful: tuple[str, ...] = ()

    @classmethod
    def of(cls, given: Any) -> "SamplingSettings":
        """Those of a `vllm.SamplingParams`, or of a mapping with its names; None means what the default means."""

        def get(name: str) -> Any:
            value = given.get(name) if isinstance(given, Mapping) else getattr(given, name, None)
            return value if value is not None else getattr(cls, name, None)

        stateful = tuple(name for name in _STATEFUL if get(name))
        return cls(
            **{name: float(get(name)) for name in ("temperature", "top_p", "min_p")},
            **{name: float(get(name)) for name in ("repetition_penalty", "frequency_penalty", "presence_penalty")},
            top_k=max(int(get("top_k")), 0),
            logit_bias={int(token): float(bias) for token, bias in (get("logit_bias") or {}).items()},
            allowed_token_ids=tuple(get("allowed_token_ids") or ()),
            min_tokens=int(get("min_tokens")),
            stateful=stateful,
        )

    @property
    def truncation(self) -> dict[str, float]:
        """What cuts tokens off by their probability, by name."""
        given = {"top_p": (self.top_p, 1.0), "top_k": (self.top_k, 0), "min_p": (self.min_p, 0.0)}
        return {name: value for name, (value, off) in given.items() if value != off}

    @property
    def penalties(self) -> dict[str, Any]:
        """What shifts single logits, by name."""
        names = {"repetition_penalty": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0}
        shifts: dict[str, Any] = {name: getattr(self, name) for name, off in names.items() if getattr(self, name) != off}
        return shifts | ({"logit_bias": dict(self.logit_bias)} if self.logit_bias else {})

    @property
    def restrictions(self) -> tuple[str, ...]:
        """What forbids tokens by other rules, by name."""
        own = ("allowed_token_ids",) * bool(self.allowed_token_ids) + ("min_tokens",) * bool(self.min_tokens)
        return (*own, *self.stateful)

    @property
    def not_replayed(self) -> tuple[str, ...]:
        """Those of the restrictions that cannot be told from token ids, by name: `sampling_mismatch="correct"` cannot take them."""
        return tuple(name for name in self.restrictions if name != "allowed_token_ids")

    @property
    def departures(self) -> dict[str, Any]:
        """Everything but the temperature that makes the sampled distribution another than the model's."""
        return self.truncation | self.penalties | {name: True for name in self.restrictions}


def effective_sampling(args: Any) -> dict[str, Any]:
    """Sampling parameters by vLLM's names, as a `GRPOConfig` and its `generation_kwargs` (merged over it last) ask for."""
    regex = args.vllm_structured_outputs_regex
    return _fields(args) | dict(as_mapping(args.generation_kwargs) or {}) | ({"structured_outputs": regex} if regex else {})


def _fields(args: Any) -> dict[str, Any]:
    return {name: getattr(args, name) for name in ("temperature", *OFF)}


def as_mapping(value: Any) -> Any:
    """A JSON object that came as text, as on a command line; anything else as it is."""
    return json.loads(value) if isinstance(value, str) and value.strip().startswith("{") else value


def neutral(args: Any) -> dict[str, Any]:
    """The settings, by field of `GRPOConfig`, that take the departures away. `generation_kwargs` that are left empty are None."""
    departures = SamplingSettings.of(effective_sampling(args)).departures
    own = SamplingSettings.of(_fields(args)).departures
    found = {name: value for name, value in OFF.items() if name in departures and name in own}
    if args.vllm_structured_outputs_regex:
        found["vllm_structured_outputs_regex"] = None
    kwargs = as_mapping(args.generation_kwargs) or {}
    left = {name: value for name, value in kwargs.items() if name not in departures}
    return found if left == kwargs else found | {"generation_kwargs": left or None}


def listed(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in settings.items())
