"""Tiny models, a character tokenizer, sums as prompts: what tests train on. No hub, built in milliseconds."""

from pathlib import Path
from typing import Any

import torch

from recipes.arithmetic_task import CHARACTERS, build_tokenizer

_COMMON = dict(
    vocab_size=len(CHARACTERS),
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=2,  # head size 32: vLLM's CPU attention wants a multiple of it
    num_key_value_heads=1,
    max_position_embeddings=256,
    tie_word_embeddings=True,
    eos_token_id=1,
    pad_token_id=0,
    bos_token_id=None,
)
_EXPERTS = dict(
    head_dim=32, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, norm_topk_prob=True, decoder_sparse_step=1,
    mlp_only_layers=[],
)  # fmt: skip


def build_model(path: Path, kind: str = "qwen2", dtype: str = "float32", seed: int = 0, **config: Any) -> Path:
    """Save a random model of about 80k parameters, spread enough to make its choices differ, with its tokenizer."""
    import transformers

    classes = {
        "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM, {}),
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM, {}),
        "qwen3_moe": (transformers.Qwen3MoeConfig, transformers.Qwen3MoeForCausalLM, _EXPERTS),
        "gpt_neox": (transformers.GPTNeoXConfig, transformers.GPTNeoXForCausalLM, {}),
    }
    config_class, model_class, extra = classes[kind]
    torch.manual_seed(seed)
    model = model_class(config_class(**{**_COMMON, **extra, **config}))
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0, 0.1)
        elif parameter.dim() == 1 and parameter.numel() and float(parameter.detach().abs().sum()) == 0:
            parameter.data.normal_(0, 0.02)  # biases at 0 would hide a bias that is not pushed
    model.to(getattr(torch, dtype)).save_pretrained(path)
    build_tokenizer().save_pretrained(path)
    return path


def sums(n: int = 64) -> Any:
    from datasets import Dataset

    return Dataset.from_dict({"prompt": [f"{i}+{i + 1}=" for i in range(n)]})


def distinct_characters(completions: list[str], **kwargs: Any) -> list[float]:
    """A reward that always differs within a group."""
    return [float(len(set(text))) for text in completions]


def config_kwargs(output_dir: Any, **overrides: Any) -> dict[str, Any]:
    """Arguments for a GRPOConfig that trains a tiny model on CPU in float32, one line logged per step."""
    return {
        **dict(
            output_dir=str(output_dir),
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            per_device_train_batch_size=8,
            num_generations=4,
            max_completion_length=12,
            learning_rate=1e-2,
            lr_scheduler_type="constant",
            max_steps=3,
            logging_steps=1,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
        ),
        **overrides,
    }
