"""What the engine does to logits before it samples, and the same done to the actor's. Pure.

The order is vLLM's (`vllm/v1/sample/sampler.py`): restrictions and logit bias, repetition, frequency and presence penalties,
temperature, min_p, top_k, top_p. The engine's log-probs are those of what is left, renormalised; the trainer scores the whole
vocabulary at the temperature alone. The two agree where `SamplingSettings.departures` is empty.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

# Restrictions whose effect on a token depends on text or state that is not replayed.
_STATEFUL = ("structured_outputs", "bad_words", "thinking_token_budget")


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
    def departures(self) -> dict[str, Any]:
        """Everything but the temperature that makes the sampled distribution another than the model's."""
        return self.truncation | self.penalties | {name: True for name in self.restrictions}


def effective_sampling(args: Any) -> dict[str, Any]:
    """Sampling parameters by vLLM's names, as a `GRPOConfig` and its `generation_kwargs` (merged over it last) ask for."""
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    return {name: getattr(args, name) for name in names} | dict(args.generation_kwargs or {})


def processed(
    logits_TV: torch.Tensor,
    settings: SamplingSettings,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
    truncate: bool = True,
) -> torch.Tensor:
    """Logits (T, V) of a completion as the engine samples from them; -inf where a token cannot be drawn.

    Args:
        prompt, output: token ids of the row, which penalties look at; position t sees output[:t].
        truncate: whether top_k, top_p and min_p are applied.

    What is listed in `settings.stateful` is left out: it cannot be told from token ids.
    """
    logits = logits_TV.double() if logits_TV.dtype == torch.float64 else logits_TV.float()
    logits = _shifted(logits, settings, prompt, output) / settings.temperature
    return truncated(logits, settings) if truncate else logits


def _shifted(logits: torch.Tensor, s: SamplingSettings, prompt: Sequence[int], output: Sequence[int]) -> torch.Tensor:
    if s.allowed_token_ids:
        allowed = torch.full((logits.size(1),), -torch.inf, dtype=logits.dtype, device=logits.device)
        allowed[list(s.allowed_token_ids)] = 0.0
        logits = logits + allowed
    if s.logit_bias:
        bias = torch.zeros(logits.size(1), dtype=logits.dtype, device=logits.device)
        bias[list(s.logit_bias)] = torch.tensor(list(s.logit_bias.values()), dtype=logits.dtype, device=logits.device)
        logits = logits + bias
    if s.repetition_penalty == 1.0 and not s.frequency_penalty and not s.presence_penalty:
        return logits
    counts = _counts_before(logits, output)
    seen = counts > 0
    if s.repetition_penalty != 1.0:
        repeated = seen.clone()
        repeated[:, list(set(prompt))] = True
        scaled = torch.where(logits > 0, logits / s.repetition_penalty, logits * s.repetition_penalty)
        logits = torch.where(repeated, scaled, logits)
    return logits - s.frequency_penalty * counts - s.presence_penalty * seen.to(logits.dtype)


def _counts_before(logits: torch.Tensor, output: Sequence[int]) -> torch.Tensor:
    """(T, V): how often each token stands before position t."""
    counts = torch.zeros_like(logits)
    for t, token in enumerate(output[: logits.size(0) - 1]):
        counts[t + 1 :, token] += 1
    return counts


def truncated(logits_TV: torch.Tensor, settings: SamplingSettings) -> torch.Tensor:
    """Logits, temperature applied, with -inf on what min_p, top_k and top_p cut off; ties at the k-th place stay."""
    logits = logits_TV
    if settings.min_p > 0:
        p = logits.softmax(dim=-1)
        logits = logits.masked_fill(p < settings.min_p * p.amax(dim=-1, keepdim=True), -torch.inf)
    if 0 < settings.top_k < logits.size(-1):
        logits = logits.masked_fill(logits < logits.topk(settings.top_k, dim=-1).values[..., -1:], -torch.inf)
    if settings.top_p < 1:
        ascending, at = logits.sort(dim=-1)
        cut = ascending.softmax(dim=-1).cumsum(dim=-1) <= 1 - settings.top_p
        cut[..., -1] = False
        logits = logits.masked_fill(torch.zeros_like(cut).scatter(-1, at, cut), -torch.inf)
    return logits


def log_kept_mass(logits_TV: torch.Tensor, settings: SamplingSettings) -> torch.Tensor:
    """(T,): log of the probability that truncation leaves, in nats: by how much the engine's log-probs exceed the model's."""
    whole = logits_TV.float()
    return truncated(whole, settings).logsumexp(dim=-1) - whole.logsumexp(dim=-1)
