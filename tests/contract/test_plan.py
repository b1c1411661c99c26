"""`grpo-ext plan` knows the configuration from a record and TRL's rules by heart: both are held against the real thing."""

import json
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from grpo_ext import GRPOExtConfig
from grpo_ext.plan.arithmetic import make_plan
from grpo_ext.plan.recipe import FIELDS
from grpo_ext.plan.record import fields
from grpo_ext.rules import problems
from tests.tiny import config_kwargs

DEFAULTS = {name: default for name, (_, default) in json.loads(FIELDS.read_text())["config"].items()}


def as_read(**given):
    """What `plan` reads from a recipe with these settings beside those of the tests."""
    return SimpleNamespace(**{**DEFAULTS, **config_kwargs("unused", **given)})


def test_the_record_is_that_of_the_dataclasses():
    assert json.loads(FIELDS.read_text()) == json.loads(json.dumps(fields())), "run python -m grpo_ext.plan.record"


@pytest.fixture
def launched(monkeypatch):
    """`launched(n)`: from now on a configuration takes itself for one of n ranks, without any other being started."""
    from accelerate import PartialState
    from transformers import TrainingArguments

    monkeypatch.delenv("WORLD_SIZE", raising=False)
    PartialState._reset_state()
    PartialState(cpu=True)

    def launch(processes):
        monkeypatch.setenv("WORLD_SIZE", str(processes))
        monkeypatch.setattr(TrainingArguments, "world_size", property(lambda self: processes))

    return launch


def configured(**given):
    """The real configuration; its process state is the one that is already there."""
    return GRPOExtConfig(**config_kwargs("unused", **given), accelerator_config={"use_configured_state": True})


SIZES = st.fixed_dictionaries(
    {
        "per_device_train_batch_size": st.integers(1, 12),
        "gradient_accumulation_steps": st.integers(1, 12),
        "num_generations": st.integers(1, 12),
        "num_iterations": st.integers(1, 3),
        "use_vllm": st.booleans(),
        "vllm_mode": st.sampled_from(["colocate", "server"]),
        "vllm_tensor_parallel_size": st.integers(1, 4),
    },
    optional={
        "steps_per_generation": st.integers(1, 12),
        "generation_batch_size": st.integers(1, 96) | st.sampled_from([48, 96, 144, 288, 720]),
        "eval_strategy": st.sampled_from(["no", "steps"]),
        "per_device_eval_batch_size": st.integers(1, 8),
        "num_generations_eval": st.integers(-1, 4),
        "temperature": st.sampled_from([0.0, 0.7, 1.0, 3.0]),
        "top_p": st.sampled_from([0.0, 0.9]),
        "sampling_mismatch": st.sampled_from(["error", "correct"]),
        "vllm_structured_outputs_regex": st.just("a+"),
        "generation_kwargs": st.dictionaries(
            st.sampled_from(["temperature", "top_p", "top_k", "min_tokens", "stop"]),
            st.sampled_from([0, 1, 0.7, "x"]),
            max_size=3,
        ),
        "old_logps_max_age": st.integers(-1, 2),
        "logps_max_tokens": st.integers(0, 2),
        "auto_find_batch_size": st.booleans(),
        "vllm_importance_sampling_mode": st.sampled_from(["token_truncate", "sequence_mask"]),
        "vllm_importance_sampling_clip_min": st.sampled_from([None, 0.5, 3.0]),
        "vllm_importance_sampling_clip_max": st.sampled_from([None, 3.0]),
    },
)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(SIZES, st.integers(1, 12), st.booleans())
def test_plan_and_configuration_agree(launched, given, processes, mend):
    """plan fails exactly where GRPOExtConfig raises; all its fixes together work; then its numbers are the configuration's."""
    launched(processes)
    found = problems(as_read(**given), processes)
    if found:
        with pytest.raises(ValueError) as error:
            configured(**given)
        assert str(error.value) == found[0].text
        if not mend:
            return
        for problem in found:
            given = {**given, **problem.fixes}
    config, plan = configured(**given), make_plan(as_read(**given), processes)
    generation = plan.generation
    assert (generation.rollouts, generation.slices) == (config.generation_batch_size, config.steps_per_generation)
    assert generation.prompts * config.num_generations == generation.rollouts
    assert generation.rollouts_per_rank * processes == generation.rollouts
    assert (
        plan.old_logps.rows_free + plan.old_logps.rows_computed + plan.old_logps.rows_reanchored >= generation.rollouts - 1e-6
    )
    if plan.engine is not None:
        assert plan.engine.engines * plan.engine.ranks == processes
        assert plan.engine.engines * plan.engine.sequences == generation.rollouts
    if plan.evaluation is not None:
        assert plan.evaluation.rollouts_per_step == config.per_device_eval_batch_size * processes


@settings(max_examples=200, deadline=None)
@given(
    st.fixed_dictionaries(
        {
            "per_device_train_batch_size": st.integers(1, 12),
            "steps_per_generation": st.integers(1, 8),
            "num_generations": st.integers(1, 3),
            "vllm_importance_sampling_mode": st.sampled_from(["token_truncate", "sequence_mask"]),
            "vllm_importance_sampling_clip_min": st.sampled_from([None, 0.5, 3.0]),
            "vllm_importance_sampling_clip_max": st.sampled_from([None, 3.0]),
            "vllm_importance_sampling_correction": st.booleans(),
            "eval_strategy": st.sampled_from(["no", "steps"]),
            "eval_steps": st.just(1),
            "per_device_eval_batch_size": st.integers(1, 4),
        }
    )
)
def test_stock_trl_refuses_the_same(given):
    """Ours come first, so that rules of TRL's own would go unnoticed in the property above."""
    from trl import GRPOConfig

    try:
        GRPOConfig(**config_kwargs("unused", **given))
        refused = False
    except ValueError:
        refused = True
    assert refused == bool(problems(as_read(**given), 1))
