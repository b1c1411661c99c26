"""Sampling that departs from what is scored: named with its measured size, refused, or corrected, with the real engine."""

import logging

import pytest

from grpo_ext.consistency import keys
from grpo_ext.consistency.probe import examine

pytestmark = pytest.mark.engine

DEPARTURES = [
    {"top_k": 4},
    {"top_p": 0.8, "temperature": 0.8},
    {"min_p": 0.2},
    {"generation_kwargs": {"top_p": 0.7, "logit_bias": {"20": 2.0}}},
    {"repetition_penalty": 1.4, "generation_kwargs": {"presence_penalty": 0.4}},
    {"generation_kwargs": {"allowed_token_ids": list(range(10, 40))}},
]


def logged(trainer, name):
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def test_warns_once_with_the_bias_measured(train, caplog):
    with caplog.at_level(logging.WARNING):
        trainer = train(max_steps=2, top_k=4, prob_diff_warn=None)
    said = [r.getMessage() for r in caplog.records if "another distribution" in r.getMessage()]
    assert len(said) == 1
    bias = logged(trainer, keys.BIAS)[0]
    assert bias < -0.1
    assert "top_k=4: " in said[0]
    assert f"off by {bias:+.3f} nats" in said[0]


def test_a_regex_is_named_with_the_bias_it_makes(train, caplog):
    """It has a field of its own, beside generation_kwargs: only digits are sampled, the actor scores all characters."""
    with caplog.at_level(logging.WARNING):
        trainer = train(max_steps=1, vllm_structured_outputs_regex="[0-9]{12}", prob_diff_warn=None)
    (said,) = [r.getMessage() for r in caplog.records if "another distribution" in r.getMessage()]
    bias = logged(trainer, keys.BIAS)[0]
    assert bias < -1 and "structured_outputs=True: the engine" in said and f"{bias:+.3f}" in said
    assert said.endswith("Set vllm_structured_outputs_regex=None.")


@pytest.mark.parametrize(
    "departure",
    [pytest.param(each, id=str(each), marks=[pytest.mark.slow] * (i in (0, 2, 5))) for i, each in enumerate(DEPARTURES)],
)
def test_corrected_both_sides_agree(train, departure):
    """Ratio and probability difference are unbiased: at the floor, though the engine truncates or penalises."""
    trainer = train(
        max_steps=3, sampling_mismatch="correct", gradient_accumulation_steps=2, steps_per_generation=4, learning_rate=1e-3,
        per_device_train_batch_size=4, **departure,
    )  # fmt: skip
    assert max(logged(trainer, keys.MEAN)) <= 1e-6
    assert max(logged(trainer, keys.LOGP_MAX)) <= 1e-4
    assert sum(logged(trainer, "old_logps/rows_recomputed")) > 0  # by the due pass as well
    assert all(value > 0 for value in logged(trainer, "grad_norm"))


def test_uncorrected_they_do_not(train):
    trainer = train(max_steps=1, top_k=4, prob_diff_warn=None)
    assert logged(trainer, keys.MEAN)[0] > 1e-2


def test_the_diagnosis_has_nothing_to_say_once_corrected(train):
    assert [finding.cause for finding in examine(train(max_steps=1, top_k=4, sampling_mismatch="correct"))] == []


def test_error_refuses_before_anything_starts(train):
    with pytest.raises(ValueError, match=r"sampling_mismatch='error' and top_k=4.*Set top_k=0"):
        train(start=False, top_k=4, sampling_mismatch="error")


def test_what_cannot_be_replayed_is_not_corrected(train):
    with pytest.raises(ValueError, match="cannot replay min_tokens"):
        train(start=False, generation_kwargs={"min_tokens": 3}, sampling_mismatch="correct")


def test_active_dropout_is_named(train, caplog):
    with caplog.at_level(logging.WARNING):
        train(max_steps=1, model_config={"attention_dropout": 0.25}, prob_diff_warn=None)
    (said,) = [r.getMessage() for r in caplog.records if "Dropout is active" in r.getMessage()]
    assert "model.layers.0.self_attn.attention_dropout (0.25)" in said
    assert said.endswith("Set model_init_kwargs={'attention_dropout': 0.0}.")
