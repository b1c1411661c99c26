"""Rows to trees and back: every token where it belongs, whoever shares a prompt with whom, and one rule of who sees whom."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_ext.batch.branch_attention import branch_attention
from grpo_ext.batch.groups import Inputs, cut_groups, group_order, line_tokens
from grpo_ext.batch.padding import lengths_of
from grpo_ext.batch.trees import IGNORED, Tree, lay_out

# Rows as (prompt, completion) of token ids; few ids and short prompts, so that equal prompts are common.
ROWS = st.lists(
    st.tuples(st.lists(st.integers(1, 3), min_size=1, max_size=4), st.lists(st.integers(4, 99), max_size=5)),
    min_size=1,
    max_size=6,
)


def padded(rows, spare=0):
    """Rows as a pass gets them, with `spare` more columns of padding on either side."""
    P = max(len(prompt) for prompt, _ in rows) + spare
    T = max(max(len(completion) for _, completion in rows), 1) + spare
    ids, mask = torch.zeros(len(rows), P + T, dtype=torch.long), torch.zeros(len(rows), P + T, dtype=torch.long)
    for i, (prompt, completion) in enumerate(rows):
        ids[i, P - len(prompt) : P + len(completion)] = torch.tensor([*prompt, *completion])
        mask[i, P - len(prompt) : P + len(completion)] = 1
    return Inputs(ids, mask, T)


def laid_out(rows, spare=0):
    return lay_out(padded(rows, spare))


def test_the_drawing_of_the_docstring():
    layout = laid_out([([1, 2, 3], [10, 11, 12]), ([1, 2, 3], [20, 21])])
    assert layout.trees == (Tree(0, 2, (3, 2)),)
    assert layout.input_ids.tolist() == [1, 2, 3, 10, 11, 3, 20]
    assert layout.position_ids.tolist() == [0, 1, 2, 3, 4, 2, 3]
    assert layout.labels.tolist() == [IGNORED, IGNORED, 10, 11, 12, 20, 21]
    assert layout.dense_mask()[0, 0].int().tolist() == [
        [1, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0, 0],
        [1, 1, 1, 1, 0, 0, 0],
        [1, 1, 1, 1, 1, 0, 0],
        [1, 1, 0, 0, 0, 1, 0],
        [1, 1, 0, 0, 0, 1, 1],
    ]


def fake_logps(visible_ids, visible_positions, label):
    """What a causal model gives, as far as a layout is concerned: any function of the tokens seen, their places, the label."""
    total = sum(token * (place + 1) ** 2 for token, place in zip(visible_ids, visible_positions, strict=True))
    return float(total % 9973) + label / 1000


@settings(deadline=None)
@given(ROWS, st.integers(0, 3))
def test_every_log_prob_comes_back_where_it_belongs(rows, spare):
    layout = laid_out(rows, spare)
    mask = layout.dense_mask()[0, 0]
    values = torch.zeros(len(layout), dtype=torch.float64)
    for n, label in enumerate(layout.labels.tolist()):
        seen = mask[n].nonzero()[:, 0]
        values[n] = fake_logps(layout.input_ids[seen].tolist(), layout.position_ids[seen].tolist(), label)
    found = layout.back(values)
    expected = torch.zeros_like(found)
    for i, (prompt, completion) in enumerate(rows):
        for t, label in enumerate(completion):
            seen = [*prompt, *completion[:t]]
            expected[i, t] = fake_logps(seen, range(len(seen)), label)
    assert torch.equal(found, expected)
    assert int((layout.labels != IGNORED).sum()) == sum(len(completion) for _, completion in rows)


@settings(deadline=None)
@given(ROWS)
def test_a_prompt_stands_once_for_all_rows_that_share_it(rows):
    layout = laid_out(rows)
    with_tokens = [(tuple(prompt), completion) for prompt, completion in rows if completion]
    trunks = sum(len(prompt) - 1 for prompt in {prompt for prompt, _ in with_tokens})
    assert len(layout) == max(
        trunks + sum(len(completion) for _, completion in with_tokens), 1 if with_tokens else len(rows[0][0])
    )
    assert layout.trees[0].start == 0 and layout.trees[-1].stop == len(layout)


def test_no_completion_at_all_leaves_a_line_without_labels():
    layout = laid_out([([1, 2], []), ([1, 2], []), ([3], [])])
    assert len(layout) == 2 and (layout.labels == IGNORED).all()
    assert torch.equal(layout.back(torch.ones(2)), torch.zeros(3, 1))


def test_gradients_reach_the_labelled_tokens_only():
    layout = laid_out([([1, 2, 3], [10, 11]), ([7], []), ([1, 2, 3], [20])])
    values = torch.zeros(len(layout), requires_grad=True)
    (layout.back(values) * torch.tensor([[1.0, 2.0], [8.0, 8.0], [4.0, 8.0]])).sum().backward()
    assert values.grad.tolist() == [0, 0, 1, 2, 4]


def test_rows_that_do_not_fit():
    rows = padded([([1, 2], [5, 6]), ([3], [7])])
    assert rows.is_regular
    hole, empty = rows.mask.clone(), rows.mask.clone()
    hole[0, -2], empty[1, 1] = 0, 0
    assert not any(Inputs(rows.ids, bad, rows.T).is_regular for bad in (hole, empty))


# ---- the faces of the mask against each other --------------------------------------------------------------------------


def attend(q, k, v, mask):
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)


@settings(deadline=None, max_examples=50)
@given(ROWS, st.sampled_from([1, 2]))
def test_branch_by_branch_is_the_dense_mask(rows, repeats):
    layout = laid_out(rows)
    torch.manual_seed(0)
    q, *kv = [torch.randn(1, 2, len(layout), 8, requires_grad=True) for _ in range(3)]
    k, v = (each[:, : 2 // repeats] for each in kv)
    wide = [each.repeat_interleave(repeats, dim=1) for each in (k, v)]
    weights = torch.randn(1, 2, len(layout), 8)
    found = branch_attention(q, k, v, layout)
    expected = attend(q, *wide, layout.dense_mask())
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    for mine, theirs in zip(*(torch.autograd.grad((out * weights).sum(), (q, *kv)) for out in (found, expected)), strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)


@settings(deadline=None)
@given(ROWS)
def test_the_additive_mask_is_the_dense_one(rows):
    layout = laid_out(rows)
    additive = layout.additive_mask(torch.float32)
    assert torch.equal(additive == 0, layout.dense_mask())
    assert (additive[~layout.dense_mask()] == torch.finfo(torch.float32).min).all()


@pytest.mark.filterwarnings("ignore::UserWarning")
@settings(deadline=None, max_examples=15)
@given(ROWS)
def test_the_block_mask_is_the_dense_one(rows):
    from torch.nn.attention.flex_attention import flex_attention

    layout = laid_out(rows)
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, len(layout), 16) for _ in range(3))
    found = flex_attention(q, k, v, block_mask=layout.block_mask())
    torch.testing.assert_close(found, attend(q, k, v, layout.dense_mask()), atol=1e-5, rtol=1e-5)


def test_the_block_mask_skips_what_nobody_sees():
    """Two trees of a trunk of 256 and two branches of 256: blocks of 128, 12 x 12 of them, of which few hold a visible pair."""
    rows = [([1] * 257, [5] * 256), ([1] * 257, [6] * 256), ([2] * 257, [5] * 256), ([2] * 257, [6] * 256)]
    blocks = laid_out(rows).block_mask().to_dense()[0, 0]
    trunk, branch = (
        3,
        2 * 2 + 3,
    )  # of a tree: 2 x 2 blocks of trunk, lower half; a branch's 2 x 2 against the trunk, and its own
    assert int(blocks.sum()) == 2 * (trunk + 2 * branch)


# ---- which rows share a line -------------------------------------------------------------------------------------------


def test_equal_prompts_are_found_anywhere():
    rows = padded([([1, 2], [9]), ([2], [9]), ([1, 2], []), ([2], [8]), ([2, 1], [9])], spare=1)
    assert rows.groups == [[0, 2], [1, 3], [4]]


@settings(deadline=None)
@given(ROWS)
def test_tokens_of_a_line_are_counted_without_laying_it_out(rows):
    held = padded(rows)
    distinct, processed = line_tokens(held.groups, held.lengths)
    if any(completion for _, completion in rows):
        assert processed == len(lay_out(held))
    seen = {(*prompt, *completion[:t]) for prompt, completion in rows for t in range(len(completion))}
    paths = {path[: n + 1] for path in seen for n in range(len(path))}
    assert len(paths) <= distinct <= processed  # completions that begin alike are not shared


def test_few_rows_for_a_first_look():
    rows = padded([([1], [9]), ([2, 3], []), ([2, 3], [5, 6, 7]), ([2, 3], [5, 6]), ([2, 3], [4])], spare=2)
    few = rows.few()
    assert few.ids.tolist() == [[0, 1, 9, 0, 0], [2, 3, 5, 6, 7], [2, 3, 4, 0, 0]] and few.T == 3
    assert few.mask.tolist() == [[0, 1, 1, 0, 0], [1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]
    assert padded([([1], []), ([2], [])]).few().ids.shape == (1, 2)


def test_lines_of_few_rows_keep_groups_together():
    lengths = lengths_of(torch.ones(6, 3), torch.ones(6, 2))
    assert cut_groups([[0, 3], [1, 4], [2, 5]], lengths, max_rows=3).rows == ((0, 3), (1, 4), (2, 5))
    assert cut_groups([[0, 3], [1, 4], [2, 5]], lengths, max_rows=4).rows == ((0, 1, 3, 4), (2, 5))
    assert cut_groups([[0, 1, 2, 3], [4, 5]], lengths, max_rows=3).rows == ((0, 1, 2), (3, 4, 5))
    assert cut_groups([[0, 1, 2, 3, 4, 5]], lengths).rows == ((0, 1, 2, 3, 4, 5),)


def test_a_token_budget_counts_trunks_and_branches():
    """Prompts of 5 (a trunk of 4), completions of 2: two rows take 8 tokens, three 10; the last row is 14 by itself."""
    mask = torch.zeros(6, 10)
    mask[:, :2] = 1
    mask[5] = 1
    lengths = lengths_of(torch.ones(6, 5), mask)
    cut = cut_groups([[0, 1, 2, 3], [4], [5]], lengths, max_tokens=10)
    assert cut.rows == ((0, 1, 2), (3,), (4,), (5,)) and cut.alone == 1


@settings(deadline=None)
@given(st.lists(st.integers(1, 6), min_size=1, max_size=8), st.integers(1, 5), st.none() | st.integers(1, 30))
def test_every_row_is_in_one_line(sizes, max_rows, max_tokens):
    numbers = iter(range(sum(sizes)))
    groups = [[next(numbers) for _ in range(size)] for size in sizes]
    lengths = lengths_of(torch.ones(sum(sizes), 4), torch.ones(sum(sizes), 3))
    cut = cut_groups(groups, lengths, max_rows, max_tokens)
    assert sorted(row for chunk in cut.rows for row in chunk) == list(range(sum(sizes)))
    assert all(0 < len(chunk) <= max_rows for chunk in cut.rows)


def test_groups_stay_whole_in_slices():
    assert group_order([[0, 4], [1, 5], [2, 6], [3, 7]], [4, 4]) == [0, 4, 1, 5, 2, 6, 3, 7]
    assert group_order([[0], [1, 2, 3], [4, 5], [6, 7]], [4, 4]) == [1, 2, 3, 0, 4, 5, 6, 7]
    assert group_order([[0, 1, 2, 3]], [2, 2]) == [0, 1, 2, 3]  # larger than a slice: as few as it takes
    assert sorted(group_order([[0, 1, 2], [3, 4, 5], [6, 7, 8]], [4, 5])) == list(range(9))
