import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grpo_ext.batch.padding import (
    Lengths,
    length_order,
    lengths_of,
    order_by_length,
    position_ids,
    row_lengths,
    token_counts,
    trim,
)
from grpo_ext.batch.rollouts import rearrange
from tests.unit.rows import cut, make_rows


def test_a_slice_is_cut_to_its_own_longest_prompt_and_completion():
    rows = make_rows([2, 1], [3, 1], P=5, T=8)
    rows |= {"token_type_ids": torch.arange(13).repeat(2, 1), "advantages": torch.arange(8.0).repeat(2, 1)}
    cut_rows = trim(rows)
    assert cut_rows["prompt_ids"].tolist() == [[1, 2], [0, 1001]]
    assert cut_rows["completion_ids"].tolist() == [[501, 502, 503], [1501, 0, 0]]
    assert cut_rows["token_type_ids"][0].tolist() == [3, 4, 5, 6, 7]  # columns 3, 4 of the prompt and 5, 6, 7 of the completion
    assert cut_rows["advantages"].shape == (2, 3)
    assert cut_rows["row_id"].tolist() == [0, 1]


def test_a_blanked_row_holds_no_width_and_loses_no_row():
    rows = make_rows([1, 1], [6, 2])
    rows["completion_mask"][0] = 0  # mask_truncated_completions: the ids stay, the mask goes
    assert row_lengths(rows).completion.tolist() == [0, 2]
    assert trim(rows)["completion_ids"].tolist() == [[501, 502], [1501, 1502]]


def test_a_slice_of_blanked_rows_keeps_one_column():
    rows = make_rows([1, 1], [6, 2])
    rows["completion_mask"][:] = 0
    assert trim(rows)["completion_ids"].shape == (2, 1)


@pytest.mark.parametrize(("multiple", "widths"), [(None, (2, 3)), (4, (4, 4)), (16, (5, 8))])
def test_pad_to_multiple_of_is_kept_up(multiple, widths):
    rows = trim(make_rows([2, 1], [3, 1], P=5, T=8), multiple)
    assert (rows["prompt_ids"].size(1), rows["completion_ids"].size(1)) == widths


def test_lengths_reach_to_the_outermost_token_whatever_holes_a_mask_has():
    prompt, completion = torch.tensor([[0, 1, 0, 1]]), torch.tensor([[1, 0, 1, 0]])
    lengths = lengths_of(prompt, completion)
    assert (lengths.prompt.tolist(), lengths.completion.tolist()) == ([3], [3])


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=6), st.sampled_from([None, 2, 8]))
def test_trimming_keeps_every_token_and_drops_only_empty_columns(lengths, multiple):
    rows = make_rows([p for p, _ in lengths], [t for _, t in lengths], P=12, T=12)
    cut_rows = trim(rows, multiple)
    for ids, mask in (("prompt_ids", "prompt_mask"), ("completion_ids", "completion_mask")):
        before, after = rows[ids][rows[mask].bool()], cut_rows[ids][cut_rows[mask].bool()]
        assert torch.equal(before, after)
    assert torch.equal(trim(cut_rows, multiple)["prompt_ids"], cut_rows["prompt_ids"])
    if multiple is None:
        assert cut_rows["prompt_ids"].size(1) == max(max(p for p, _ in lengths), 1)
        assert cut_rows["completion_ids"].size(1) == max(max(t for _, t in lengths), 1)


def test_positions_count_from_the_first_real_token():
    mask = torch.tensor([[0, 0, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1]])
    assert position_ids(mask).tolist() == [[0, 0, 0, 1, 2, 0], [0, 1, 2, 3, 4, 5]]


@given(st.lists(st.tuples(st.integers(1, 30), st.integers(0, 30)), min_size=8, max_size=8))
def test_grouping_never_processes_more_than_the_order_it_found_by_completion_length(lengths):
    prompt, completion = torch.tensor([p for p, _ in lengths]), torch.tensor([t for _, t in lengths])
    order = length_order(Lengths(prompt, completion), [2] * 4)
    assert sorted(order) == list(range(8))

    def processed(order):
        return sum(2 * int(prompt[order[i : i + 2]].max() + completion[order[i : i + 2]].max()) for i in range(0, 8, 2))

    assert processed(order) <= processed(completion.argsort(stable=True).tolist())


def test_equal_lengths_stay_where_they_are():
    assert length_order(Lengths(torch.full((6,), 4), torch.full((6,), 9)), [3, 3]) == list(range(6))


def test_share_of_real_tokens_on_a_long_tail():
    """64 rows, lognormal with median 55, at most 256, in slices of 8: padded 0.30, trimmed 0.44, grouped 0.84 real tokens."""
    random.seed(0)
    completions = [min(256, max(1, round(random.lognormvariate(4.0, 0.9)))) for _ in range(64)]
    slices = cut(make_rows([8] * 64, completions), 8)
    padded, trimmed = token_counts(slices), token_counts([trim(rows) for rows in slices])
    grouped = token_counts([trim(rows) for rows in rearrange(slices, [list(range(8))], order_by_length)])
    share = [real / processed for real, processed in (padded, trimmed, grouped)]
    assert share[0] < 0.4 < share[1] < 0.7 and share[2] > 0.84
    assert padded[0] == trimmed[0] == grouped[0]
