"""Faults planted on purpose between a real engine and its actor: each is named, with its evidence, and nothing else is."""

import pytest
import torch
from peft import LoraConfig

from grpo_ext import _trl
from grpo_ext.consistency.probe import examine, gather_evidence
from grpo_ext.rollout import weights

pytestmark = pytest.mark.engine

LORA = dict(r=4, lora_alpha=16, target_modules="all-linear", init_lora_weights=False)


def causes(trainer):
    return [finding.cause for finding in examine(trainer)]


@pytest.mark.parametrize("peft_config", [None, LoraConfig(**LORA)], ids=["full", "lora"])
def test_nothing_is_wrong(train, peft_config):
    trainer = train(max_steps=2, peft_config=peft_config, temperature=0.7)
    evidence = gather_evidence(trainer)
    assert examine(trainer) == []
    assert evidence.tokens > 20
    assert max(evidence.actor, evidence.model) < 1e-5
    assert evidence.fitted == pytest.approx((0.7, 0.7), rel=1e-2)
    assert evidence.head < 1e-6


def test_weights_not_pushed(train):
    trainer = train(start=False, max_steps=2)
    trainer.vllm_generation.sync_weights = lambda: None
    trainer.train()
    (finding,) = examine(trainer)
    assert finding.cause == "weights not pushed"
    assert "comparable parameters differ" in finding.evidence
    assert "0 push(es) so far, optimizer step 2" in finding.evidence


def test_weights_changed_by_hand_and_not_pushed(train):
    trainer = train(max_steps=1)
    trainer._last_loaded_step = trainer.state.global_step
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    assert causes(trainer) == ["weights not pushed"]


def test_tied_head_stale(train, monkeypatch):
    monkeypatch.setattr(_trl, "rebuild_packed_copies", lambda llm: None)
    (finding,) = examine(train(max_steps=2))
    assert finding.cause == "tied head stale"
    assert "the embedding it is tied to is up to date" in finding.evidence


def test_engine_dtype(train):
    (finding,) = examine(train(max_steps=2, vllm_dtype="bfloat16"))
    assert finding.cause == "engine dtype lower than the actor's"
    assert "bfloat16" in finding.evidence


@pytest.mark.parametrize(("configured", "sampled"), [(0.6, 1.0), (1.0, 0.6)], ids=["engine", "actor"])
def test_temperature_missing_on_one_side(train, configured, sampled):
    trainer = train(start=False, max_steps=1, temperature=configured)
    trainer.vllm_generation.temperature = sampled
    trainer.train()
    (finding,) = examine(trainer)
    assert finding.cause == "temperature missing on one side"
    assert f"the loss's log-probs at {configured:g}, while temperature={sampled:g}" in finding.evidence


def test_temperature_missing_in_the_returned_log_probs(train):
    trainer = train(start=False, max_steps=1, temperature=0.6)
    sampler = _trl.model_runner(trainer.vllm_generation.llm).sampler
    sampler.logprobs_mode = sampler.topk_topp_sampler.logprobs_mode = "raw_logprobs"
    trainer.train()
    (finding,) = examine(trainer)
    assert finding.cause == "temperature missing on one side"
    assert "the engine's log-probs at 1, while temperature=0.6" in finding.evidence


@pytest.mark.parametrize(
    "config",
    [
        {"top_k": 5},
        {"top_p": 0.8},
        {"min_p": 0.2},
        {"generation_kwargs": {"top_p": 0.7}},
        {"top_k": 10, "top_p": 0.9, "temperature": 0.8},
    ],
    ids=str,
)
def test_truncated_sampling(train, config):
    trainer = train(max_steps=1, **config)
    evidence = gather_evidence(trainer)
    (finding,) = examine(trainer)
    assert finding.cause == "truncated sampling"
    assert "equal to the log of the kept mass" in finding.evidence
    assert evidence.bias == pytest.approx(evidence.log_kept_mass, rel=1e-3)
    assert evidence.bias < -0.05
    assert evidence.hypotheses["truncated"] < 1e-4


@pytest.mark.parametrize(
    "config",
    [
        {"repetition_penalty": 1.5},
        {"generation_kwargs": {"logit_bias": {"20": 2.0, "21": -3.0}}},
        {"generation_kwargs": {"frequency_penalty": 0.7, "presence_penalty": 0.5}},
    ],
    ids=str,
)
def test_penalty_or_bias(train, config):
    trainer = train(max_steps=1, **config)
    assert causes(trainer) == ["penalty or logit bias"]
    assert gather_evidence(trainer).hypotheses["penalised"] < 1e-4


def test_restricted_sampling(train):
    trainer = train(max_steps=1, generation_kwargs={"allowed_token_ids": list(range(10, 40))})
    assert causes(trainer) == ["restricted sampling"]


@pytest.mark.parametrize("where", ["model", "adapter"])
def test_dropout(train, where):
    if where == "model":
        trainer = train(max_steps=1, model_config={"attention_dropout": 0.3})
    else:
        trainer = train(max_steps=1, peft_config=LoraConfig(**LORA, lora_dropout=0.5))
    (finding,) = examine(trainer)
    assert finding.cause == "dropout active in the actor"
    assert ("self_attn" if where == "model" else "lora_dropout") in finding.evidence


def test_log_probs_of_the_next_token(train):
    trainer = train(max_steps=1)
    generate = trainer.vllm_generation.generate

    def shifted(*args):
        prompts, ids, logprobs, tokens = generate(*args)
        return prompts, ids, [row[1:] + row[:1] for row in logprobs], tokens

    trainer.vllm_generation.generate = shifted
    (finding,) = examine(trainer)
    assert (finding.cause, "the token after" in finding.evidence) == ("log-prob of a wrong token", True)


def test_log_probs_of_the_likeliest_token(train):
    trainer = train(start=False, max_steps=1)
    trainer.vllm_generation.logprobs = 3  # the first of a sorted list is the likeliest token's
    trainer.train()
    (finding,) = examine(trainer)
    assert (finding.cause, "the likeliest" in finding.evidence) == ("log-prob of a wrong token", True)


@pytest.mark.parametrize("sync", ["merged", "adapter"])
def test_lora_not_applied(train, monkeypatch, sync):
    if sync == "merged":
        monkeypatch.setattr(weights, "_read_merged", lambda base, layers, names: [getattr(base, n).data.clone() for n in names])
    else:
        monkeypatch.setattr("grpo_ext.rollout.engine._lora_request", lambda: None)
    trainer = train(max_steps=1, peft_config=LoraConfig(**LORA), vllm_weight_sync=sync)
    (finding,) = examine(trainer)
    assert (finding.cause, "without its adapter" in finding.evidence) == ("LoRA not applied", True)


def test_probing_leaves_the_run_as_it_was(train):
    """Weights, global generator, mode and lengths are as before; the log shows what it cost."""
    trainer = train(max_steps=1)
    state, before = torch.get_rng_state(), [p.detach().clone() for p in trainer.model.parameters()]
    examine(trainer)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.model.parameters(), strict=True))
    assert trainer.model.training
    assert trainer.vllm_generation.max_completion_length == trainer.max_completion_length
    assert trainer.phase_times.drain()["diagnosis"] > 0
