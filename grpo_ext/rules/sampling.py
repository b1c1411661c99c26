"""How tokens are drawn: what vLLM takes, and what the trainer can score."""

from collections.abc import Iterator
from typing import Any

from grpo_ext.rollout.sampling import OFF, SamplingSettings, effective_sampling, listed, neutral
from grpo_ext.rollout.sampling_values import (
    TEMPERATURES,
    generation_kwargs,
    is_number,
    mended,
    mended_kwargs,
    refused_fields,
    refused_kwargs,
)
from grpo_ext.rules.problem import Problem, Rule

SAMPLING_MISMATCHES = ("warn", "error", "correct")


def generation_kwargs_as_mapping(s: Any, processes: int) -> Iterator[Problem]:
    if generation_kwargs(s) is None:
        yield Problem(
            f"generation_kwargs={s.generation_kwargs!r} is no mapping. Give a dict, or a JSON object such as "
            "'{\"min_p\": 0.1}' on the command line.",
            {"generation_kwargs": None},
        )


def sampled_temperature(s: Any, processes: int) -> Iterator[Problem]:
    kwargs, (lowest, highest) = generation_kwargs(s) or {}, TEMPERATURES
    temperatures, fix = {"temperature": s.temperature}, {}
    if "temperature" in kwargs:
        temperatures["generation_kwargs['temperature']"] = kwargs["temperature"]
        fix = {"generation_kwargs": mended_kwargs(s)}
    found = []
    for name, value in temperatures.items():
        fixes = {"temperature": 1.0, **fix} if name == "temperature" else fix
        if not is_number(value) or value <= 0:
            text = (
                f"{name}={value}: log-probs are those of the distribution that was sampled, logits / temperature, which "
                "exists for a finite number above 0 only (greedy decoding also makes all completions of a group equal). Set "
                "temperature=1.0."
            )
            found.append(Problem(text, fixes))
        elif s.use_vllm and not lowest <= value <= highest:
            text = (
                f"{name}={value}: vLLM samples at temperatures from {lowest} to {highest}. A lower one it takes for {lowest}, while "
                "the trainer scores at what is given. Set temperature=1.0, or any value between the two."
            )
            found.append(Problem(text, fixes))
    yield from found
    if not found and len(set(temperatures.values())) > 1:
        yield Problem(
            f"generation_kwargs['temperature']={kwargs['temperature']} while temperature={s.temperature}: the engine "
            "would sample at one and the trainer score at the other. Set temperature alone.",
            fix,
        )


def seed_of_rollouts(s: Any, processes: int) -> Iterator[Problem]:
    if s.rollout_seed is not None and (not isinstance(s.rollout_seed, int) or isinstance(s.rollout_seed, bool)):
        yield Problem(
            f"rollout_seed={s.rollout_seed!r} is no whole number, which the seed of every request is made of. Set rollout_seed=0, or "
            "leave it unset.",
            {"rollout_seed": None},
        )


def sampling_that_vllm_takes(s: Any, processes: int) -> Iterator[Problem]:
    if not s.use_vllm:
        return
    for name, wanted in refused_fields(s).items():
        yield Problem(
            f"{name}={getattr(s, name)!r}: {wanted} is needed. Set {name}={OFF[name]}, which is off.", {name: OFF[name]}
        )
    for name, wanted in refused_kwargs(s).items():
        value = (generation_kwargs(s) or {})[name]
        yield Problem(
            f"generation_kwargs[{name!r}]={value!r}: {wanted} is needed. Take it out of generation_kwargs.",
            {"generation_kwargs": mended_kwargs(s)},
        )


def sampled_as_scored(s: Any, processes: int) -> Iterator[Problem]:
    if s.sampling_mismatch not in SAMPLING_MISMATCHES:
        yield Problem(
            f"sampling_mismatch={s.sampling_mismatch!r} is none of {', '.join(SAMPLING_MISMATCHES)}. Set 'warn', the default.",
            {"sampling_mismatch": "warn"},
        )
        return
    if not s.use_vllm or s.sampling_mismatch == "warn":
        return
    asked = mended(s)
    settings = SamplingSettings.of(effective_sampling(asked))
    fix = {"sampling_mismatch": "warn" if settings.not_replayed else "correct"}
    if settings.departures and s.sampling_mismatch == "error":
        yield Problem(
            f"sampling_mismatch='error' and {listed(settings.departures)}: the engine samples from another distribution than the "
            f"trainer scores, so that every importance ratio is biased. Set {listed(neutral(asked))}, or {listed(fix)}.",
            fix,
        )
    elif settings.not_replayed and s.sampling_mismatch == "correct":
        yield Problem(
            f"sampling_mismatch='correct' cannot replay {', '.join(settings.not_replayed)}: which tokens it forbids depends on the "
            f"text so far. Set {listed(neutral(asked))}, or {listed(fix)}.",
            fix,
        )


RULES: tuple[Rule, ...] = (
    generation_kwargs_as_mapping,
    sampled_temperature,
    seed_of_rollouts,
    sampling_that_vllm_takes,
    sampled_as_scored,
)
