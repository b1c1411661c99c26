"""Facts about TRL 1.16, transformers 5.17 and PEFT 0.21 that forwards over trees rely on."""

import inspect
import subprocess
import sys

import pytest
import torch
import transformers
from transformers.integrations import sdpa_attention
from transformers.masking_utils import create_causal_mask
from trl import GRPOTrainer
from trl.trainer import utils

from grpo_ext import _trl
from grpo_ext.logprobs.tree_forward import ATTENTIONS

SHAPE = dict(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, pad_token_id=0, eos_token_id=1)


def source(function):
    return inspect.getsource(inspect.unwrap(function))


def test_the_method_hands_ids_mask_and_labels_to_the_model_and_keeps_the_last_columns():
    text = source(GRPOTrainer._get_per_token_logps_and_entropies)
    assert 'model_inputs = {"input_ids": input_ids_batch, "attention_mask": attention_mask_batch}' in text
    assert "outputs = model(**model_inputs, labels=labels, fused_lm_head=True)" in text
    assert "all_logps.append(outputs.log_probs[:, -logits_to_keep:])" in text
    assert "all_entropies.append(outputs.entropy[:, -logits_to_keep:])" in text


def test_the_fused_head_takes_labels_that_are_shifted_already():
    text = source(utils.add_fused_lm_head)
    assert "labels=None, shift_labels=None" in text
    assert "hidden_states = backbone_outputs.last_hidden_state\n            labels = shift_labels" in text


def test_the_head_asks_one_name_whether_to_project_labelled_positions_only():
    assert source(utils).count("_use_triton") == 2  # the import and the one use
    assert "compact = _use_triton(hidden_states.device)" in source(utils.add_fused_lm_head)
    before = utils._use_triton
    with _trl.labelled_positions_only():
        assert utils._use_triton(torch.device("cpu"))
    assert utils._use_triton is before and not before(torch.device("cpu"))


def test_sdpa_is_looked_up_by_name_and_called_with_what_the_forward_was_given():
    parameters = list(inspect.signature(sdpa_attention.sdpa_attention_forward).parameters)
    assert parameters[:7] == ["module", "query", "key", "value", "attention_mask", "dropout", "scaling"]
    asked = []

    def attend(query, key, value, scale, dropout):
        asked.append((scale, dropout, tuple(query.shape), tuple(key.shape)))
        return query

    model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**SHAPE, num_key_value_heads=1, intermediate_size=32))
    ids = torch.arange(2, 8)[None]
    plain = model(input_ids=ids).logits
    _trl.serve_trees()
    try:
        assert torch.equal(model(input_ids=ids).logits, plain) and not asked
        one = torch.ones(1, 1, 1, 1, dtype=torch.bool)
        model(input_ids=ids, attention_mask=one, position_ids=ids, tree_attention=attend)
    finally:
        transformers.AttentionInterface.register("sdpa", sdpa_attention.sdpa_attention_forward)
    assert asked == [(16**-0.5, 0.0, (1, 2, 6, 16), (1, 1, 6, 16))] * 2


def test_a_layer_with_a_mask_of_its_own_is_no_tree(monkeypatch):
    """Doge adds a bias for each key, equal for all in a fresh model: its log-probs would be right, the bias without gradient."""
    config = transformers.DogeConfig(**SHAPE, num_key_value_heads=1, intermediate_size=32)
    model = transformers.DogeForCausalLM(config)
    ids, asked = torch.arange(2, 8)[None], []
    monkeypatch.setitem(transformers.AttentionInterface._global_mapping, "sdpa", sdpa_attention.sdpa_attention_forward)
    _trl.serve_trees()
    one = torch.ones(1, 1, 1, 1, dtype=torch.bool)
    model(input_ids=ids, attention_mask=one, position_ids=ids, tree_attention=lambda *args, **kwargs: asked.append(args))
    assert not asked


def test_a_mask_of_four_dimensions_is_handed_through():
    config = transformers.Qwen2Config(**SHAPE)
    mask = torch.ones(1, 1, 1, 1, dtype=torch.bool)
    made = create_causal_mask(config, torch.zeros(1, 5, 32), mask, None, position_ids=torch.arange(5)[None])
    assert made is mask


def built(name, **kwargs):
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(getattr(transformers, name)(**{**SHAPE, **kwargs}))


@pytest.mark.parametrize(
    "name", ["Qwen2Config", "LlamaConfig", "GPTNeoXConfig", "GPT2Config", "OPTConfig", "Qwen3MoeConfig", "Gemma2Config"]
)
def test_these_attend_through_the_interface(name):
    assert _trl.attention_of(built(name)) in ATTENTIONS


@pytest.mark.parametrize("name", ["GPTNeoConfig", "MptConfig", "BloomConfig", "FalconConfig", "JambaConfig", "Qwen3NextConfig"])
def test_these_do_not(name):
    kwargs = {"attention_types": [[["global", "local"], 1]], "num_layers": 2, "num_heads": 2} if name == "GPTNeoConfig" else {}
    assert _trl.attention_of(built(name, **kwargs)) is None


@pytest.mark.parametrize(("name", "kwargs"), [("Lfm2Config", {"full_attn_idxs": [1]}), ("Llama4TextConfig", {})])
def test_these_say_so_by_their_layers(name, kwargs):
    assert set(getattr(transformers, name)(**SHAPE, **kwargs).layer_types) - {"full_attention", "sliding_attention"}


def test_peft_gives_the_attributes_of_the_model_inside():
    from peft import LoraConfig, get_peft_model

    model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**SHAPE, num_key_value_heads=1, intermediate_size=32))
    adapted = get_peft_model(model, LoraConfig(target_modules=["q_proj"]))
    assert _trl.attention_of(adapted) == "sdpa" and adapted.config is model.config and adapted.dtype == model.dtype


def test_pure_modules_import_nothing_heavy():
    code = (
        "import sys, grpo_ext.batch.trees, grpo_ext.batch.groups, grpo_ext.batch.costs, grpo_ext.batch.branch_attention;"
        "print([m for m in ('trl', 'transformers', 'accelerate', 'deepspeed', 'vllm', 'peft') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
