"""Trimming, grouping and micro-batches inside the trainer: what they leave alone, where they stay off, what is logged."""

import logging
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import transformers

from benchmarks.replay import uniform
from grpo_ext import GRPOExtTrainer
from grpo_ext.logprobs.arrange import Arranger
from grpo_ext.logprobs.forward import micro_batched
from grpo_ext.logprobs.positions import dynamic_rope_limit, has_absolute_positions, positions_passed
from grpo_ext.logprobs.window import Loop, uses
from grpo_ext.notices import Notices
from tests.tiny import build_tokenizer
from tests.trainer.replay import VOCAB, both, rollouts, series, train, worst_relative
from tests.unit.rows import cut, make_rows

SGD = {"optim": "sgd", "learning_rate": 0.05, "max_grad_norm": 0.0}
HALF = {"gradient_accumulation_steps": 2, "steps_per_generation": 4}


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    """A model with learned absolute positions, large enough to matter."""
    path = tmp_path_factory.mktemp("gpt2")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=VOCAB, n_embd=64, n_layer=2, n_head=2, n_positions=64, eos_token_id=1, bos_token_id=None, pad_token_id=0,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config)
    model.transformer.wpe.weight.data.normal_(0, 0.5)
    model.save_pretrained(path)
    build_tokenizer().save_pretrained(path)
    return str(path)


def alone(model, rows, i):
    """Log-probs of row i without any padding, the way an engine computes them."""
    prompt = rows["prompt_ids"][i][rows["prompt_mask"][i].bool()]
    completion = rows["completion_ids"][i][rows["completion_mask"][i].bool()]
    with torch.no_grad():
        logits = model(input_ids=torch.cat([prompt, completion])[None]).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(1, completion[:, None])[:, 0]


def scored(trainer, rows):
    ids = torch.cat([rows["prompt_ids"], rows["completion_ids"]], dim=1)
    mask = torch.cat([rows["prompt_mask"], rows["completion_mask"]], dim=1)
    return trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, rows["completion_ids"].size(1))[0]


def test_learned_positions_count_from_the_first_real_token(gpt2, tmp_path):
    """Padding on the left must not move them: with grad, without, in micro-batches, and for the reference."""
    run = train(GRPOExtTrainer, gpt2, tmp_path, max_steps=1, learning_rate=0.0, logps_micro_batch_size=3, **HALF)
    rows = make_rows([6, 2, 4, 1], [3, 8, 5, 2])
    for key in ("prompt_ids", "completion_ids"):
        rows[key] = rows[key] % (VOCAB - 3)
    logps = scored(run, rows)
    assert logps.requires_grad
    with torch.no_grad():
        chunked = scored(run, rows)
    for i in range(4):
        expected = alone(run.model, rows, i)
        for found in (logps, chunked):
            torch.testing.assert_close(found[i, : len(expected)].detach(), expected, atol=1e-5, rtol=0)


def test_stock_trl_shifts_learned_positions(gpt2, tmp_path):
    """Why position ids are passed at all: the same rows, scored by TRL."""
    made = dict(max_steps=1, learning_rate=0.0, beta=0.1, func=lambda: rollouts(prompt=uniform(1, 9)))
    stock, ours = both(gpt2, tmp_path, **made, **HALF)
    assert abs(series(stock, "grad_norm") - series(ours, "grad_norm")).max() > 1e-3
    assert series(ours, "kl").abs().max() < 1e-6  # actor and reference count alike


def test_who_has_absolute_positions():
    tiny = dict(vocab_size=32, hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
    learned = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=32, n_embd=16, n_layer=1, n_head=2))
    opt = transformers.OPTForCausalLM(transformers.OPTConfig(**tiny, ffn_dim=16, word_embed_proj_dim=16))
    rotary = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**tiny, num_key_value_heads=1, intermediate_size=16))
    alibi = transformers.BloomForCausalLM(transformers.BloomConfig(vocab_size=32, hidden_size=16, n_layer=1, n_head=2))
    assert [has_absolute_positions(model) for model in (learned, opt, rotary, alibi)] == [True, True, False, False]


@pytest.mark.parametrize("kind", ["HunYuanDenseV1", "CTRL"])
def test_a_row_that_is_padded_is_the_row_alone(kind):
    """Neither has a module per position: HunYuan norms after the rotation, CTRL adds sines."""
    config = getattr(transformers, f"{kind}Config")
    tiny = dict(vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=2)
    extra = {"head_dim": 16} if kind == "HunYuanDenseV1" else {"dff": 64, "n_positions": 32}
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config(**tiny, **extra)).eval()
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter) * 0.2)
    rows = {key: value % 64 if key.endswith("_ids") else value for key, value in make_rows([2, 5], [4, 4]).items()}
    ids, mask = (torch.cat([rows[f"prompt_{part}"], rows[f"completion_{part}"]], dim=1) for part in ("ids", "mask"))
    with positions_passed(model) if has_absolute_positions(model) else nullcontext(), torch.no_grad():
        logits = model(input_ids=ids, attention_mask=mask).logits[0, 4:-1]
    padded = logits.log_softmax(-1).gather(1, rows["completion_ids"][0][:, None])[:, 0]
    torch.testing.assert_close(padded, alone(model, rows, 0), atol=1e-5, rtol=0)


def test_prompt_tuning_has_its_reference_and_is_given_no_positions(gpt2, model, tmp_path):
    from peft import PromptTuningConfig

    peft_config = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    stock, ours = both(model, tmp_path, beta=0.1, peft_config=peft_config, seed=1, **HALF, **{**SGD, "learning_rate": 5.0})
    assert worst_relative(stock, ours, "grad_norm") <= 1e-5
    assert series(ours, "kl").max() > 0


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope", "linear", "default"])
def test_rotary_frequencies_that_follow_the_width(rope_type):
    rope = {"rope_type": rope_type, "factor": 2.0, "rope_theta": 1e4}
    rope |= {"long_factor": [1.0] * 4, "short_factor": [1.0] * 4} if rope_type == "longrope" else {}
    config = transformers.LlamaConfig(hidden_size=16, num_attention_heads=2, max_position_embeddings=128, rope_parameters=rope)
    assert dynamic_rope_limit(config) == (128 if rope_type in ("dynamic", "longrope") else None)


# ---- logged values -----------------------------------------------------------------------------------------------------


def test_kl_and_entropy_are_means_over_all_tokens(model, tmp_path):
    """Measured directly on the slices of a window: sums over tokens divided by tokens, whatever the grouping."""

    class Summing(GRPOExtTrainer):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.sums = []

        def _compute_loss(self, model, inputs):
            loss = super()._compute_loss(model, inputs)
            self.sums.append((float(self._metrics["train"]["kl"][-1]), float(inputs["completion_mask"].sum()), inputs))
            return loss

    shape = dict(beta=0.1, max_steps=4, group_rollouts_by_length=True, **HALF, **{**SGD, "learning_rate": 0.5})
    run = train(Summing, model, tmp_path / "grouped", **shape)
    for step, entry in enumerate(run.history):
        window = run.sums[2 * step : 2 * step + 2]
        tokens = sum(count for _, count, _ in window)
        assert entry["kl"] == pytest.approx(sum(kl * count for kl, count, _ in window) / tokens)
    apart = train(GRPOExtTrainer, model, tmp_path / "apart", **{**shape, "group_rollouts_by_length": False})
    for name in ("kl", "entropy", "clip_ratio/region_mean", "clip_ratio/high_max"):
        torch.testing.assert_close(series(run, name), series(apart, name), atol=1e-5, rtol=1e-5)
    assert series(run, "kl").max() > 1e-3
    stock, _ = both(model, tmp_path / "stock", **{**shape, "group_rollouts_by_length": False})
    assert (series(stock, "kl") - series(apart, "kl")).abs().max() > 1e-4  # a mean of means


def test_real_token_share_and_times_are_logged(model, tmp_path):
    run = train(GRPOExtTrainer, model, tmp_path, beta=0.1, **HALF)
    forwards = run.forwards.counts["grad"]
    first = run.history[0]
    assert 0.4 < first["perf/real_token_share"] <= 1
    assert sum(entry["perf/real_token_share"] for entry in run.history) / len(run.history) == pytest.approx(
        forwards["real"] / forwards["tokens"], abs=0.05
    )
    assert first["timing_s/old_logps"] > 0 and first["timing_s/ref_logps"] > 0


# ---- where it stays off ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"loss_type": "bnpo"}, "loss_type='bnpo'.*Set loss_type='dapo'"),
        ({"top_entropy_quantile": 0.5}, "top_entropy_quantile=0.5.*1.0"),
        ({"entropy_coef": 0.1}, "entropy bonus.*entropy_coef=0.0"),
    ],
)
def test_grouping_stays_off_where_it_would_change_the_gradient_and_says_so_once(model, tmp_path, caplog, setting, message):
    with caplog.at_level(logging.WARNING, logger="grpo_ext"):
        train(GRPOExtTrainer, model, tmp_path, **HALF, **setting)
    told = [record.message for record in caplog.records if "not grouped" in record.message]
    assert len(told) == 1
    import re

    assert re.search(message, told[0])


def test_grouping_stays_off_for_a_mixture_of_experts_with_its_balancing_loss(models, tmp_path, caplog):
    moe = models("qwen3_moe", router_aux_loss_coef=0.01)
    with caplog.at_level(logging.WARNING, logger="grpo_ext"):
        stock, ours = both(moe, tmp_path, **HALF, **SGD)
    assert any("router_aux_loss_coef=0.0" in record.message for record in caplog.records)
    assert worst_relative(stock, ours, "grad_norm") <= 1e-5


def test_a_loss_of_ones_own_is_not_grouped_unless_asked_for(model, tmp_path, caplog):
    class Own(GRPOExtTrainer):
        def _compute_loss(self, model, inputs):
            return super()._compute_loss(model, inputs)

    with caplog.at_level(logging.WARNING, logger="grpo_ext"):
        unasked = train(Own, model, tmp_path / "unasked", **HALF)
        assert any("Own brings its own `_compute_loss`" in record.message for record in caplog.records)
        asked = train(Own, model, tmp_path / "asked", group_rollouts_by_length=True, **HALF)
    assert asked.forwards.counts["grad"]["tokens"] < unasked.forwards.counts["grad"]["tokens"]


def test_vespo_with_bounds_that_exclude_1_keeps_its_padding(model, tmp_path):
    setting = dict(loss_type="vespo", vllm_importance_sampling_mode="token_truncate", vllm_importance_sampling_clip_max=0.9)
    stock, ours = both(model, tmp_path, **HALF, **SGD, **setting)
    assert worst_relative(stock, ours, "grad_norm") <= 1e-5
    assert ours.forwards.counts["grad"]["tokens"] == stock.forwards.counts["grad"]["tokens"]


def test_a_multimodal_batch_is_left_as_it_is():
    """Its tensors follow images and patches, not rows: nothing is permuted, cut, or taken apart."""
    rows = make_rows([3, 1, 2, 1], [5, 1, 1, 2])
    slices = [one | {"pixel_values": torch.zeros(7, 3), "num_images": [1, 2]} for one in cut(rows, 2)]
    accelerator = SimpleNamespace(reduce=lambda tensor, reduction: tensor)
    trainer = SimpleNamespace(accelerator=accelerator, model=SimpleNamespace(training=True))
    arranged = Arranger(trainer, Notices()).arrange(slices, uses(Loop(2, 2, epoch=8), 0))
    for one, old in zip(arranged, slices, strict=True):
        assert all(one[key] is old[key] for key in old)
    assert [int(one["loss_tokens"]) for one in arranged] == [6, 3]


# ---- micro-batches -----------------------------------------------------------------------------------------------------


def test_one_long_row_among_short_ones_costs_its_own_length(model):
    """2,060 padded tokens instead of 8,000, the same log-probs to 1e-5, in the same order."""
    actor = transformers.AutoModelForCausalLM.from_pretrained(model)
    rows = make_rows([1] * 8, [10, 10, 1000, 10, 10, 10, 10, 10])
    ids = torch.cat([rows["prompt_ids"], rows["completion_ids"]], dim=1) % VOCAB
    mask = torch.cat([rows["prompt_mask"], rows["completion_mask"]], dim=1)
    tokens = []

    def score(model, ids, mask, keep):
        tokens.append(ids[:, 1:].numel())
        with torch.no_grad():
            logits = model(input_ids=ids, attention_mask=mask).logits[:, -keep - 1 : -1]
        logps = logits.log_softmax(-1).gather(2, ids[:, -keep:, None])[..., 0]
        return logps.masked_fill(mask[:, -keep:] == 0, 0), None, None

    whole = score(actor, ids, mask, 1000)[0]
    tokens.clear()
    accelerator = SimpleNamespace(num_processes=1)
    arguments = dict(max_tokens=None, trims=True, multiple=None, accelerator=accelerator, on_alone=lambda n: None)
    found = micro_batched(score, actor, ids, mask, 1000, max_rows=2, **arguments)[0]
    assert sum(tokens) == 2060
    torch.testing.assert_close(found, whole, atol=1e-5, rtol=0)
