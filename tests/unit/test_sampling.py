"""What the engine does to logits, on literal values: logits [2, 1, 0, -1, -2], whose probabilities are e^l / 11.61."""

import math
from types import SimpleNamespace

import pytest
import torch

from grpo_ext.logprobs.support import log_kept_mass, processed, scored_on_support, truncated
from grpo_ext.rollout.guards import sampling_message
from grpo_ext.rollout.sampling import SamplingSettings, effective_sampling, neutral

LOGITS = torch.tensor([[2.0, 1.0, 0.0, -1.0, -2.0]])


def probabilities(**settings):
    return processed(LOGITS, SamplingSettings(**settings)).softmax(dim=-1)[0]


def test_top_k():
    assert probabilities(top_k=2).tolist() == pytest.approx([0.73106, 0.26894, 0, 0, 0], abs=1e-5)
    assert float(log_kept_mass(LOGITS, SamplingSettings(top_k=2))) == pytest.approx(-0.13865, abs=1e-5)


def test_case_5_temperature():
    assert float(probabilities(temperature=0.5)[0]) == pytest.approx(0.86470, abs=1e-5)
    assert float(probabilities()[0]) == pytest.approx(0.63641, abs=1e-5)


def test_top_p_keeps_the_token_that_crosses():
    # .636, .234, .086, ...: .7 is reached by the second
    assert (probabilities(top_p=0.7) > 0).tolist() == [True, True, False, False, False]
    assert (probabilities(top_p=0.6) > 0).tolist() == [True, False, False, False, False]
    assert (probabilities(top_p=1e-9) > 0).tolist() == [True, False, False, False, False]


def test_min_p_is_a_share_of_the_likeliest():
    # shares of the first: 1, .368, .135, .050, .018
    assert (probabilities(min_p=0.1) > 0).tolist() == [True, True, True, False, False]


def test_temperature_comes_before_truncation():
    assert (probabilities(temperature=0.5, min_p=0.1) > 0).tolist() == [True, True, False, False, False]


def test_ties_at_the_kth_place_stay():
    logits = torch.tensor([[1.0, 0.0, 0.0, -1.0]])
    assert torch.isfinite(truncated(logits, SamplingSettings(top_k=2))).tolist() == [[True, True, True, False]]


def test_penalties_look_at_what_stands_before():
    settings = SamplingSettings(frequency_penalty=0.5, presence_penalty=0.25)
    logits = processed(torch.zeros(3, 4), settings, prompt=[3], output=[1, 1, 2])
    assert logits.tolist() == [[0, 0, 0, 0], [0, -0.75, 0, 0], [0, -1.25, 0, 0]]


def test_repetition_penalty_counts_the_prompt_and_moves_both_signs_down():
    logits = processed(torch.tensor([[2.0, -2.0, 2.0]]), SamplingSettings(repetition_penalty=2.0), prompt=[0, 1])
    assert logits.tolist() == [[1.0, -4.0, 2.0]]


def test_logit_bias_and_allowed_tokens():
    assert processed(LOGITS, SamplingSettings(logit_bias={4: 3.0}))[0, 4] == 1.0
    kept = processed(LOGITS, SamplingSettings(allowed_token_ids=(1, 3)))
    assert torch.isfinite(kept).tolist() == [[False, True, False, True, False]]


def test_settings_of_a_mapping_and_of_an_object():
    given = {"top_p": 0.9, "top_k": -1, "min_p": None, "logit_bias": {"7": 1}, "structured_outputs": object(), "min_tokens": 2}
    for source in (given, SimpleNamespace(**given)):
        settings = SamplingSettings.of(source)
        assert settings.truncation == {"top_p": 0.9}
        assert settings.penalties == {"logit_bias": {7: 1.0}}
        assert settings.restrictions == ("min_tokens", "structured_outputs")
    assert set(settings.departures) == {"top_p", "logit_bias", "min_tokens", "structured_outputs"}


def test_defaults_depart_from_nothing():
    assert SamplingSettings().departures == {}
    assert torch.equal(processed(LOGITS, SamplingSettings()), LOGITS)


def test_scores_are_those_of_the_engine_on_its_support():
    """top_k=2 on both sides: .73106, and the log of the kept mass is what scoring the whole vocabulary would be off by."""
    settings = SamplingSettings(top_k=2)
    logps, entropy = scored_on_support(LOGITS[None], torch.tensor([[0]]), [[]], settings)
    assert float(logps.exp()) == pytest.approx(0.73106, abs=1e-5)
    whole = LOGITS.log_softmax(-1)[0, 0]
    assert float(whole - logps) == pytest.approx(-0.13865, abs=1e-5)
    assert float(entropy) == pytest.approx(-(0.73106 * math.log(0.73106) + 0.26894 * math.log(0.26894)), abs=1e-5)


def test_a_token_that_has_left_the_support_keeps_a_probability_and_a_gradient():
    logits = LOGITS[None].clone().requires_grad_()
    logps, entropy = scored_on_support(logits, torch.tensor([[4]]), [[]], SamplingSettings(top_k=1))
    assert float(logps.detach().exp()) == pytest.approx(
        math.exp(-4) / (1 + math.exp(-4)), abs=1e-6
    )  # against the likeliest alone
    (logps + entropy).sum().backward()
    assert torch.isfinite(logits.grad).all()
    assert logits.grad[0, 0, 1] == 0.0


def test_neutral_settings_score_the_whole_vocabulary():
    torch.manual_seed(0)
    logits, ids = torch.randn(2, 5, 7), torch.randint(0, 7, (2, 5))
    logps, entropy = scored_on_support(logits, ids, [[1], [2]], SamplingSettings(temperature=0.7))
    expected = (logits / 0.7).log_softmax(-1)
    torch.testing.assert_close(logps, expected.gather(-1, ids[..., None]).squeeze(-1))
    torch.testing.assert_close(entropy, -(expected.exp() * expected).sum(-1))


PLAIN = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": None, "repetition_penalty": 1.0, "generation_kwargs": None}


def config(**given):
    return SimpleNamespace(**{**PLAIN, "vllm_structured_outputs_regex": None, **given})


def departures(args):
    return SamplingSettings.of(effective_sampling(args)).departures


def test_generation_kwargs_win_as_in_the_engine():
    assert departures(config(top_p=0.9, generation_kwargs='{"top_p": 1.0, "top_k": 7}')) == {"top_k": 7}


def test_a_regex_has_a_field_of_its_own():
    assert departures(config(vllm_structured_outputs_regex="a+")) == {"structured_outputs": True}


@pytest.mark.parametrize(
    "given, cure",
    [
        ({"top_p": 0.9}, {"top_p": 1.0}),
        ({"generation_kwargs": {"top_p": 0.9}}, {"generation_kwargs": None}),  # top_p=1.0 would not win
        ({"top_p": 0.8, "generation_kwargs": {"top_p": 0.9, "seed": 1}}, {"top_p": 1.0, "generation_kwargs": {"seed": 1}}),
        ({"top_p": 0.8, "generation_kwargs": {"top_p": 1.0}}, {}),
        ({"vllm_structured_outputs_regex": "a+"}, {"vllm_structured_outputs_regex": None}),
        ({"min_p": 0.1, "generation_kwargs": {"min_tokens": 2}}, {"min_p": None, "generation_kwargs": None}),
    ],
    ids=str,
)
def test_the_cure_takes_the_departures_away(given, cure):
    assert neutral(config(**given)) == cure
    assert departures(config(**{**given, **cure})) == {}


def test_the_warning_proposes_what_works():
    said = sampling_message(config(top_k=4), -0.5)
    assert "off by -0.500 nats" in said and "Set sampling_mismatch='correct'" in said and said.endswith("or top_k=0.")
    assert sampling_message(config(generation_kwargs={"min_tokens": 2}), None).endswith("Set generation_kwargs=None.")
