"""The task of the demo: sums of two numbers below 30, a character tokenizer, a decoder of 0.9M parameters, and its first lessons.

Nothing here knows GRPO: a fresh model is taught by a short supervised phase until it gets *some* sums right.
"""

import random
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

CHARACTERS = ["<pad>", "<eos>", "<unk>", *(chr(code) for code in range(32, 127))]
LIMIT = 30
HELD_OUT = 150


def sums(seed: int = 0) -> tuple[list[dict], list[dict]]:
    """All sums a + b with a, b < 30 as {"prompt", "answer"}, shuffled: (for training, 150 held out)."""
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(LIMIT) for b in range(LIMIT)]
    random.Random(seed).shuffle(rows)
    return rows[HELD_OUT:], rows[:HELD_OUT]


def build_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.WordLevel({c: i for i, c in enumerate(CHARACTERS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def build_model() -> Qwen2ForCausalLM:
    config = Qwen2Config(
        vocab_size=len(CHARACTERS),
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,  # head size 32: vLLM's CPU attention wants a multiple of it
        num_key_value_heads=4,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    return Qwen2ForCausalLM(config)


def warm_up(directory: Path, steps: int = 220, batch_size: int = 128, seed: int = 0) -> None:
    """Teach a fresh model by `steps` supervised steps and save it, with its tokenizer, in `directory`."""
    torch.manual_seed(seed)
    model, tokenizer = build_model(), build_tokenizer()
    train, _ = sums()
    chooser = random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 20))
    model.train()
    for _ in range(steps):
        batch = chooser.sample(train, batch_size)
        ids, labels = _collate(tokenizer, batch)
        loss = model(input_ids=ids, attention_mask=(ids != 0).long(), labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def _collate(tokenizer: PreTrainedTokenizerFast, batch: list[dict]) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids, labels), both (B, T), padded on the right; only the answer and its end are learned."""
    rows = [(tokenizer(r["prompt"]).input_ids, [*tokenizer(r["answer"]).input_ids, 1]) for r in batch]
    width = max(len(p) + len(a) for p, a in rows)
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    labels = torch.full_like(ids, -100)
    for i, (prompt, answer) in enumerate(rows):
        ids[i, : len(prompt) + len(answer)] = torch.tensor(prompt + answer)
        labels[i, len(prompt) : len(prompt) + len(answer)] = torch.tensor(answer)
    return ids, labels


@torch.no_grad()
def accuracy(directory: Path) -> float:
    """Share of the held-out sums that the model saved in `directory` answers exactly, decoding greedily."""
    from safetensors.torch import load_file

    # Built by hand: with ZeRO-3 active in this process, from_pretrained would partition the model over all ranks.
    model = Qwen2ForCausalLM(AutoConfig.from_pretrained(directory))
    model.load_state_dict(load_file(Path(directory) / "model.safetensors"), strict=False)
    model.tie_weights()
    model.eval()
    tokenizer = build_tokenizer()
    _, held_out = sums()
    right = 0
    for length in {len(r["prompt"]) for r in held_out}:  # equal lengths need no padding
        rows = [r for r in held_out if len(r["prompt"]) == length]
        ids = torch.tensor([tokenizer(r["prompt"]).input_ids for r in rows])
        for _ in range(4):
            ids = torch.cat([ids, model(input_ids=ids).logits[:, -1:].argmax(-1)], dim=1)
        answers = tokenizer.batch_decode(ids[:, length:])
        right += sum(a.split("<eos>")[0] == r["answer"] for a, r in zip(answers, rows, strict=True))
    return right / len(held_out)


def exact_match(completions: list[str], answer: list[str], **kwargs) -> list[float]:
    """1 for the right sum and nothing else, 0 otherwise."""
    return [float(c.strip() == a) for c, a in zip(completions, answer, strict=True)]
