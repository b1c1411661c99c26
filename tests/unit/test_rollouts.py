import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grpo_ext.batch.rollouts import deal, is_multimodal, join, loss_mask, rearrange, span, take
from tests.unit.rows import cut, make_rows


def test_every_key_is_known_for_what_it_spans():
    rows = make_rows([3, 1], [2, 4])
    rows |= {
        "tool_mask": torch.ones(2, 4),
        "token_type_ids": torch.zeros(2, 7),
        "importance_sampling_ratio": torch.ones(2, 1),
        "old_per_token_logps": torch.zeros(2, 4),
        "answer": ["a", "b"],
        "nothing": None,
    }
    spans = {key: span(key, value, rows) for key, value in rows.items()}
    assert spans == {
        "prompt_ids": "prompt",
        "prompt_mask": "prompt",
        "completion_ids": "completion",
        "completion_mask": "completion",
        "tool_mask": "completion",
        "sampling_per_token_logps": "completion",
        "old_per_token_logps": "completion",
        "token_type_ids": "both",
        "advantages": "row",
        "row_id": "row",
        "importance_sampling_ratio": "row",
        "answer": "row",
        "num_items_in_batch": "batch",
        "nothing": "batch",
    }


def test_prompt_keys_are_prompts_even_where_prompt_and_completion_are_equally_wide():
    rows = make_rows([3, 3], [3, 3])
    assert span("prompt_ids", rows["prompt_ids"], rows) == "prompt"


def test_take_moves_lists_and_tensors_alike():
    rows = make_rows([1, 2, 3], [1, 2, 3]) | {"answer": ["a", "b", "c"]}
    taken = take(rows, [2, 0])
    assert taken["answer"] == ["c", "a"]
    assert taken["row_id"].tolist() == [2, 0]
    assert int(taken["num_items_in_batch"]) == 6


@pytest.mark.parametrize("key", ["pixel_values", "image_grid_thw", "num_images", "num_tiles", "image_sizes"])
def test_images_are_seen(key):
    rows = make_rows([1], [1])
    assert not is_multimodal(rows)
    assert is_multimodal(rows | {key: torch.zeros(5)})
    assert not is_multimodal(rows | {key: None})


def test_tool_tokens_are_not_the_policys():
    rows = make_rows([1], [3]) | {"tool_mask": torch.tensor([[1, 0, 1]])}
    assert loss_mask(rows).tolist() == [[1, 0, 1]]


@given(st.data())
def test_dealing_in_any_order_loses_no_row(data):
    n, size = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4))
    lengths = st.lists(st.integers(0, 6), min_size=n * size, max_size=n * size)
    rows = make_rows(data.draw(lengths), data.draw(lengths)) | {"answer": [str(i) for i in range(n * size)]}
    order = data.draw(st.permutations(range(n * size)))
    dealt = deal(cut(rows, n), order)
    whole = join(dealt)
    assert whole["row_id"].tolist() == list(order)
    assert whole["answer"] == [str(i) for i in order]
    for key in ("prompt_ids", "completion_ids", "sampling_per_token_logps", "advantages"):
        assert torch.equal(whole[key], rows[key][list(order)])


def test_rows_leave_a_cell_never_and_a_slices_own_values_stay():
    rows = make_rows([1] * 8, [8, 7, 6, 5, 4, 3, 2, 1])
    slices = cut(rows, 4)
    for i, one in enumerate(slices):
        one["stays"] = torch.tensor(i)
    reversed_cell = rearrange(slices, [[0, 2], [1], [3]], lambda members: list(range(2 * len(members)))[::-1])
    assert [one["row_id"].tolist() for one in reversed_cell] == [[5, 4], [3, 2], [1, 0], [7, 6]]
    assert [int(one["stays"]) for one in reversed_cell] == [0, 1, 2, 3]
