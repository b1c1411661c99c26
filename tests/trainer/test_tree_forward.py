"""A forward over trees on bare models: the log-probs, entropies and gradients of rows."""

import inspect
import shutil
from contextlib import nullcontext
from types import MethodType, SimpleNamespace

import pytest
import torch
import transformers
from trl import GRPOTrainer
from trl.trainer.utils import add_fused_lm_head

from grpo_ext import _trl
from grpo_ext.logprobs.positions import positions_passed
from grpo_ext.logprobs.tree_forward import score_as_trees

VOCAB, P, T = 98, 8, 12
KINDS = {
    "Qwen2": {"num_key_value_heads": 1},
    "Llama": {"num_key_value_heads": 2},
    "Qwen3": {"num_key_value_heads": 1, "head_dim": 32},
    "Gemma2": {"num_key_value_heads": 1, "head_dim": 32},
    "Mistral": {"num_key_value_heads": 1},
    "GPTNeoX": {},
    "GPT2": {"n_inner": 128, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
}


def built(kind, attention):
    shape = dict(vocab_size=VOCAB, hidden_size=64, num_hidden_layers=2, num_attention_heads=2, pad_token_id=0, eos_token_id=1)
    shape |= {"intermediate_size": 128} if kind != "GPT2" else {}
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**shape, bos_token_id=None, **KINDS[kind])
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0, 0.15)
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    return model


@pytest.fixture
def rows():
    """Four rows on one prompt, one of them without completion, and two alone."""
    ids = torch.randint(3, VOCAB, (6, P + T), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    ids[:4, :P] = ids[0, :P]
    mask[4, :3], mask[5, :7] = 0, 0
    for i, t in enumerate((12, 3, 0, 7, 5, 9)):
        mask[i, P + t :] = 0
    return ids, mask, T


@pytest.fixture
def method():
    """TRL's log-prob method, without a trainer."""
    trainer = SimpleNamespace(accelerator=SimpleNamespace(autocast=nullcontext))
    return MethodType(inspect.unwrap(GRPOTrainer._get_per_token_logps_and_entropies), trainer)


def trained(score, model, rows):
    """(log-probs, entropies, gradient of a fixed combination of both)."""
    model.zero_grad()
    with positions_passed(model):  # rows of a model with learned positions want them, too
        logps, entropies, _ = score(model, *rows, compute_entropy=True)
    weights = torch.randn(2, 6, T, generator=torch.Generator().manual_seed(1))
    (weights[0] * logps + weights[1] * entropies).sum().backward()
    grads = [parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None]
    return logps.detach(), entropies.detach(), torch.cat(grads)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", KINDS)
def test_trees_give_what_rows_give(kind, attention, rows, method):
    model = built(kind, attention)
    _trl.serve_trees()

    def by_trees(*args, **kwargs):
        return score_as_trees(method, *args, attention=attention, dtype=torch.float32, **kwargs)

    plain, shared = trained(method, model, rows), trained(by_trees, model, rows)
    for mine, theirs in zip(shared[:2], plain[:2], strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=0)
    assert float((shared[2] - plain[2]).norm() / plain[2].norm()) <= 1e-5
    with _trl.labelled_positions_only():
        labelled = trained(method, model, rows)
    torch.testing.assert_close(labelled[0], plain[0], atol=1e-6, rtol=0)
    assert float((labelled[2] - plain[2]).norm() / plain[2].norm()) <= 1e-6


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="transformers compiles flex attention, which takes a C++ compiler")
def test_a_block_mask_through_flex_attention(rows, method):
    """Forward only: on a CPU flex attention has no backward."""
    model = built("Qwen2", "sdpa")
    with torch.no_grad():
        plain = method(model, *rows)[0]
        model.set_attn_implementation("flex_attention")
        shared = score_as_trees(method, model, *rows, attention="flex_attention", dtype=torch.float32)[0]
    torch.testing.assert_close(shared, plain, atol=1e-5, rtol=0)
