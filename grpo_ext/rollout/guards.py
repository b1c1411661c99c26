"""What makes engine and actor disagree by configuration, said once: sampling that departs from what is scored, active dropout."""

from typing import Any

from grpo_ext.consistency import keys
from grpo_ext.logprobs.dropout import active_dropout
from grpo_ext.notices import Notices
from grpo_ext.rollout.sampling import SamplingSettings, effective_sampling, neutral


def corrected_sampling(trainer: Any) -> SamplingSettings | None:
    """The settings under which the actor's log-probs are taken; None where they are taken over the whole vocabulary."""
    if not trainer.use_vllm or trainer._setting("sampling_mismatch") != "correct":
        return None
    settings = SamplingSettings.of(effective_sampling(trainer.args))
    return settings if settings.departures else None


class Guards:
    """One per trainer; speaks on the main process."""

    def __init__(self, trainer: Any):
        self._trainer, self._notices = trainer, Notices()
        self._settings = SamplingSettings.of(effective_sampling(trainer.args))

    def train_begins(self) -> None:
        trainer = self._trainer
        if not (trainer.use_vllm and trainer.vllm_importance_sampling_correction):
            return
        if found := active_dropout(trainer.model):
            self._notices.once("dropout", dropout_message(found))

    def step_ended(self, metrics: dict[str, float] | None) -> None:
        """`metrics` of the step's rollouts, by the names of `consistency.keys`; None where none were compared."""
        trainer = self._trainer
        if not trainer.use_vllm or not self._settings.departures or trainer._setting("sampling_mismatch") != "warn":
            return
        self._notices.once("sampling", sampling_message(self._settings, (metrics or {}).get(keys.BIAS)))


def sampling_message(settings: SamplingSettings, bias: float | None) -> str:
    """bias: mean log pi_old - log mu of the first rollouts, in nats."""
    named = ", ".join(f"{name}={value}" for name, value in settings.departures.items())
    measured = "" if bias is None else f" On the first rollouts the log-ratio is off by {bias:+.3f} nats a token on average."
    cure = ", ".join(f"{name}={value}" for name, value in neutral(settings).items()) or "generation_kwargs without it"
    return (
        f"{named}: the engine samples from another distribution than the trainer scores, which biases every importance ratio and the "
        f"probability difference.{measured} Set sampling_mismatch='correct' to score the actor on the tokens that were sampled "
        f"from, or {cure}."
    )


def dropout_message(found: dict[str, float]) -> str:
    """found: {module name: probability}."""
    names = ", ".join(f"{name} ({p:g})" for name, p in list(found.items())[:3]) + (
        f" and {len(found) - 3} more" * (len(found) > 3)
    )
    cures = [
        ("lora_dropout=0 in the adapter's config", any("lora_dropout" in name for name in found)),
        ("model_init_kwargs={'attention_dropout': 0.0}", any("attn" in name or "attention" in name for name in found)),
        ("disable_dropout=True", any("lora_dropout" not in name and "attn" not in name for name in found)),
    ]
    return (
        f"Dropout is active in {names}: the actor then scores with noise that the engine does not have, and every importance ratio "
        f"carries it. Set {' and '.join(cure for cure, applies in cures if applies)}."
    )
