"""What a forward costs, as rows and as a line of trees, in multiply-adds; the cheaper one is taken. Pure.

    cost = token * tokens + pair * pairs + label * labels + call * calls

    rows, B of them, w wide     tokens B w             pairs B w^2                                      calls 1
    trees, branch by branch     tokens trunk + sum t   pairs trunk^2 / 2 + sum t (trunk + t)            calls branches + trunks
    trees, dense mask           tokens N               pairs N^2                                        calls 1

Labels, the positions that the head projects, are the same in all of them. A backward costs about twice a forward whichever way,
so it drops out. Branch by branch nothing grows with the number of branches on a trunk but the branches themselves, so every row
of a slice hangs on its own prompt's trunk; a dense mask is quadratic in the line, and rows win where it grows long.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from grpo_ext.batch.groups import Groups
from grpo_ext.batch.micro_batches import Chunks
from grpo_ext.batch.padding import Lengths

# Attention runs at about two thirds of a matrix product's speed (one CPU core, float32: 30 to 35 against 47 G multiply-adds a
# second), and one more attention call takes about 40 us with its slices and its autograd nodes, 2 M multiply-adds of that core.
ATTENTION = 1.5
CALL = 2e6


@dataclass(frozen=True)
class Costs:
    """Multiply-adds: token, of one token in all layers; pair, of one (query, key) pair; label, of one position of the head; call, of
    one attention call. dense: whether trees take a dense mask (eager attention) or go branch by branch."""

    token: float
    pair: float
    label: float
    call: float
    dense: bool = False

    @classmethod
    def of(cls, config: Any, dense: bool = False) -> "Costs":
        """From a text model's `PreTrainedConfig`, whose layers may differ. A mixture of experts counts the experts that a token
        takes."""
        layers = getattr(config, "per_layer_config", [config] * config.num_hidden_layers)
        tokens, widths = zip(*(_of_layer(layer, number) for number, layer in enumerate(layers)), strict=True)
        return cls(
            token=sum(tokens),
            pair=ATTENTION * 2 * sum(widths),
            label=config.hidden_size * config.vocab_size,
            call=len(tokens) * CALL,
            dense=dense,
        )

    def rows(self, lengths: Lengths, chunks: Chunks | None = None) -> float:
        """Of rows as they are padded within each chunk (one chunk of all of them by default)."""
        prompt, completion = lengths.prompt.tolist(), lengths.completion.tolist()
        total = self.label * sum(completion)
        for chunk in _real(chunks, len(prompt)):
            width = max(prompt[i] for i in chunk) + max(completion[i] for i in chunk)
            total += len(chunk) * (self.token * width + self.pair * width**2) + self.call
        return total

    def trees(self, groups: Groups, lengths: Lengths, chunks: Chunks | None = None) -> float:
        """Of the same rows, each chunk a line of trees."""
        prompt, completion = lengths.prompt.tolist(), lengths.completion.tolist()
        total = self.label * sum(completion)
        for chunk in _real(chunks, len(prompt)):
            members, line, pairs, calls = set(chunk), 0, 0.0, 0
            for group in groups:
                branches = [completion[i] for i in group if i in members and completion[i]]
                if branches:
                    trunk = prompt[group[0]] - 1
                    line += trunk + sum(branches)
                    pairs += trunk**2 / 2 + sum(t * (trunk + t) for t in branches)
                    calls += len(branches) + (trunk > 0 and len(branches) > 1)
            pairs, calls = (float(line**2), 1) if self.dense else (pairs, calls)
            total += self.token * line + self.pair * pairs + self.call * calls
        return total


def _of_layer(config: Any, number: int) -> tuple[int, int]:
    """(multiply-adds of a token, width of all query heads) of one layer."""
    hidden, heads = config.hidden_size, config.num_attention_heads
    per_head = getattr(config, "head_dim", None) or hidden // heads
    key_heads = getattr(config, "num_key_value_heads", None) or heads
    experts = getattr(config, "num_experts_per_tok", None) or 1
    inner = (experts > 1 and getattr(config, "moe_intermediate_size", None)) or getattr(config, "intermediate_size", None)
    inner = inner[number] if isinstance(inner, list) else inner or 4 * hidden
    return 2 * hidden * per_head * (heads + key_heads) + 3 * hidden * experts * inner, heads * per_head


def _real(chunks: Chunks | None, n_rows: int) -> Sequence[Sequence[int]]:
    return [range(n_rows)] if chunks is None else chunks.real
