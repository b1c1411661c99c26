"""What makes engine and actor disagree by configuration, said once: sampling that departs from what is scored, active dropout."""

from collections.abc import Mapping, Sequence
from typing import Any

from grpo_ext.consistency import keys
from grpo_ext.logprobs.dropout import Dropout, active_dropout, remedies
from grpo_ext.notices import Notices
from grpo_ext.rollout.sampling import SamplingSettings, effective_sampling, listed, neutral


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
        wanted = trainer.use_vllm and trainer._setting("sampling_mismatch") == "warn"
        self._warns = wanted and bool(SamplingSettings.of(effective_sampling(trainer.args)).departures)

    def train_begins(self) -> None:
        trainer = self._trainer
        if not (trainer.use_vllm and trainer.vllm_importance_sampling_correction):
            return
        if found := active_dropout(trainer.model):
            self._notices.once("dropout", dropout_message(found, trainer.model.config.to_dict()))

    def step_ended(self, metrics: dict[str, float] | None) -> None:
        """`metrics` of the step's rollouts, by the names of `consistency.keys`; None where none were compared."""
        if self._warns:
            self._warns = False
            self._notices.once("sampling", sampling_message(self._trainer.args, (metrics or {}).get(keys.BIAS)))


def sampling_message(args: Any, bias: float | None) -> str:
    """args: a `GRPOConfig`. bias: mean log pi_old - log mu of the first rollouts, in nats."""
    settings = SamplingSettings.of(effective_sampling(args))
    measured = "" if bias is None else f" On the first rollouts the log-ratio is off by {bias:+.3f} nats a token on average."
    correct = "sampling_mismatch='correct' to score the actor on the tokens that were sampled from, or "
    return (
        f"{listed(settings.departures)}: the engine samples from another distribution than the trainer scores, which biases every "
        f"importance ratio and the probability difference.{measured} Set {'' if settings.not_replayed else correct}"
        f"{listed(neutral(args))}."
    )


def dropout_message(found: Sequence[Dropout], config: Mapping[str, Any]) -> str:
    """config: the model's."""
    names = ", ".join(f"{each.where} ({each.p:g})" for each in found[:3])
    more = f" and {len(found) - 3} more" if len(found) > 3 else ""
    return (
        f"Dropout is active in {names}{more}: the actor then scores with noise that the engine does not have, and every importance "
        f"ratio carries it. Set {' and '.join(remedies(found, config))}."
    )
