"""Identical rollouts for two trainers: recorded completions and log-probs take the place of an engine.

`RecordedRollouts` is a `rollout_func` whose output depends on nothing but (seed, number of the call, rank). `recorded(Trainer)`
is that trainer with the engine replaced by one that only accepts weights, so that `use_vllm=True` switches TRL's importance
correction on as it would be with a real one. Both sides then see the same tokens, log-probs, rewards and shuffle, and all that
differs is how they train on them.
"""

import random
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from typing import Any

import torch

Lengths = Callable[[random.Random], int]


def lognormal(median: float = 55, sigma: float = 0.8, cap: int = 256) -> Lengths:
    """Long-tailed lengths, as completions of reasoning models have."""
    return lambda rng: max(1, min(cap, round(rng.lognormvariate(0, sigma) * median)))


def uniform(low: int, high: int) -> Lengths:
    return lambda rng: rng.randint(low, high)


def equal(length: int) -> Lengths:
    return lambda rng: length


class RecordedRollouts:
    """Rollouts for a tokenizer-free run: random tokens of given lengths, and log-probs near those of an untrained model.

    Args:
        vocab: token ids are drawn from [3, vocab).
        completion, prompt: lengths in tokens.
        noise: standard deviation in nats of the log-probs around log(1 / vocab).
        unscored: share of tokens for which the engine gave no log-prob (None).
        end: token id that ends a completion. truncated: share of completions without it.
        tools: whether some tokens of a completion are a tool's.
        by_rank: lengths of the completions of each rank, in turns, instead of `completion`.
    """

    def __init__(
        self,
        vocab: int,
        completion: Lengths,
        prompt: Lengths,
        seed: int = 0,
        noise: float = 0.1,
        unscored: float = 0.0,
        end: int = 1,
        truncated: float = 0.0,
        tools: bool = False,
        by_rank: Sequence[Sequence[int]] = (),
    ):
        self.vocab, self.completion, self.prompt, self.seed = vocab, completion, prompt, seed
        self.noise, self.unscored, self.end, self.truncated, self.tools = noise, unscored, end, truncated, tools
        self.by_rank = by_rank
        self.calls = {"train": 0, "eval": 0}

    def __call__(self, prompts: Sequence[Any], trainer: Any) -> dict[str, list]:
        mode = "train" if trainer.model.training else "eval"
        number, rank = self.calls[mode], trainer.accelerator.process_index
        self.calls[mode] += 1
        rng = random.Random(f"{self.seed}-{mode}-{number}-{rank}")
        group = trainer.num_generations if mode == "train" else trainer.num_generations_eval
        result: dict[str, list] = {"prompt_ids": [], "completion_ids": [], "logprobs": []}
        for row in range(len(prompts)):
            if row % group == 0:
                shared = self._tokens(rng, self.prompt(rng))
            lengths = self.by_rank[rank] if self.by_rank else ()
            ids = self._tokens(rng, lengths[row % len(lengths)] if lengths else self.completion(rng))
            if rng.random() >= self.truncated:
                ids[-1] = self.end
            result["prompt_ids"].append(list(shared))
            result["completion_ids"].append(ids)
            result["logprobs"].append([self._logprob(rng) for _ in ids])
        if self.tools:
            result["env_mask"] = [[int(rng.random() < 0.7) for _ in ids] for ids in result["completion_ids"]]
        return result

    def _tokens(self, rng: random.Random, n: int) -> list[int]:
        return [rng.randrange(3, self.vocab) for _ in range(n)]

    def _logprob(self, rng: random.Random) -> float | None:
        value = rng.gauss(float(-torch.tensor(float(self.vocab)).log()), self.noise)
        return None if rng.random() < self.unscored else min(value, 0.0)


def token_reward(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
    """A reward that differs within a group and depends on the tokens alone."""
    return [(sum(ids) % 17) / 17 + len(ids) % 3 for ids in completion_ids]


class RecordedEngine:
    """Takes weights and generates nothing: the rollouts come from `rollout_func`."""

    pushes = 0

    def __init__(self, **kwargs: Any):
        pass

    def sync_weights(self) -> None:
        self.pushes += 1


def recorded(trainer: type) -> type:
    """`trainer` with a recorded engine in the place of vLLM."""
    from grpo_ext import GRPOExtMixin, _trl

    class Recorded(trainer):  # type: ignore[misc,valid-type]
        def __init__(self, *args: Any, **kwargs: Any):
            with _trl.engine_injected(RecordedEngine):
                super().__init__(*args, **kwargs)

        if issubclass(trainer, GRPOExtMixin):

            def _build_engine(self, **kwargs: Any) -> Any:
                return RecordedEngine()

    Recorded.__name__ = trainer.__name__
    return Recorded


class ForwardCount:
    """Forwards of an actor by whether they carry gradient: {"grad" | "no_grad" | "reference": forwards, rows, tokens, real}."""

    def __init__(self) -> None:
        self.counts: dict[str, dict[str, int]] = {
            kind: dict.fromkeys(("forwards", "rows", "tokens", "real"), 0) for kind in ("grad", "no_grad", "reference")
        }

    @contextmanager
    def watching(self, trainer: Any) -> Any:
        from grpo_ext._trl import is_reference_pass

        model = trainer.model

        def count(module: Any, args: tuple, kwargs: dict[str, Any]) -> None:
            ids, mask, tree = kwargs["input_ids"], kwargs["attention_mask"], kwargs.get("tree_attention")
            off = module is not model or is_reference_pass(trainer.accelerator.unwrap_model(model))
            found = self.counts["reference" if off else "grad" if torch.is_grad_enabled() else "no_grad"]
            found["forwards"] += 1
            layout = tree and tree.keywords["layout"]
            found["rows"] += ids.size(0) if layout is None else layout.n_rows
            found["tokens"] += ids.numel()
            found["real"] += (
                int((mask > 0).sum()) if layout is None else ids.numel() - sum(len(each.branches) - 1 for each in layout.trees)
            )

        watched = [model] + ([trainer.accelerator.unwrap_model(trainer.ref_model)] if trainer.ref_model is not None else [])
        handles = [each.register_forward_pre_hook(count, with_kwargs=True) for each in watched]
        try:
            yield self
        finally:
            for handle in handles:
                handle.remove()


def plain_tokenizer(vocab: int) -> Any:
    """A tokenizer of `vocab` words, 0 to 2 being padding, end and unknown."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<eos>", "<unk>", *(f"w{i}" for i in range(3, vocab))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
