"""GRPOExtConfig: each rule refuses what cannot work, with the values given and one that works."""

import pytest

from grpo_ext import GRPOExtConfig
from tests.tiny import config_kwargs


def make(**config):
    return GRPOExtConfig(**config_kwargs("unused", **config))


def test_takes_everything_grpo_config_takes():
    from dataclasses import fields

    from trl import GRPOConfig

    assert {f.name for f in fields(GRPOConfig)} <= {f.name for f in fields(GRPOExtConfig)}
    ours, theirs = make(), GRPOConfig(**config_kwargs("unused"))
    different = [f.name for f in fields(GRPOConfig) if getattr(ours, f.name) != getattr(theirs, f.name)]
    assert set(different) <= {"logging_dir"}


def test_case_9_groups_that_do_not_fit():
    with pytest.raises(ValueError, match=r"=2 x 1 process.*num_generations=4\. Set steps_per_generation=2 "):
        make(per_device_train_batch_size=2, gradient_accumulation_steps=1, num_generations=4)
    make(per_device_train_batch_size=2, gradient_accumulation_steps=1, num_generations=4, steps_per_generation=2)


def test_case_9_one_generation():
    with pytest.raises(ValueError, match="at least 2") as error:
        make(num_generations=1)
    assert "divisib" not in str(error.value)


@pytest.mark.parametrize("steps, works", [(3, 4), (5, 8)])
def test_the_next_number_of_slices_that_works(steps, works):
    with pytest.raises(ValueError, match=rf"Set steps_per_generation={works} "):
        make(per_device_train_batch_size=2, num_generations=8, steps_per_generation=steps)
    make(per_device_train_batch_size=2, num_generations=8, steps_per_generation=works)


def test_generation_batch_size():
    with pytest.raises(ValueError, match=r"generation_batch_size=20 .*Set generation_batch_size=24\."):
        make(per_device_train_batch_size=8, num_generations=6, generation_batch_size=20)
    make(per_device_train_batch_size=8, num_generations=6, generation_batch_size=24)


@pytest.mark.parametrize("value", [0, 0.0, -1.0, float("nan")])
def test_case_5_temperature_names_the_field(value):
    with pytest.raises(ValueError, match=r"^temperature="):
        make(temperature=value)


def test_case_5_temperature_in_generation_kwargs():
    with pytest.raises(ValueError, match=r"^generation_kwargs\['temperature'\]=0"):
        make(generation_kwargs={"temperature": 0})
    with pytest.raises(ValueError, match=r"\['temperature'\]=0\.5 while temperature=1\.0"):
        make(generation_kwargs={"temperature": 0.5})
    make(temperature=0.5, generation_kwargs={"temperature": 0.5})


def test_temperatures_that_vllm_would_change_or_refuse():
    for value in (0.001, 2.5):
        with pytest.raises(ValueError, match=rf"^temperature={value}: vLLM samples at temperatures from 0\.01 to 2\.0"):
            make(temperature=value, use_vllm=True)
        make(temperature=value)


@pytest.mark.parametrize(
    "config, message",
    [
        ({"top_p": 0.0}, r"^top_p=0\.0: a number above 0 and at most 1 is needed\. Set top_p=1\.0"),
        ({"generation_kwargs": {"top_p": "hot"}}, r"^generation_kwargs\['top_p'\]='hot'.*Take it out"),
        ({"generation_kwargs": '{"logit_bias": [3]}'}, r"^generation_kwargs\['logit_bias'\]=\[3\]: a mapping"),
        ({"generation_kwargs": "{top_p"}, r"^generation_kwargs='\{top_p' is no mapping"),
        ({"vllm_mode": "colocated"}, r"^vllm_mode='colocated' is none of colocate, server"),
        ({"vllm_max_model_length": 1}, r"^vllm_max_model_length=1 has no room"),
        ({"vllm_gpu_memory_utilization": 30}, r"^vllm_gpu_memory_utilization=30 is no share"),
        ({"vllm_structured_outputs_regex": "a+", "sampling_mismatch": "error"}, r"Set vllm_structured_outputs_regex=None"),
        ({"vllm_structured_outputs_regex": "a+", "sampling_mismatch": "correct"}, r"cannot replay structured_outputs"),
    ],
)
def test_what_only_the_engine_would_refuse_and_too_late(config, message):
    with pytest.raises(ValueError, match=message):
        make(use_vllm=True, **config)


def test_use_cpu_with_deepspeed(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    with pytest.raises(ValueError, match=r"use_cpu=True .*DeepSpeed.*use_cpu=False"):
        make()


def test_tensor_parallel_size(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ValueError, match=r"vllm_tensor_parallel_size=3 does not divide the 4 process.*\[1, 2, 4\]"):
        make(use_vllm=True, vllm_tensor_parallel_size=3)


@pytest.mark.parametrize(
    "config, message",
    [
        ({"vllm_dtype": "float8"}, "vllm_dtype='float8'"),
        ({"vllm_weight_sync": "delta"}, "vllm_weight_sync='delta'.*'merged'"),
        ({"weight_sync_bucket_mb": 0}, "weight_sync_bucket_mb=0"),
        ({"vllm_engine_kwargs": "enforce_eager"}, "no mapping"),
        ({"vllm_engine_kwargs": {"logprobs_mode": "raw_logprobs"}}, "logprobs_mode.*processed_logprobs"),
        ({"vllm_engine_kwargs": {"tensor_parallel_size": 2}}, "vllm_tensor_parallel_size"),
        ({"vllm_weight_sync": "adapter", "vllm_enable_sleep_mode": True}, "adapter.*sleep"),
    ],
)
def test_engine_fields(config, message):
    with pytest.raises(ValueError, match=message):
        make(**config)


@pytest.mark.parametrize("seed", [1.5, "1", True])
def test_a_seed_of_rollouts_is_a_whole_number(seed):
    with pytest.raises(ValueError, match=rf"rollout_seed={seed!r} is no whole number.*rollout_seed=0"):
        make(rollout_seed=seed)
    assert make(rollout_seed=-3).rollout_seed == -3


def test_engine_kwargs_as_json_from_the_command_line():
    assert make(vllm_engine_kwargs='{"enforce_eager": false}').vllm_engine_kwargs == {"enforce_eager": False}


def test_bf16_is_not_asked_of_a_box_that_has_none():
    import torch

    if torch.accelerator.is_available():
        pytest.skip("this box has an accelerator")
    kwargs = config_kwargs("unused")
    del kwargs["use_cpu"], kwargs["bf16"]
    assert GRPOExtConfig(**kwargs).bf16 is False


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"beta": 0.04}, r"beta=0.04: .* count twice.*Set beta=0.0"),
        ({"multi_objective_aggregation": "normalize_then_sum"}, r"Set multi_objective_aggregation='sum_then_normalize'"),
        ({"kl_in_reward_coef": 0.0}, r"kl_in_reward_coef=0.0: .*Set 0.001"),
        ({"kl_in_reward_coef": float("inf")}, r"kl_in_reward_coef=inf: .*Set 0.001"),
        ({"kl_in_reward_target": -1.0}, r"kl_in_reward_target=-1.0: .*Set 6.0"),
        ({"kl_in_reward_target": 6.0, "kl_in_reward_horizon": 3}, r"of 16 rollouts .*Set kl_in_reward_horizon=10000"),
    ],
)
def test_kl_in_the_reward(wrong, message):
    shape = {"gradient_accumulation_steps": 2}  # 8 rows x 2 slices
    with pytest.raises(ValueError, match=message):
        make(kl_in_reward=True, **wrong, **shape)
    make(**wrong, **shape)  # of no concern where it is off


def test_a_horizon_just_long_enough():
    make(kl_in_reward=True, kl_in_reward_target=6.0, kl_in_reward_horizon=4, gradient_accumulation_steps=2)
    make(kl_in_reward=True, kl_in_reward_horizon=1, gradient_accumulation_steps=2)  # a fixed coefficient has none
