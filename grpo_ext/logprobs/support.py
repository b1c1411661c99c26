"""What the engine does to logits before it samples, done to the actor's: log-probs on the support that was sampled from. Pure.

The order is vLLM's (`vllm/v1/sample/sampler.py`): allowed tokens and logit bias, repetition, frequency and presence penalties,
temperature, min_p, top_k, top_p.
"""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch

from grpo_ext.rollout.sampling import SamplingSettings


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


def scored_on_support(
    logits_BTV: torch.Tensor, ids_BT: torch.Tensor, prompts: Sequence[Sequence[int]], settings: SamplingSettings
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs (B, T) of `ids_BT` and entropies (B, T), in nats, of what the settings leave of the logits.

    The support is that of these very logits, and the token that was sampled is always in it: a policy that has moved since may
    rank it lower, and its probability must not become 0.

    Args:
        logits_BTV: before the temperature. prompts: token ids of each row's prompt, which a repetition penalty looks at.
    """
    if settings.penalties or settings.allowed_token_ids:
        rows = zip(logits_BTV, ids_BT.tolist(), prompts, strict=True)
        whole = torch.stack([processed(logits, settings, prompt, ids, truncate=False) for logits, ids, prompt in rows])
    else:
        whole = logits_BTV.float() / settings.temperature
    sampled = torch.zeros_like(whole, dtype=torch.bool).scatter(-1, ids_BT[..., None], True)
    kept = torch.isfinite(truncated(whole.detach(), settings)) | sampled
    logps = whole.masked_fill(~kept, -torch.inf).log_softmax(dim=-1)
    entropy = -(logps.exp() * logps.masked_fill(~kept, 0.0)).sum(dim=-1)
    return logps.gather(-1, ids_BT[..., None]).squeeze(-1), entropy


class OnSupport:
    """Stands in for a model in TRL's log-prob method: the fused head's results, on the support that was sampled from.

    It needs the logits of the completions, (B, T, V), which the fused head spares.
    """

    def __init__(self, model: Any, settings: SamplingSettings):
        self.model, self.settings = model, settings

    def __call__(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor, fused_lm_head: bool, **kwargs: Any
    ) -> SimpleNamespace:
        first = int((labels >= 0).any(dim=0).int().argmax())  # the first column that is scored
        T = labels.size(1) - first
        outputs = self.model(input_ids=input_ids, attention_mask=attention_mask, logits_to_keep=T + 1, **kwargs)
        real = attention_mask[:, :first].bool()
        prompts = [ids[mask].tolist() for ids, mask in zip(input_ids[:, :first], real, strict=True)]
        logps, entropy = scored_on_support(outputs.logits[:, -T - 1 : -1], input_ids[:, first:], prompts, self.settings)
        return SimpleNamespace(log_probs=logps, entropy=entropy, aux_loss=getattr(outputs, "aux_loss", None))
