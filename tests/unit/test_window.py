import math

from hypothesis import given
from hypothesis import strategies as st

from grpo_ext.logprobs.window import (
    Loop,
    RowCounts,
    Use,
    cells,
    due,
    ends_window,
    epoch_start,
    portions,
    rows_now,
    too_old,
    updates_per_epoch,
    uses,
)


def updates(loop, epochs):
    """Micro-steps of a whole run that end in an optimizer step."""
    return [e * loop.epoch + p for e in range(epochs) for p in range(loop.epoch) if ends_window(p, loop)]


def test_updates_of_an_epoch_count_its_short_last_window():
    assert [updates_per_epoch(epoch, 4) for epoch in (1, 4, 5, 8)] == [1, 1, 2, 2]


def test_windows_across_an_epochs_end():
    """Accumulation 4, 3 slices, 6 micro-steps an epoch, 2 epochs."""
    loop = Loop(accumulation=4, slices=3, epoch=6)
    assert updates(loop, 2) == [3, 5, 9, 11]
    starts = [0, 3, 6, 9]
    inside = [any(start <= update < start + 2 for update in updates(loop, 2)) for start in starts]
    assert inside == [False, True, False, True]
    windows = [[use.window for use in uses(loop, start % 6)] for start in starts]
    assert windows == [[0, 0, 0], [0, 1, 1], [0, 0, 0], [0, 1, 1]]


def test_half_of_the_rows_are_due_where_a_batch_spans_two_windows():
    """Accumulation 4, 8 slices: 0 to 3 are free, 4 to 7 are due before the first step."""
    assert due(uses(Loop(4, 8, epoch=80), 0), set(), steps_left=20) == [4, 5, 6, 7]


def test_nothing_is_due_where_every_slice_is_used_before_the_first_step():
    assert due(uses(Loop(8, 8, epoch=80), 0), set(), steps_left=10) == []
    assert due(uses(Loop(4, 4, 2, epoch=80), 0), set(), steps_left=10) == []  # later iterations keep the first one's
    assert due(uses(Loop(2, 1, 2, epoch=80), 0), set(), steps_left=10) == []  # case 3


def test_case_3_slices_2_and_3_are_due():
    assert due(uses(Loop(2, 4, epoch=8), 0), set(), steps_left=4) == [2, 3]


def test_nothing_is_due_at_the_last_update_of_the_run():
    left = uses(Loop(4, 8, epoch=80), 3, first_use=3)
    assert due(left, {0, 1, 2, 3}, steps_left=2) == [4, 5, 6, 7]
    assert due(left, {0, 1, 2, 3}, steps_left=1) == []


def test_slices_whose_turn_comes_after_the_last_update_are_not_due():
    left = uses(Loop(2, 6, epoch=60), 1, first_use=1)
    assert due(left, {0, 1}, steps_left=2) == [2, 3]
    assert due(left, {0, 1}, steps_left=3) == [2, 3, 4, 5]


def test_a_slice_that_its_age_would_re_anchor_at_first_use_is_not_due():
    left = uses(Loop(1, 4, epoch=40), 0)  # slices 1, 2, 3 are used 1, 2, 3 steps after generation
    assert due(left, set(), steps_left=40, max_age=None) == [1, 2, 3]
    assert due(left, set(), steps_left=40, max_age=1) == [1]
    assert due(left, set(), steps_left=40, max_age=0) == []


def test_five_due_rows_with_a_budget_of_two():
    """2, 2, 1."""
    pending, taken = 5, []
    for deadline in (False, False, True):
        taken.append(rows_now(pending, 2, deadline))
        pending -= taken[-1]
    assert taken == [2, 2, 1]
    assert rows_now(5, 2, deadline=True) == 5  # the deadline is hard
    assert rows_now(5, None, deadline=False) == 0


def test_portions_cut_slices_by_rows():
    assert portions([(4, 0, 3), (5, 0, 3)], 4) == [(4, 0, 3), (5, 0, 1)]
    assert portions([(4, 3, 3), (5, 1, 3)], 4) == [(5, 1, 3)]
    assert portions([(4, 0, 3)], 0) == []


def test_anchors_older_than_the_age_are_taken_anew():
    """Anchored at versions 0, 0 and 95, version now 100, maximum age 10: two of three."""
    assert [too_old(version, 100, 10) for version in (0, 0, 95)] == [True, True, False]
    assert not too_old(90, 100, 10)  # exactly the maximum is not older
    assert not too_old(0, 100, None)


def test_resume_goes_on_where_transformers_does():
    loop = Loop(accumulation=4, slices=3, epoch=6)  # two updates an epoch
    assert [epoch_start(step, loop, max_steps=4) for step in range(4)] == [0, 4, 0, 4]
    assert epoch_start(3, loop, max_steps=4, ignore_data_skip=True) == 0
    assert epoch_start(3, Loop(4, 3), max_steps=10) == 12


def test_cells_of_a_later_iteration_that_cuts_elsewhere():
    """Accumulation 2, 3 slices, 2 iterations: windows 0 0 1 | 1 2 2. No two slices share both."""
    loop = Loop(2, 3, 2, epoch=60)
    assert [use.window for use in uses(loop, 0)] == [0, 0, 1, 1, 2, 2]
    assert cells(uses(loop, 0), 3) == [[0], [1], [2]]
    assert cells(uses(Loop(2, 4, 2, epoch=60), 0), 4) == [[0, 1], [2, 3]]
    assert cells(uses(Loop(8, 8, epoch=80), 0), 8) == [list(range(8))]


def test_a_stream_is_grouped_inside_a_block_only():
    loop = Loop(4, 8)
    assert cells(uses(loop, 0, window_left=4), 8) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    # Resumed off the rhythm of generation: the stream may end inside this batch, only the current block is certain.
    assert cells(uses(loop, 4, window_left=4), 8) == [[0, 1, 2, 3], [4], [5], [6], [7]]
    # At the end of the stream the loop knows that the block is short.
    assert cells(uses(Loop(4, 3), 3, window_left=1), 3) == [[0], [1, 2]]


def test_a_batch_resumed_in_its_middle_keeps_to_what_is_left():
    left = uses(Loop(4, 8, epoch=80), 4, first_use=6)
    assert left == [Use(6, 0), Use(7, 0)]
    assert cells(left, 8) == [[0, 1, 2, 3, 4, 5], [6, 7]]  # the six that are over have no window, mixing them does nothing
    assert due(left, set(), steps_left=9) == []


def test_counts_are_since_the_last_drain():
    counts = RowCounts(free=3, recomputed=2, due=2)
    assert counts.drain() == {"free": 3, "recomputed": 2, "reanchored": 0, "due": 2}
    assert counts.drain()["free"] == 0


loops = st.builds(
    Loop,
    accumulation=st.integers(1, 6),
    slices=st.integers(1, 6),
    iterations=st.integers(1, 3),
    epoch=st.integers(1, 20),
)


@given(loops, st.integers(0, 40), st.none() | st.integers(0, 3), st.none() | st.integers(1, 3))
def test_every_anchor_is_of_the_version_that_generated_or_taken_anew(loop, start, max_age, budget):
    """A run of 60 micro-steps, started anywhere: what holds anchors is simulated, the values being policy versions."""
    n, B = 60, 3
    steps = [(start + m) % loop.epoch for m in range(n)]
    max_steps = sum(ends_window(p, loop) for p in steps)
    version = recomputed = needed = 0
    anchors, done, generated = {}, {}, 0
    for m, position in enumerate(steps):
        if version == max_steps:
            break
        use = m % loop.lifetime
        left = uses(loop, position, use)
        if use == 0:
            anchors, done, generated = {}, dict.fromkeys(range(loop.slices), 0), version
        now = use % loop.slices
        deadline = ends_window(position, loop)
        wanted = due(left, set(anchors), max_steps - version, max_age, version - generated)
        pending = sum(B - done[number] for number in wanted)
        take = rows_now(pending, budget, deadline)
        for number, first, last in portions([(number, done[number], B) for number in wanted], take):
            assert version == generated  # never after a step
            done[number], recomputed = last, recomputed + last - first
            if last == B:
                anchors[number] = version
        if deadline:
            assert not due(left, set(anchors), max_steps - version, max_age, version - generated)
            needed += B * len(wanted)
        # the loss takes what is there, else its own forward
        if now in anchors and too_old(anchors[now], version, max_age):
            anchors[now] = version
        elif now not in anchors:
            assert version == generated or (max_age is not None and version - generated > max_age)
            anchors[now] = version
        if max_age is None:
            assert anchors[now] == generated
        else:
            assert anchors[now] == generated or version - anchors[now] <= max_age
        version += deadline
    if budget is None:
        assert recomputed == needed  # nothing for nothing


@given(loops, st.integers(0, 40), st.integers(0, 10))
def test_cells_cut_slices_into_parts_that_share_all_windows(loop, position, first):
    left = uses(loop, position % loop.epoch, first % loop.lifetime)
    found = cells(left, loop.slices)
    assert sorted(number for cell in found for number in cell) == list(range(loop.slices))
    for cell in found:
        assert len({tuple(use.window for use in left if use.slice == number) for number in cell}) == 1


@given(loops)
def test_windows_are_those_of_the_trainer(loop):
    """Its own cut: blocks of `accumulation`, the last one shorter; `accumulation * updates` never passes the epoch."""
    ends = [p for p in range(loop.epoch) if ends_window(p, loop)]
    assert len(ends) == math.ceil(loop.epoch / loop.accumulation) and ends[-1] == loop.epoch - 1
