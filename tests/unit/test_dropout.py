"""Where dropout hides in a model, and whether what is said to take it away does."""

import ast

import pytest
import torch
from trl.trainer.utils import disable_dropout_in_model

from grpo_ext.logprobs.dropout import Dropout, active_dropout, remedies

SIZES = {
    "vocab_size": 32, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32,
    "bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip
FUNCTIONAL = {"opt": {"word_embed_proj_dim": 32, "layerdrop": 0.05}, "biogpt": {}, "bloom": {"hidden_dropout": 0.2}, "xglm": {}}
FUNCTIONAL |= {"starcoder2": {"residual_dropout": 0.3, "num_key_value_heads": 1}, "gpt_neox": {"attention_dropout": 0.4}}


def build(kind, **settings):
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**SIZES, **settings}))


def is_noisy(model):
    ids = torch.arange(24)[None]
    model.train()
    return len({model(ids).logits.sum().item() for _ in range(8)}) > 1


@pytest.mark.parametrize("kind", FUNCTIONAL)
def test_dropout_that_is_no_module_is_found_and_its_remedy_works(kind):
    model = build(kind, **FUNCTIONAL[kind])
    disable_dropout_in_model(model)
    assert is_noisy(model)  # the layers' own is left
    (remedy,) = remedies(active_dropout(model), model.config.to_dict())
    kwargs = ast.literal_eval(remedy.removeprefix("model_init_kwargs="))
    cured = build(kind, **{**FUNCTIONAL[kind], **kwargs})
    disable_dropout_in_model(cured)
    assert active_dropout(cured) == [] and not is_noisy(cured)


def test_dropout_modules_are_taken_away_by_disable_dropout():
    model = build("gpt2")  # three fields of 0.1 by default, none of them called attention_dropout
    found = active_dropout(model)
    assert Dropout("transformer.h.0.attn.attn_dropout", 0.1, "module") in found
    assert remedies(found, model.config.to_dict()) == ["disable_dropout=True"]
    disable_dropout_in_model(model)
    assert active_dropout(model) == [] and not is_noisy(model)


def test_an_adapters_own():
    from peft import LoHaConfig, LoraConfig, OFTConfig, get_peft_model

    lora = get_peft_model(build("llama"), LoraConfig(target_modules=["q_proj"], lora_dropout=0.25))
    where = "base_model.model.model.layers.0.self_attn.q_proj.lora_dropout.default"
    assert active_dropout(lora) == [Dropout(where, 0.25, "adapter", "lora_dropout")]
    loha = get_peft_model(build("llama"), LoHaConfig(target_modules=["q_proj"], module_dropout=0.5))
    oft = get_peft_model(build("llama"), OFTConfig(target_modules=["q_proj"], oft_block_size=8, module_dropout=0.5))
    for adapted in (loha, oft):
        assert remedies(active_dropout(adapted), {}) == ["module_dropout=0 in the adapter's config"]


def test_a_model_without_any():
    assert active_dropout(build("llama")) == [] and not is_noisy(build("llama"))
