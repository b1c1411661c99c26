import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grpo_ext.batch.micro_batches import Chunks, cut, in_lockstep, padded_tokens, put_back
from grpo_ext.batch.padding import Lengths


def lengths(prompt, completion):
    return Lengths(torch.tensor(prompt), torch.tensor(completion))


def total(found, chunks):
    return sum(padded_tokens(found, chunk) for chunk in chunks.rows)


def test_one_long_row_among_short_ones():
    """[1000, 10 x 7] in micro-batches of 2 is 3 * 2 * 10 + 2 * 1000 = 2060 padded tokens, not 8 * 1000."""
    found = lengths([0] * 8, [1000, *[10] * 7])
    chunks = cut(found, max_rows=2)
    assert total(found, chunks) == 2060
    assert len(chunks) == 4


def test_two_ranks_make_the_same_number_of_forwards():
    """A budget of 1,024 tokens. [10, 10, 10, 1000] wants two forwards, [10] * 4 one."""
    uneven, even = lengths([0] * 4, [1000, 10, 10, 10]), lengths([0] * 4, [10] * 4)
    first, second = cut(uneven, max_tokens=1024), cut(even, max_tokens=1024)
    assert first.rows == ((1, 2, 3), (0,))
    assert second.rows == ((0, 1, 2, 3),)
    agreed = max(len(first), len(second))
    assert len(in_lockstep(first, agreed)) == len(in_lockstep(second, agreed)) == 2
    assert in_lockstep(second, agreed).rows[-1] == (0,)
    assert in_lockstep(second, agreed).real == second.rows


def test_a_row_over_the_budget_runs_alone_and_is_counted():
    chunks = cut(lengths([10, 10, 10], [10, 50, 200]), max_tokens=100)
    assert chunks.rows == ((0,), (1,), (2,)) and chunks.alone == 1


@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 60)), min_size=1, max_size=20),
    st.none() | st.integers(1, 6),
    st.none() | st.integers(1, 200),
)
def test_every_row_once_and_the_budget_is_hard(rows, max_rows, max_tokens):
    found = lengths([p for p, _ in rows], [t for _, t in rows])
    chunks = cut(found, max_rows, max_tokens)
    assert sorted(i for chunk in chunks.rows for i in chunk) == list(range(len(rows)))
    alone = 0
    for chunk in chunks.rows:
        assert max_rows is None or len(chunk) <= max_rows
        over = max_tokens is not None and padded_tokens(found, chunk) > max_tokens
        assert not over or len(chunk) == 1
        alone += over
    assert chunks.alone == alone
    if max_rows is None and max_tokens is None:
        assert len(chunks) == 1


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9)), min_size=1, max_size=12),
    st.integers(1, 4),
    st.integers(0, 3),
)
def test_rows_go_back_to_their_order_exactly(rows, max_rows, idle):
    found = lengths([p for p, _ in rows], [t for _, t in rows])
    width = max(max(t for _, t in rows), 1)
    values = torch.randn(len(rows), width)
    for i, (_, t) in enumerate(rows):
        values[i, t:] = 0
    chunks = cut(found, max_rows)
    chunks = in_lockstep(chunks, len(chunks) + idle)
    parts = [values[list(chunk), : max(max(rows[i][1] for i in chunk), 1)] for chunk in chunks.real]
    assert torch.equal(put_back(parts, chunks, len(rows), width), values)


@pytest.mark.parametrize("arguments", [{"max_rows": 0}, {"max_rows": -1}, {"max_tokens": 0}])
def test_a_size_of_nothing_is_refused(arguments):
    with pytest.raises(ValueError, match=r"0|-1"):
        cut(lengths([1], [1]), **arguments)


def test_fewer_forwards_than_needed_cannot_be_agreed_on():
    with pytest.raises(ValueError, match="Agree on the maximum"):
        in_lockstep(Chunks(((0,), (1,))), 1)
