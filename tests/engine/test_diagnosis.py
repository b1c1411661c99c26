"""Faults planted on purpose between a real engine and its actor: each is named, with its evidence, and nothing else is."""

import pytest
import torch

from grpo_ext import _trl
from grpo_ext.consistency.probe import examine, gather_evidence

pytestmark = pytest.mark.engine

PROMPTS = [[20, 14, 21, 32], [21, 21, 14, 25, 32], [25, 14, 20, 32]]


@pytest.fixture
def trainer(standing):
    """The standing trainer in health: weights moved a little, as an optimizer step would, and not pushed yet."""
    disturb(standing)
    standing.mark_weights_changed()
    yield standing
    standing.mark_weights_changed()
    assert examine(standing, PROMPTS) == []  # the fault is out again


def disturb(trainer):
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.add_(0.05 * parameter.std() * torch.randn_like(parameter))


def the_finding(trainer):
    (finding,) = examine(trainer, PROMPTS)
    return finding


def test_nothing_is_wrong(trainer):
    evidence = gather_evidence(trainer, PROMPTS)
    assert evidence.tokens > 60
    assert max(evidence.actor, evidence.model, evidence.padding) < 1e-5
    assert evidence.fitted == pytest.approx((1.0, 1.0), rel=1e-2)
    assert evidence.head < 1e-6
    assert (evidence.stale, evidence.compared > 3) == ((), True)


def test_weights_not_pushed(trainer, monkeypatch):
    monkeypatch.setattr(trainer.vllm_generation, "sync_weights", lambda: None)
    finding = the_finding(trainer)
    assert finding.cause == "weights not pushed"
    assert "comparable parameters differ" in finding.evidence
    assert "push(es) so far, optimizer step 0" in finding.evidence


def test_weights_changed_by_hand_and_not_marked(trainer):
    examine(trainer, PROMPTS)
    disturb(trainer)
    assert the_finding(trainer).cause == "weights not pushed"


def test_tied_head_stale(trainer, monkeypatch):
    monkeypatch.setattr(_trl, "rebuild_packed_copies", lambda llm: None)
    finding = the_finding(trainer)
    assert finding.cause == "tied head stale"
    assert "the embedding it is tied to is up to date" in finding.evidence


def test_temperature_missing_in_the_actor(trainer, monkeypatch):
    monkeypatch.setattr(trainer.vllm_generation, "temperature", 0.6)
    finding = the_finding(trainer)
    assert finding.cause == "temperature missing on one side"
    assert "the loss's log-probs at 1, while temperature=0.6" in finding.evidence


@pytest.mark.parametrize(
    "settings",
    [
        {"top_k": 5},
        {"top_p": 0.8},
        {"min_p": 0.2},
        {"generation_kwargs": {"top_p": 0.7}},
        {"top_k": 10, "top_p": 0.9},
    ],
    ids=str,
)
def test_truncated_sampling(trainer, monkeypatch, settings):
    for name, value in settings.items():
        monkeypatch.setattr(trainer.vllm_generation, name, value)
    evidence = gather_evidence(trainer, PROMPTS)
    finding = the_finding(trainer)
    assert finding.cause == "truncated sampling"
    assert "equal to the log of the kept mass" in finding.evidence
    assert evidence.bias == pytest.approx(evidence.log_kept_mass, rel=1e-3)
    assert evidence.bias < -0.05
    assert evidence.hypotheses["truncated"] < 1e-4


@pytest.mark.parametrize(
    "settings",
    [
        {"repetition_penalty": 1.5},
        {"generation_kwargs": {"logit_bias": {20: 2.0, 21: -3.0}}},
        {"generation_kwargs": {"frequency_penalty": 0.7, "presence_penalty": 0.5}},
    ],
    ids=str,
)
def test_penalty_or_bias(trainer, monkeypatch, settings):
    for name, value in settings.items():
        monkeypatch.setattr(trainer.vllm_generation, name, value)
    assert the_finding(trainer).cause == "penalty or logit bias"
    assert gather_evidence(trainer, PROMPTS).hypotheses["penalised"] < 1e-4


def test_restricted_sampling(trainer, monkeypatch):
    monkeypatch.setattr(trainer.vllm_generation, "generation_kwargs", {"allowed_token_ids": list(range(10, 40))})
    assert the_finding(trainer).cause == "restricted sampling"


def test_log_probs_of_the_next_token(trainer, monkeypatch):
    generate = trainer.vllm_generation.generate

    def shifted(*args):
        prompts, ids, logprobs, tokens = generate(*args)
        return prompts, ids, [row[1:] + row[:1] for row in logprobs], tokens

    monkeypatch.setattr(trainer.vllm_generation, "generate", shifted)
    finding = the_finding(trainer)
    assert (finding.cause, "the token after" in finding.evidence) == ("log-prob of a wrong token", True)


def test_log_probs_of_the_likeliest_token(trainer, monkeypatch):
    monkeypatch.setattr(trainer.vllm_generation, "logprobs", 3)  # the first of a sorted list is the likeliest token's
    finding = the_finding(trainer)
    assert (finding.cause, "the likeliest" in finding.evidence) == ("log-prob of a wrong token", True)


def test_probing_leaves_the_run_as_it_was(trainer):
    """Weights, global generator, mode and lengths are as before; the log shows what it cost."""
    state, before = torch.get_rng_state(), [p.detach().clone() for p in trainer.model.parameters()]
    training, limit = trainer.model.training, trainer.vllm_generation.max_completion_length
    examine(trainer, PROMPTS)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.model.parameters(), strict=True))
    assert (trainer.model.training, trainer.vllm_generation.max_completion_length) == (training, limit)
    assert trainer.phase_times.drain()["diagnosis"] > 0
