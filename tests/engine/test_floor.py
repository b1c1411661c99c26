"""Engine and actor give every fresh token the same probability, after every push, for every kind of actor.

float32, learning rate 1e-2, four generations (versions 0 to 3): mean |p_rollout - p_actor| <= 1e-6 and max |dlogp| <= 1e-5.
"""

import pytest
import torch
from peft import (
    BOFTConfig,
    IA3Config,
    LoHaConfig,
    LoKrConfig,
    LoraConfig,
    OFTConfig,
    VeraConfig,
)

from tests.floor import worst

pytestmark = pytest.mark.engine

MEAN_PROB, MAX_LOGP = 1e-6, 1e-5
LINEAR = ["q_proj", "v_proj", "up_proj", "down_proj"]

ADAPTERS = {
    "lora": lambda: LoraConfig(r=4, target_modules=LINEAR),
    "dora": lambda: LoraConfig(r=4, use_dora=True, target_modules=LINEAR),
    "lora_bias": lambda: LoraConfig(r=4, lora_bias=True, target_modules=["q_proj", "v_proj"]),
    "bias_all": lambda: LoraConfig(r=4, bias="all", target_modules=LINEAR),
    "loha": lambda: LoHaConfig(r=4, target_modules=LINEAR),
    "lokr": lambda: LoKrConfig(r=4, target_modules=LINEAR),
    "ia3": lambda: IA3Config(target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "oft": lambda: OFTConfig(oft_block_size=8, target_modules=LINEAR),
    "boft": lambda: BOFTConfig(boft_block_size=8, target_modules=LINEAR),
    "vera": lambda: VeraConfig(r=4, target_modules=["q_proj", "o_proj"]),
    "tied_embeddings": lambda: LoraConfig(
        r=4, target_modules=LINEAR, modules_to_save=["embed_tokens"], ensure_weight_tying=True
    ),
}
MIXTURE = {
    "moe_attention": lambda: LoraConfig(r=4, target_modules=["q_proj", "o_proj"]),
    "moe_experts": lambda: LoraConfig(
        r=4, target_modules=["q_proj", "o_proj"], target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    ),
}


def assert_floor(trainer, name):
    found = worst(trainer.floor)
    print(f"\n{name}: mean |dp| {found['mean_prob']:.1e}, max |dlogp| {found['max_logp']:.1e} over {len(trainer.floor)} pushes")
    assert [entry["version"] for entry in trainer.floor] == [0, 1, 2, 3]
    assert all(entry["tokens"] > 0 for entry in trainer.floor)
    assert found["mean_prob"] <= MEAN_PROB and found["max_logp"] <= MAX_LOGP


def assert_learned(trainer, before):
    """The actor did move, or a push that does nothing would pass."""
    after = dict(trainer.model.named_parameters())
    assert any(not torch.equal(after[name], value) for name, value in before.items())


def trainable(trainer):
    return {n: p.detach().clone() for n, p in trainer.model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("kind", ["qwen2", "llama", "qwen3_moe", "gpt_neox"])
def test_full(train, kind):
    trainer = train(kind, start=False, max_steps=4)
    before = trainable(trainer)
    trainer.train()
    assert_learned(trainer, before)
    assert_floor(trainer, f"full {kind}")


def test_untied_head(train):
    trainer = train("qwen2", model_config={"tie_word_embeddings": False}, max_steps=4)
    assert_floor(trainer, "full, untied")


@pytest.mark.parametrize("name", ADAPTERS)
def test_adapter(train, name):
    """Also: the base weights keep their bits through any number of pushes."""
    trainer = train("qwen2", peft_config=ADAPTERS[name](), start=False, max_steps=4)
    frozen = {n: p.detach().clone() for n, p in trainer.model.named_parameters() if not p.requires_grad}
    before = trainable(trainer)
    trainer.train()
    assert_learned(trainer, before)
    assert_floor(trainer, name)
    after = dict(trainer.model.named_parameters())
    assert frozen and all(torch.equal(after[n].view(torch.uint8), p.view(torch.uint8)) for n, p in frozen.items())


@pytest.mark.parametrize("name", MIXTURE)
def test_adapter_on_a_mixture_of_experts(train, name):
    trainer = train("qwen3_moe", peft_config=MIXTURE[name](), max_steps=4)
    assert_floor(trainer, f"LoRA on qwen3_moe, {name}")


def test_pushing_the_adapter_alone(train):
    trainer = train("qwen2", peft_config=ADAPTERS["lora"](), vllm_weight_sync="adapter", max_steps=4)
    assert_floor(trainer, "lora, adapter push")


def test_the_engine_takes_the_actors_dtype(train, models):
    """A float32 checkpoint is served in float32 although vLLM would choose bfloat16; and a setting wins."""
    trainer = train(start=False)
    assert trainer.vllm_generation.llm.llm_engine.model_config.dtype == torch.float32
    trainer = train(start=False, vllm_dtype="bfloat16")
    assert trainer.vllm_generation.llm.llm_engine.model_config.dtype == torch.bfloat16


def test_tied_head_after_a_push(train):
    """One matrix on both sides, judged by probabilities too (`test_full`), for a stale packed head shares the storage."""
    trainer = train()
    trainer.vllm_generation.sync_weights()
    model = trainer.vllm_generation.llm.llm_engine.model_executor.driver_worker.model_runner.model
    actor = trainer.model.get_input_embeddings().weight
    rows = actor.size(0)
    assert torch.equal(model.model.embed_tokens.weight[:rows], actor)
    assert torch.equal(model.lm_head.weight[:rows], actor)


def test_a_hundred_pushes_of_a_bfloat16_adapter_leave_the_base_alone(train):
    trainer = train(
        "qwen2", model_config={"dtype": "bfloat16"}, peft_config=ADAPTERS["lora"](), start=False,
        model_init_kwargs={"dtype": "bfloat16"},
    )  # fmt: skip
    for name, parameter in trainer.model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    before = {n: p.detach().clone() for n, p in trainer.model.named_parameters()}
    for _ in range(100):
        trainer.vllm_generation.sync_weights()
    different = [
        n for n, p in trainer.model.named_parameters() if not torch.equal(p.view(torch.uint8), before[n].view(torch.uint8))
    ]
    assert trainer.vllm_generation.pushes == 100 and different == []


def test_temperature_is_in_both_log_probs(train):
    trainer = train(temperature=0.5, max_steps=4)
    assert_floor(trainer, "temperature 0.5")


@pytest.mark.parametrize(
    "kwargs",
    [{"logprobs": 5}, {"logprobs": None}, {"prompt_logprobs": 2}, {"flat_logprobs": True}, {"logprob_token_ids": [5, 6]}],
)
def test_log_probs_are_those_of_the_sampled_token_whatever_generation_kwargs_say(train, kwargs):
    trainer = train(generation_kwargs=kwargs, max_steps=1)
    assert worst(trainer.floor)["max_logp"] <= MAX_LOGP


def test_a_seed_in_generation_kwargs_does_not_make_a_group_identical(train):
    trainer = train(generation_kwargs={"seed": 7}, max_steps=1)
    completions = list(trainer._logs["completion"])
    groups = [completions[i : i + 4] for i in range(0, len(completions), 4)]
    assert all(len(set(group)) > 1 for group in groups)
