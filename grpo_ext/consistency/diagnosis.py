"""From what was measured between engine and actor to the likely cause. Pure.

A fault on the way from weights to logits ("model side") shows when the engine scores given tokens; one that only sets in when
it samples, or when the actor computes its loss, does not. Within each side a cause is named because something that follows
from it, and from no other cause, was measured; the evidence says what.
"""

from dataclasses import dataclass, field
from typing import Any

# Mean |difference| of log-probs, in nats, that rounding explains between two correct implementations.
NOISE = {"float32": 1e-4, "bfloat16": 3e-2, "float16": 5e-3}
# A hypothesis explains a difference if it leaves at most this share of it.
_LEFT = 0.1


@dataclass(frozen=True)
class Evidence:
    """Measured on fresh rollouts, engine and actor on the same tokens; means of absolute differences, in nats, over `tokens`.

    actor: engine's log-probs against those the loss would see. bias: mean of the latter minus the former. probability: mean
        |difference| of the probabilities. largest: largest |difference| of log-probs.
    padding: the loss's log-probs, rows of all lengths in one batch, against row by row, both in evaluation mode.
    model: engine scoring the tokens at temperature 1, against the actor in evaluation mode; base: against the actor without
        its adapter; None where there is no such thing.
    hypotheses: engine's log-probs against those the actor's logits would give if ...; by the names that `candidates` uses.
    dropout: log-probs the loss would see against the same in evaluation mode; dropout_modules: where dropout sits.
    head: relative difference of the logits that both heads make of the same hidden states. tied: head and embedding are one.
    stale: parameters that differ bit by bit from what a push would write; compared: how many could be compared.
    corrected: whether the loss's log-probs are taken on the support that was sampled from.
    temperature, truncation, penalties, restrictions: see SamplingSettings; fitted: temperatures at which the actor's logits come nearest to the engine's
        log-probs, and to the loss's in evaluation mode.
    """

    tokens: int
    engine_dtype: str
    actor_dtype: str
    actor: float
    bias: float
    hypotheses: dict[str, float]
    probability: float = 0.0
    largest: float = 0.0
    padding: float = 0.0
    model: float | None = None
    base: float | None = None
    dropout: float = 0.0
    dropout_modules: tuple[str, ...] = ()
    head: float | None = None
    tied: bool = False
    stale: tuple[str, ...] = ()
    compared: int = 0
    log_kept_mass: float = 0.0
    truncation: dict[str, float] = field(default_factory=dict)
    penalties: dict[str, Any] = field(default_factory=dict)
    restrictions: tuple[str, ...] = ()
    fitted: tuple[float, float] = (1.0, 1.0)
    temperature: float = 1.0
    corrected: bool = False
    pushes: str = ""


@dataclass(frozen=True)
class Finding:
    """cause: one of CAUSES. evidence: what was measured. remedy: what to try."""

    cause: str
    evidence: str
    remedy: str

    def __str__(self) -> str:
        return f"Likely cause: {self.cause}. Evidence: {self.evidence}. Try: {self.remedy}."


CAUSES = {
    "weights not pushed": "call trainer.mark_weights_changed() after changing weights by hand, and do not skip sync_weights",
    "tied head stale": "push through ColocatedEngine.sync_weights, which rebuilds the head's packed copy",
    "LoRA not applied": "let the adapter be merged or pushed (vllm_weight_sync='merged' or 'adapter'), and keep its lora_request",
    "engine dtype lower than the actor's": "leave vllm_dtype unset, or set it to the actor's",
    "temperature missing on one side": "set temperature alone, neither in generation_kwargs nor on the trainer",
    "truncated sampling": "set top_p=1.0, top_k=0 and min_p=None",
    "penalty or logit bias": "take penalties and logit_bias out of the sampling settings",
    "restricted sampling": "take the restriction out of the sampling settings, or mask such rollouts",
    "dropout active in the actor": "set disable_dropout=True, lora_dropout=0 in the adapter's config, and what its own layers hold to 0",
    "log-prob of a wrong token": "return the log-prob of each sampled token: logprobs=0 in the engine, in the order of the tokens",
    "unknown": "run `grpo-ext doctor` on the model and the recipe",
}


def finding(cause: str, evidence: str) -> Finding:
    """`cause` (one of CAUSES) with its remedy."""
    return Finding(cause, evidence, CAUSES[cause])


def diagnose(e: Evidence) -> list[Finding]:
    """The causes that what was measured speaks for, likeliest first; [] where engine and actor agree within rounding."""
    findings = [*_model_side(e), *_loss_side(e), *_sampling_side(e)]
    if not findings and e.actor > max(NOISE[e.engine_dtype], NOISE[e.actor_dtype]):
        findings.append(finding("unknown", f"mean |dlogp| {e.actor:.2e} nats, explained by nothing that was tried"))
    return findings


def _model_side(e: Evidence) -> list[Finding]:
    """Faults between weights and logits."""
    noise = NOISE[e.actor_dtype]
    if e.base is not None and _explains(e.hypotheses.get("adapter off"), e.actor, noise):
        return [finding("LoRA not applied", _matches("the actor without its adapter", e.hypotheses["adapter off"], e.actor))]
    if e.model is None or e.model <= noise:
        return []
    seen = f"scoring the same tokens the engine is {e.model:.2e} nats off the actor"
    if e.base is not None and _explains(e.base, e.model, noise):
        return [finding("LoRA not applied", f"{seen}, and {e.base:.2e} off the actor without its adapter")]
    if e.stale:
        names = ", ".join(e.stale[:3]) + (" ..." if len(e.stale) > 3 else "")
        evidence = f"{seen}; {len(e.stale)} of {e.compared} comparable parameters differ from the actor's ({names}){e.pushes}"
        return [finding("weights not pushed", evidence)]
    if e.head is not None and e.head > 10 * _epsilon(e):
        where = "the embedding it is tied to is up to date" if e.tied else "other parameters are up to date"
        cause = "tied head stale" if e.tied else "weights not pushed"
        return [finding(cause, f"{seen}; on equal hidden states its head gives logits {e.head:.1e} apart, while {where}")]
    if NOISE[e.engine_dtype] > noise and e.model <= NOISE[e.engine_dtype]:
        evidence = (
            f"{seen}, as rounding to {e.engine_dtype} explains (the actor computes in {e.actor_dtype}); bias {e.bias:+.1e}"
        )
        return [finding("engine dtype lower than the actor's", evidence)]
    return [finding("weights not pushed", f"{seen}, neither head, adapter nor dtype explains it{e.pushes}")]


def _epsilon(e: Evidence) -> float:
    return {"float32": 1e-6, "bfloat16": 8e-3, "float16": 1e-3}[e.engine_dtype]


def _loss_side(e: Evidence) -> list[Finding]:
    """Faults that only the loss's own forward has."""
    noise = NOISE[e.actor_dtype]
    if not e.dropout_modules or e.dropout <= noise:
        return []
    where = ", ".join(e.dropout_modules[:3]) + (" ..." if len(e.dropout_modules) > 3 else "")
    evidence = f"log-probs of the loss move by {e.dropout:.2e} nats when dropout is off ({where})"
    return [finding("dropout active in the actor", evidence)]


def _sampling_side(e: Evidence) -> list[Finding]:
    """Faults between logits and the log-probs that came back; judged against the hypothesis that nothing is wrong."""
    h, noise = e.hypotheses, max(NOISE[e.engine_dtype], NOISE[e.actor_dtype])
    plain, loss_temperature = h["plain"], e.fitted[1]
    if e.actor <= noise or (e.model is not None and e.model > noise):
        return []  # as it should be; or nothing that is made of the logits can be judged
    if plain <= noise:
        if e.actor > noise and abs(loss_temperature / e.temperature - 1) > 0.02:
            return [_temperatures(e, f"the loss's log-probs at {loss_temperature:.3g}")]
        return []
    if e.truncation and _explains(h.get("truncated"), plain, noise):
        settings = ", ".join(f"{name}={value:g}" for name, value in e.truncation.items())
        equal = "equal to" if abs(e.bias - e.log_kept_mass) <= 0.01 * abs(e.log_kept_mass) + noise else "against"
        evidence = f"bias {e.bias:+.3f} nats, {equal} the log of the kept mass {e.log_kept_mass:+.3f} ({settings})"
        both = [_penalised(e, e.penalties | e.truncation, h["truncated"])] if e.penalties else []
        return [finding("truncated sampling", evidence), *both]
    if e.penalties and _explains(h.get("penalised"), plain, noise):
        return [_penalised(e, e.penalties, h["penalised"])]
    restricted = finding(
        "restricted sampling", f"{', '.join(e.restrictions)} in the sampling settings, bias {e.bias:+.3f} nats"
    )
    if e.restrictions and _explains(h.get("penalised"), plain, noise, left=0.5):
        return [restricted]
    best = min((name for name in ("fitted", *_WRONG_TOKENS) if name in h), key=lambda name: h[name], default=None)
    if best is None or not _explains(h[best], plain, noise):
        return [restricted] if e.restrictions else []
    if best == "fitted":
        return [_temperatures(e, f"the engine's log-probs at {e.fitted[0]:.3g}")]
    return [finding("log-prob of a wrong token", _matches(_WRONG_TOKENS[best], h[best], plain))]


def _penalised(e: Evidence, in_force: dict[str, Any], residual: float) -> Finding:
    settings = ", ".join(f"{name}={value}" for name, value in in_force.items())
    return finding("penalty or logit bias", _matches(f"the actor's under {settings}", residual, e.hypotheses["plain"]))


_WRONG_TOKENS = {
    "likeliest": "those of the likeliest token instead of the sampled one",
    "next": "those of the token after the sampled one",
    "previous": "those of the token before the sampled one",
}


def _temperatures(e: Evidence, which: str) -> Finding:
    evidence = f"the actor's logits fit {which}, while temperature={e.temperature:.3g} (bias {e.bias:+.3f} nats)"
    return finding("temperature missing on one side", evidence)


def _explains(residual: float | None, unexplained: float, noise: float, left: float = _LEFT) -> bool:
    return residual is not None and unexplained > noise and residual <= max(noise, left * unexplained)


def _matches(what: str, residual: float, unexplained: float) -> str:
    return f"the engine's log-probs are {what}: {residual:.1e} nats off, against {unexplained:.1e} as it should be"
