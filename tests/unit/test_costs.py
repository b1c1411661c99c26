"""The cost model: its terms on small numbers, and which way it decides."""

from types import SimpleNamespace

import torch
import transformers

from grpo_ext.batch.costs import ATTENTION, CALL, Costs
from grpo_ext.batch.micro_batches import Chunks
from grpo_ext.batch.padding import Lengths

UNIT = dict(token=0.0, pair=0.0, label=0.0, call=0.0)


def lengths(prompts, completions):
    return Lengths(torch.tensor(prompts), torch.tensor(completions))


def both(costs, groups, held, chunks=None):
    return costs.rows(held, chunks), costs.trees(groups, held, chunks)


def test_each_term():
    """Two rows on a prompt of 5 with 2 and 3 tokens, and a row alone on a prompt of 3 with 4: rows are 9 wide."""
    held, groups = lengths([5, 5, 3], [2, 3, 4]), [[0, 1], [2]]
    assert both(Costs(**{**UNIT, "token": 1}), groups, held) == (3 * 9, (4 + 2 + 3) + (2 + 4))
    assert both(Costs(**{**UNIT, "label": 1}), groups, held) == (9, 9)
    pairs = (4**2 / 2 + 2 * (4 + 2) + 3 * (4 + 3)) + (2**2 / 2 + 4 * (2 + 4))
    assert both(Costs(**{**UNIT, "pair": 1}), groups, held) == (3 * 9**2, pairs)
    assert both(Costs(**{**UNIT, "pair": 1}, dense=True), groups, held) == (3 * 9**2, 15**2)
    assert both(Costs(**{**UNIT, "call": 1}), groups, held) == (1, 3 + 1)
    assert both(Costs(**{**UNIT, "call": 1}, dense=True), groups, held) == (1, 1)


def test_chunks_are_padded_apart_and_carry_the_trunk_each():
    held, groups, chunks = lengths([5, 5, 5], [1, 9, 2]), [[0, 1, 2]], Chunks(((0, 2), (1,), (0,)), idle=1)
    assert both(Costs(**{**UNIT, "token": 1}), groups, held, chunks) == (2 * 7 + 14, (4 + 1 + 2) + (4 + 9))


def test_rows_without_completion_cost_nothing_as_trees():
    held = lengths([5, 7], [3, 0])
    assert Costs(**{**UNIT, "token": 1}).trees([[0], [1]], held) == 4 + 3


def test_constants_come_from_the_config():
    config = SimpleNamespace(
        num_hidden_layers=2, hidden_size=8, num_attention_heads=4, num_key_value_heads=2, intermediate_size=16, vocab_size=100
    )
    costs = Costs.of(config)
    assert costs.token == 2 * (8 * 8 * 2 + 8 * 4 * 2 + 3 * 8 * 16)
    assert costs.pair == 2 * ATTENTION * (8 + 8)
    assert (costs.label, costs.call) == (800, 2 * CALL)
    experts = SimpleNamespace(**vars(config), head_dim=4, num_experts_per_tok=2, moe_intermediate_size=6)
    assert Costs.of(experts).token == 2 * (2 * 8 * 4 * (4 + 2) + 3 * 8 * 2 * 6)


def test_layers_of_different_widths():
    """Gemma 4's last layer is full attention with heads of their own width; Gemma 3n lists a feed-forward for each layer."""
    shape = dict(num_hidden_layers=2, hidden_size=8, num_attention_heads=2, num_key_value_heads=1, vocab_size=10)
    heads = dict(layer_types=["sliding_attention", "full_attention"], head_dim=4, global_head_dim=6, intermediate_size=16)
    costs = Costs.of(transformers.Gemma4TextConfig(**shape, **heads))
    assert costs.token == 2 * 8 * (4 + 6) * (2 + 1) + 2 * 3 * 8 * 16
    assert costs.pair == ATTENTION * 2 * (2 * 4 + 2 * 6)
    listed = dict(layer_types=["full_attention"] * 2, head_dim=4, intermediate_size=[16, 32], num_kv_shared_layers=0)
    assert Costs.of(transformers.Gemma3nTextConfig(**shape, **listed)).token == 2 * 2 * 8 * 4 * (2 + 1) + 3 * 8 * (16 + 32)


QWEN_LIKE = Costs.of(
    SimpleNamespace(num_hidden_layers=6, hidden_size=256, num_attention_heads=4, intermediate_size=1024, vocab_size=4096)
)


def test_a_long_shared_prompt_makes_trees():
    rows, trees = both(QWEN_LIKE, [list(range(8))], lengths([512] * 8, [20, 30, 40, 55, 60, 80, 120, 256]))
    assert trees < 0.3 * rows


def test_rows_of_one_length_that_share_nothing_stay_rows():
    rows, trees = both(QWEN_LIKE, [[i] for i in range(8)], lengths([8] * 8, [64] * 8))
    assert rows < trees


def test_a_dense_mask_loses_where_the_line_grows_long():
    eager = Costs(**{**vars(QWEN_LIKE), "dense": True})
    groups = [[2 * i, 2 * i + 1] for i in range(32)]
    rows, trees = both(eager, groups, lengths([256] * 64, [512] * 64))
    assert trees > rows
    rows, trees = both(QWEN_LIKE, groups, lengths([256] * 64, [512] * 64))
    assert trees < rows
