"""The rules of the diagnosis on made-up evidence: what tips the scales between causes that look alike."""

from dataclasses import replace

import torch

from grpo_ext.consistency.diagnosis import CAUSES, Evidence, diagnose
from grpo_ext.consistency.hypotheses import fitted_temperature, hypotheses, residual
from grpo_ext.rollout.sampling import SamplingSettings

HEALTHY = Evidence(
    tokens=300,
    engine_dtype="float32",
    actor_dtype="float32",
    actor=1e-7,
    bias=0.0,
    hypotheses={"plain": 1e-7, "likeliest": 1.5, "next": 2.0, "previous": 2.0, "fitted": 1e-7},
    model=1e-7,
    head=1e-8,
    compared=7,
    tied=True,
)
OFF = {name: 0.3 for name in HEALTHY.hypotheses}


def causes(**changes):
    return [finding.cause for finding in diagnose(replace(HEALTHY, **changes))]


def test_health_has_no_cause():
    assert causes() == []
    assert (
        causes(
            actor_dtype="bfloat16",
            engine_dtype="bfloat16",
            actor=5e-3,
            model=5e-3,
            hypotheses=HEALTHY.hypotheses | {"plain": 5e-3},
        )
        == []
    )


def test_stale_parameters_outrank_the_head_and_the_dtype():
    sick = dict(actor=0.3, model=0.3, hypotheses=OFF, head=0.1, engine_dtype="bfloat16")
    assert causes(**sick, stale=("model.norm.weight",)) == ["weights not pushed"]
    assert causes(**sick) == ["tied head stale"]
    assert causes(**sick, tied=False) == ["weights not pushed"]


def test_a_lower_dtype_explains_rounding_only():
    assert causes(actor=8e-3, model=8e-3, engine_dtype="bfloat16", hypotheses=HEALTHY.hypotheses | {"plain": 8e-3}) == [
        "engine dtype lower than the actor's"
    ]
    assert causes(actor=0.5, model=0.5, engine_dtype="bfloat16", hypotheses=OFF) == ["weights not pushed"]


def test_a_setting_is_not_blamed_for_what_it_does_not_explain():
    """top_k is set, but the log-probs are the likeliest token's."""
    given = dict(actor=0.3, hypotheses=OFF | {"truncated": 0.3, "likeliest": 1e-7}, truncation={"top_k": 5})
    assert causes(**given) == ["log-prob of a wrong token"]


def test_two_faults_are_both_named():
    found = causes(
        actor=0.4, dropout=0.2, dropout_modules=("layers.0",), hypotheses=OFF | {"truncated": 1e-7}, truncation={"top_k": 5}
    )
    assert found == ["dropout active in the actor", "truncated sampling"]


def test_a_penalty_beside_a_truncation_is_named_and_the_bias_is_not_said_to_be_the_kept_mass():
    found = diagnose(
        replace(
            HEALTHY, actor=1.7, bias=-1.662, log_kept_mass=-1.594, hypotheses=OFF | {"plain": 1.7, "truncated": 1e-7},
            truncation={"top_k": 4}, penalties={"repetition_penalty": 1.3},
        )
    )  # fmt: skip
    assert [each.cause for each in found] == ["truncated sampling", "penalty or logit bias"]
    assert "bias -1.662 nats, against the log of the kept mass -1.594" in found[0].evidence
    assert "under repetition_penalty=1.3, top_k=4: 1.0e-07 nats off, against 1.7e+00" in found[1].evidence


def test_what_nothing_explains_is_unknown():
    assert causes(actor=0.3, hypotheses=OFF) == ["unknown"]


def test_every_cause_has_a_remedy_and_a_sentence():
    assert all(CAUSES.values())
    (finding,) = diagnose(replace(HEALTHY, actor=0.3, hypotheses=OFF))
    assert str(finding).startswith("Likely cause: unknown. Evidence: ")


def test_hypotheses_of_a_completion():
    torch.manual_seed(0)
    logits, ids = torch.randn(6, 9), torch.tensor([1, 5, 2, 2, 8, 0])
    settings = SamplingSettings(temperature=0.7, top_k=3, logit_bias={2: 1.0})
    found = hypotheses(logits, ids, [4], settings)
    plain = (logits / 0.7).log_softmax(-1)
    assert torch.equal(found["plain"], plain[range(6), ids])
    assert torch.equal(found["likeliest"], plain.max(-1).values)
    assert torch.equal(found["next"][:-1], found["plain"][1:])
    assert torch.equal(found["previous"][1:], found["plain"][:-1])
    biased = logits.clone()
    biased[:, 2] += 1.0
    torch.testing.assert_close(found["penalised"], (biased / 0.7).log_softmax(-1)[range(6), ids])


def test_fitted_temperature():
    torch.manual_seed(0)
    logits, ids = 2 * torch.randn(200, 11), torch.randint(0, 11, (200,))
    for temperature in (0.3, 0.7, 1.0, 1.6):
        logps = (logits / temperature).log_softmax(-1)[range(200), ids]
        logps[3] = torch.nan
        assert abs(fitted_temperature(logits, ids, logps) / temperature - 1) < 2e-3


def test_residual_is_over_finite_tokens():
    assert residual(torch.tensor([1.0, torch.nan, -torch.inf]), torch.tensor([0.5, 1.0, 1.0])) == 0.5
    assert residual(torch.tensor([torch.nan]), torch.tensor([0.0])) == 0.0
