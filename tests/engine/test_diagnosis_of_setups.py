"""Faults that come with how a run was set up, each with an engine of its own: named, with evidence. See `test_diagnosis`."""

import logging

import pytest
from peft import LoraConfig

from grpo_ext import _trl
from grpo_ext.consistency.probe import examine
from grpo_ext.rollout import weights

pytestmark = pytest.mark.engine

LORA = dict(r=4, lora_alpha=16, target_modules="all-linear", init_lora_weights=False)
PROMPTS = [[20, 14, 21, 32], [21, 21, 14, 25, 32], [25, 14, 20, 32]]


def the_finding(trainer):
    (finding,) = examine(trainer, PROMPTS)
    return finding


def test_temperature_missing_in_the_engine(train, monkeypatch):
    """It samples at another one; or samples as it should, and returns log-probs without the temperature."""
    trainer = train(start=False, temperature=0.6)
    assert examine(trainer, PROMPTS) == []
    with monkeypatch.context() as planted:
        planted.setattr(trainer.vllm_generation, "temperature", 1.0)
        finding = the_finding(trainer)
        assert finding.cause == "temperature missing on one side"
        assert "the loss's log-probs at 0.6, while temperature=1" in finding.evidence
    sampler = _trl.model_runner(trainer.vllm_generation.llm).sampler
    sampler.logprobs_mode = sampler.topk_topp_sampler.logprobs_mode = "raw_logprobs"
    finding = the_finding(trainer)
    assert finding.cause == "temperature missing on one side"
    assert "the engine's log-probs at 1, while temperature=0.6" in finding.evidence


def test_engine_dtype(train):
    finding = the_finding(train(max_steps=2, vllm_dtype="bfloat16"))
    assert finding.cause == "engine dtype lower than the actor's"
    assert "bfloat16" in finding.evidence


@pytest.mark.parametrize("where", ["model", "adapter"])
def test_dropout(train, where):
    if where == "model":
        trainer = train(start=False, model_config={"attention_dropout": 0.3})
    else:
        trainer = train(start=False, peft_config=LoraConfig(**LORA, lora_dropout=0.5))
    finding = the_finding(trainer)
    assert finding.cause == "dropout active in the actor"
    assert ("self_attn" if where == "model" else "lora_dropout") in finding.evidence


@pytest.mark.parametrize("sync", ["merged", "adapter"])
def test_lora_not_applied(train, monkeypatch, sync):
    trainer = train(max_steps=1, peft_config=LoraConfig(**LORA), vllm_weight_sync=sync)
    assert examine(trainer) == []
    trainer.mark_weights_changed()
    if sync == "merged":
        monkeypatch.setattr(weights, "_read_merged", lambda base, layers, names: [getattr(base, n).data.clone() for n in names])
    else:
        monkeypatch.setattr("grpo_ext.rollout.engine._lora_request", lambda: None)
    (finding,) = examine(trainer)
    assert (finding.cause, "without its adapter" in finding.evidence) == ("LoRA not applied", True)


def test_where_fresh_rollouts_agree_the_warning_says_so(train, caplog):
    with caplog.at_level(logging.WARNING):
        train(max_steps=1, prob_diff_warn=0.0)
    assert "above prob_diff_warn=0 " in caplog.text
    assert "A few fresh rollouts agree with the actor within rounding, so no cause is named. Try: " in caplog.text
