"""Trees in the trainer: stock TRL's training in every pass, where they are taken and where not, and what is said about it."""

import logging

import pytest
import torch
import transformers

from benchmarks.replay import RecordedRollouts, equal, lognormal, uniform
from grpo_ext import GRPOExtConfig, GRPOExtTrainer
from grpo_ext.logprobs import tree_forward
from grpo_ext.logprobs.neutral import longest_tree_row
from tests.tiny import build_tokenizer, config_kwargs
from tests.trainer.replay import VOCAB, both, rollouts, series, train, weight_difference, worst_relative

SGD = {"optim": "sgd", "learning_rate": 0.05, "max_grad_norm": 0.0}
HALF = {"gradient_accumulation_steps": 2, "steps_per_generation": 4}


def messy():
    """Truncated completions, tokens of tools, unscored tokens."""
    return rollouts(truncated=0.3, tools=True, unscored=0.05)


def long_prompts():
    """Prompts long enough that trees pay even for the tiny model."""
    return rollouts(prompt=equal(150))


def assert_same(stock, ours):
    assert len(stock.history) == len(ours.history) > 2
    assert worst_relative(stock, ours, "grad_norm") <= 1e-5
    assert float((series(stock, "loss") - series(ours, "loss")).abs().max()) <= 1e-5
    assert weight_difference(stock, ours) <= 1e-5


def told(caplog):
    return [record.message for record in caplog.records if "not shared" in record.message]


@pytest.mark.parametrize(
    ("accumulation", "slices", "iterations"), [(4, 4, 1), (2, 4, 1), (2, 3, 2), (3, 2, 1)], ids=lambda value: str(value)
)
def test_accumulation_slices_iterations(model, tmp_path, accumulation, slices, iterations):
    shape = dict(gradient_accumulation_steps=accumulation, steps_per_generation=slices, num_iterations=iterations, max_steps=6)
    stock, ours = both(model, tmp_path, func=messy, shared_prompt=True, **shape, **SGD)
    assert_same(stock, ours)
    assert ours.forwards.counts["grad"]["rows"] == stock.forwards.counts["grad"]["rows"]
    assert ours.forwards.counts["grad"]["tokens"] < 0.7 * stock.forwards.counts["grad"]["tokens"]
    assert all(entry["perf/real_token_share"] > 0.8 for entry in ours.history if "perf/real_token_share" in entry)


@pytest.mark.parametrize(
    "setting",
    [
        {"beta": 0.1},
        {"gradient_checkpointing": True, "beta": 0.1},
        {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
        {"mask_truncated_completions": True, "pad_to_multiple_of": 8},
        {"logps_max_tokens": 20, "beta": 0.1},
        {"logps_micro_batch_size": 3, "ref_logps_micro_batch_size": 2, "beta": 0.1},
        {"old_logps": "always"},
        {"num_generations": 8},
        {"num_generations": 2},
        {"loss_type": "bnpo", "top_entropy_quantile": 0.5, "entropy_coef": 0.01},
        {"importance_sampling_level": "sequence", "loss_type": "grpo"},
        {"temperature": 0.7, "cast_lm_head_to_fp32": True},
        {"model_init_kwargs": {"attn_implementation": "eager"}, "beta": 0.1},
    ],
    ids=lambda setting: ",".join(setting),
)
def test_settings(model, tmp_path, setting):
    arguments = {**HALF, **SGD, **setting}
    stock, ours = both(model, tmp_path, func=messy, shared_prompt=True, **arguments)
    assert_same(stock, ours)
    assert ours.forwards.counts["grad"]["tokens"] < stock.forwards.counts["grad"]["tokens"]
    if "beta" in setting:
        assert ours.forwards.counts["reference"]["tokens"] < stock.forwards.counts["reference"]["tokens"]


@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_an_adapter_on_and_off(model, tmp_path, beta):
    from peft import LoraConfig

    adapter = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    stock, ours = both(model, tmp_path, shared_prompt=True, beta=beta, peft_config=adapter, seed=3, **HALF, **SGD)
    assert_same(stock, ours)
    assert not beta or series(ours, "kl").max() > 1e-4


def test_evaluation(model, tmp_path):
    evaluations = dict(evaluate=True, eval_strategy="steps", eval_steps=1, per_device_eval_batch_size=4, num_generations_eval=4)
    stock, ours = both(model, tmp_path, shared_prompt=True, **HALF, **SGD, **evaluations)
    for theirs, mine in zip(stock.evaluations, ours.evaluations, strict=True):
        assert mine["eval_loss"] == pytest.approx(theirs["eval_loss"], abs=1e-5)


@pytest.mark.parametrize("kind", ["gpt_neox", "qwen3_moe"])
def test_other_models(models, tmp_path, kind):
    made = models(kind, **({"router_aux_loss_coef": 0.0} if kind == "qwen3_moe" else {}))
    stock, ours = both(made, tmp_path, shared_prompt=True, router_aux_loss_coef=0.0, **HALF, **SGD)
    assert_same(stock, ours)
    assert ours.forwards.counts["grad"]["tokens"] < 0.7 * stock.forwards.counts["grad"]["tokens"]


def test_dropout_does_not_spoil_the_first_look(model, tmp_path, caplog):
    """It compares two forwards, which dropout would make differ; both are taken with no part of the model in training."""
    from peft import LoraConfig

    adapter = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, lora_dropout=0.5)
    with caplog.at_level(logging.WARNING, logger="grpo_ext"):
        run = train(GRPOExtTrainer, model, tmp_path, shared_prompt=True, peft_config=adapter, max_steps=1, **HALF)
    assert told(caplog) == [] and run.forwards.counts["no_grad"]["rows"] > 0


# ---- rows or trees -----------------------------------------------------------------------------------------------------


class Slices(GRPOExtTrainer):
    """Notes the rows of every slice by their numbers."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.seen = []

    def compute_loss(self, model, inputs, *args, **kwargs):
        self.seen.append(sorted(inputs["row_id"].tolist()))
        return super().compute_loss(model, inputs, *args, **kwargs)


def test_auto_shares_long_prompts_and_keeps_their_groups_together(model, tmp_path):
    """Prompts of 150, groups of 4 in slices of 4: a tree is 149 and its completions, where rows are four times that."""
    shape = dict(gradient_accumulation_steps=4, steps_per_generation=4)
    stock, ours = both(model, tmp_path, ours=Slices, func=long_prompts, **shape, **SGD)
    assert_same(stock, ours)
    assert ours.forwards.counts["grad"]["tokens"] < 0.3 * stock.forwards.counts["grad"]["tokens"]
    assert all(len({row // 4 for row in rows}) == 1 for rows in ours.seen)
    assert all(entry["perf/real_token_share"] > 0.97 for entry in ours.history)


def test_auto_keeps_rows_where_they_are_cheaper(model, tmp_path):
    """Prompts of 2 to 6 and a tiny model: the attention calls of the branches cost more than the padding."""
    auto, rows = (train(GRPOExtTrainer, model, tmp_path / str(s), shared_prompt=s, **HALF) for s in ("auto", False))
    assert auto.forwards.counts == rows.forwards.counts
    assert worst_relative(auto, rows, "grad_norm") <= 1e-5


def test_grouping_switched_off_leaves_rows_where_trl_put_them(model, tmp_path):
    run = train(Slices, model, tmp_path, func=long_prompts(), group_rollouts_by_length=False, **HALF)
    assert any(len({row // 4 for row in rows}) > 1 for rows in run.seen)


def test_false_never_asks(model, tmp_path, monkeypatch):
    monkeypatch.setattr("grpo_ext.logprobs.sharing.SharedPrompts._cheaper", None)
    monkeypatch.setattr("grpo_ext._trl.labelled_positions_only", None)
    run = train(GRPOExtTrainer, model, tmp_path, func=long_prompts(), shared_prompt=False, beta=0.1, **HALF)
    assert len(run.history) == 4


# ---- where it cannot be ------------------------------------------------------------------------------------------------


def test_a_model_that_does_not_attend_as_asked_goes_on_with_rows(model, tmp_path, caplog, monkeypatch):
    """A fake attention that takes the line for one row, as a layer would that ignores what it is told."""

    def ignorant(query, key, value, layout, scale, dropout):
        key, value = (each.repeat_interleave(query.size(1) // each.size(1), dim=1) for each in (key, value))
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale)

    monkeypatch.setattr(tree_forward, "branch_attention", ignorant)
    with caplog.at_level(logging.WARNING, logger="grpo_ext"):
        stock, ours = both(model, tmp_path, shared_prompt=True, **HALF, **SGD)
    assert_same(stock, ours)
    assert len(told(caplog)) == 1 and "nats off those of plain rows" in told(caplog)[0]


def test_rows_longer_than_a_sliding_window_stay_rows(tmp_path, caplog):
    torch.manual_seed(0)
    shape = dict(vocab_size=VOCAB, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=1)
    config = transformers.MistralConfig(**shape, num_key_value_heads=1, sliding_window=8, pad_token_id=0, eos_token_id=1)
    transformers.MistralForCausalLM(config).save_pretrained(tmp_path / "model")
    build_tokenizer().save_pretrained(tmp_path / "model")
    with caplog.at_level(logging.WARNING, logger="grpo_ext"):
        stock, ours = both(str(tmp_path / "model"), tmp_path, shared_prompt=True, **HALF, **SGD)
    assert_same(stock, ours)
    assert len(told(caplog)) == 1 and "longer than 8 tokens" in told(caplog)[0]


def test_an_empty_prompt_stays_a_row(model, tmp_path, caplog):
    """This model has no window, so nothing is said of one."""

    class WithoutPrompt(RecordedRollouts):
        def __call__(self, prompts, trainer):
            result = super().__call__(prompts, trainer)
            return {**result, "prompt_ids": [*result["prompt_ids"][:-1], []]}

    made = WithoutPrompt(vocab=VOCAB, completion=lognormal(6, 0.8, 24), prompt=uniform(2, 6))
    with caplog.at_level(logging.WARNING, logger="grpo_ext"):
        run = train(GRPOExtTrainer, model, tmp_path, func=made, shared_prompt=True, **HALF)
    assert len(run.history) == 4
    assert len(told(caplog)) == 1 and told(caplog)[0].endswith("a prompt is empty, or an attention mask has holes.")


def test_windows():
    shape = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=1)
    assert longest_tree_row(transformers.Qwen2Config(**shape, sliding_window=8)) == float("inf")
    assert longest_tree_row(transformers.MistralConfig(**shape, sliding_window=8)) == 8
    assert longest_tree_row(transformers.Gemma2Config(**shape, sliding_window=16)) == 16
    unlike = {0: {"sliding_window": 32}, 1: {"sliding_window": 8}}
    assert longest_tree_row(transformers.MistralConfig(**shape, per_layer_config=unlike)) == 8
    dynamic = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    config = transformers.LlamaConfig(**shape, max_position_embeddings=128, rope_parameters=dynamic)
    assert longest_tree_row(config) == 128


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: setattr(t.model.config, "layer_types", ["conv", "full_attention"]), "layers of kind conv"),
        (lambda t: setattr(t.model.config, "_attn_implementation_internal", "flash_attention_2"), "flash_attention_2.*'sdpa'"),
        (lambda t: setattr(t, "aux_loss_enabled", True), "router_aux_loss_coef=0.0"),
        (lambda t: setattr(t.args, "torch_compile", True), "torch_compile=False"),
    ],
)
def test_obstacles_are_named(model, tmp_path, change, message):
    import re

    from grpo_ext.logprobs.neutral import sharing_obstacle

    trainer = train(GRPOExtTrainer, model, tmp_path, max_steps=1, **HALF)
    assert sharing_obstacle(trainer) is None
    change(trainer)
    assert re.search(message, sharing_obstacle(trainer))


def test_a_trainer_with_a_log_prob_method_of_its_own_gets_rows(model, tmp_path, caplog):
    from trl import GRPOTrainer

    from grpo_ext import GRPOExtMixin

    shapes = set()

    class Theirs(GRPOTrainer):
        def _get_per_token_logps_and_entropies(self, model, input_ids, *args, **kwargs):
            shapes.add(input_ids.size(0))
            return super()._get_per_token_logps_and_entropies(model, input_ids, *args, **kwargs)

    class Ours(GRPOExtMixin, Theirs):
        pass

    with caplog.at_level(logging.WARNING, logger="grpo_ext"):
        train(Ours, model, tmp_path, shared_prompt=True, ranks=True, use_cpu=True, max_steps=2, **HALF)
    assert "Theirs makes log-probs by a method of its own" in told(caplog)[0] and shapes == {4}


def test_what_cannot_be_set(tmp_path):
    for value, expected in (("true", True), ("False", False), (True, True), ("auto", "auto")):
        assert GRPOExtConfig(**config_kwargs(tmp_path, shared_prompt=value)).shared_prompt == expected
    with pytest.raises(ValueError, match=r"shared_prompt='sometimes'.*Set 'auto'"):
        GRPOExtConfig(**config_kwargs(tmp_path, shared_prompt="sometimes"))
