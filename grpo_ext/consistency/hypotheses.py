"""What the engine's log-probs would be if something in particular were wrong, made from the actor's logits. Pure."""

from collections.abc import Sequence

import torch

from grpo_ext.logprobs.support import processed
from grpo_ext.rollout.sampling import SamplingSettings


def hypotheses(
    logits_TV: torch.Tensor, ids_T: torch.Tensor, prompt: Sequence[int], settings: SamplingSettings
) -> dict[str, torch.Tensor]:
    """Log-probs (T,) of a completion's tokens by hypothesis; NaN where a hypothesis says nothing.

    plain: the whole vocabulary at the temperature, as it should be. penalised: with penalties, logit bias and allowed tokens.
    truncated: with these, and top_k, top_p, min_p. likeliest: of the likeliest token. next, previous: of the neighbour.

    Args:
        logits_TV: the actor's, before the temperature.
    """
    output = ids_T.tolist()
    plain = (logits_TV.float() / settings.temperature).log_softmax(dim=-1)
    found = {"plain": _at(plain, ids_T), "likeliest": plain.max(dim=-1).values}
    if settings.penalties or settings.allowed_token_ids:
        found["penalised"] = _at(processed(logits_TV, settings, prompt, output, truncate=False).log_softmax(dim=-1), ids_T)
    if settings.truncation:
        found["truncated"] = _at(processed(logits_TV, settings, prompt, output).log_softmax(dim=-1), ids_T)
    nothing = plain.new_full((1,), torch.nan)
    found["next"] = torch.cat([found["plain"][1:], nothing])
    found["previous"] = torch.cat([nothing, found["plain"][:-1]])
    return found


def fitted_temperature(logits_NV: torch.Tensor, ids_N: torch.Tensor, logps_N: torch.Tensor) -> float:
    """The temperature at which the log-probs of `ids_N` under the logits come nearest to `logps_N` (mean |difference|)."""
    usable = torch.isfinite(logps_N)
    logits, ids, target = logits_NV[usable].float(), ids_N[usable], logps_N[usable].float()
    if not len(ids):
        return 1.0

    def off(log_temperature: float) -> float:
        scaled = logits / torch.tensor(log_temperature).exp()
        return float((_at(scaled, ids) - scaled.logsumexp(dim=-1) - target).abs().mean())

    low, high = -2.5, 2.5
    for _ in range(3):  # a grid of 21, refined twice: a percent, a hundredth of it in the end
        grid = torch.linspace(low, high, 21).tolist()
        best = min(grid, key=off)
        width = grid[1] - grid[0]
        low, high = best - width, best + width
    return float(torch.tensor(best).exp())


def _at(logps_TV: torch.Tensor, ids_T: torch.Tensor) -> torch.Tensor:
    return logps_TV.gather(-1, ids_T[:, None]).squeeze(-1)


def residual(given_N: torch.Tensor, expected_N: torch.Tensor) -> float:
    """Mean |difference| over the tokens where both are finite; 0 where there are none."""
    difference = (given_N.double() - expected_N.double()).abs()
    finite = torch.isfinite(difference)
    return float(difference[finite].mean()) if finite.any() else 0.0
