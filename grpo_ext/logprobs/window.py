"""Which rollouts need their old log-probs, and by when: the bookkeeping of the per-rollout window check. Pure.

pi_old of a rollout is wanted at the policy version that generated it. Where no optimizer step lies between generation and the
rollout's first use, the training forward computes just that, for free. Where one does, the values are due before that step.
What decides is where the optimizer really steps: after `accumulation` micro-steps counted from the start of the *epoch*, and
at the epoch's end. A global counter modulo the accumulation is wrong after a short last window and after a resume.

Everything here counts in micro-steps (one forward and backward on one slice), optimizer windows and rows.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Loop:
    """accumulation: micro-steps to an optimizer step. slices, iterations: a generation batch is `slices` slices, each used
    `iterations` times, in turns. epoch: micro-steps of an epoch, None where the data is a stream without a length."""

    accumulation: int
    slices: int
    iterations: int = 1
    epoch: int | None = None

    @property
    def lifetime(self) -> int:
        """Micro-steps that one generation batch serves."""
        return self.slices * self.iterations


@dataclass(frozen=True)
class Use:
    """One use of a slice. window: optimizer steps between now and then (on a stream, the number of accumulation blocks)."""

    slice: int
    window: int


def epoch_start(global_step: int, loop: Loop, max_steps: int, ignore_data_skip: bool = False) -> int:
    """Micro-step of the epoch at which a run that stands at `global_step` goes on (transformers' `_init_training_state`).

    A stream counts as one epoch of `max_steps` updates. With `ignore_data_skip` the epoch starts over.
    """
    if ignore_data_skip:
        return 0
    updates = max_steps if loop.epoch is None else updates_per_epoch(loop.epoch, loop.accumulation)
    return global_step % max(updates, 1) * loop.accumulation


def updates_per_epoch(epoch: int, accumulation: int) -> int:
    """Optimizer steps in an epoch of so many micro-steps; the last may be a short one."""
    return max(-(-epoch // accumulation), 1)


def ends_window(position: int, loop: Loop) -> bool:
    """Whether the micro-step at `position` of the epoch ends in an optimizer step."""
    return (position + 1) % loop.accumulation == 0 or position + 1 == loop.epoch


def uses(loop: Loop, position: int, first_use: int = 0, window_left: int | None = None) -> list[Use]:
    """What is left of a generation batch, this micro-step first.

    Args:
        position: micro-step of the epoch about to be taken.
        first_use: how many of the batch's `lifetime` micro-steps are over (not 0 where a run resumed in its middle).
        window_left: micro-steps left in the current window, this one included, where the loop knows; needed on a stream only.

    On a stream the Trainer does not step at the end: the rest of a block is followed by the next epoch's first block, with
    another loss normalizer. Generation batches that started at a multiple of their lifetime end with the stream; for others
    only the current block is certain, and every later use gets a block of its own."""
    remaining = range(first_use, loop.lifetime)
    result, window = [], 0
    if loop.epoch is not None:
        for use in remaining:
            result.append(Use(use % loop.slices, window))
            window += ends_window(position, loop)
            position = (position + 1) % loop.epoch
        return result
    aligned = (position - first_use) % loop.lifetime == 0
    left = window_left if window_left is not None else loop.accumulation - position % loop.accumulation
    for use in remaining:
        result.append(Use(use % loop.slices, window))
        left -= 1
        if left == 0:
            window, left = window + 1, loop.accumulation if aligned else 1
    return result


def cells(remaining: Sequence[Use], slices: int) -> list[list[int]]:
    """Slices whose rows may be mixed: those that share an optimizer window in every iteration left, in order of use.

    The gradient of a window is a sum over its rows, so who sits in which of its slices does not matter (for the losses
    `grpo_ext.trainer` allows); across windows it does.
    """
    by_windows: dict[tuple[int, ...], list[int]] = {}
    for number in range(slices):
        windows = tuple(use.window for use in remaining if use.slice == number)
        by_windows.setdefault(windows, []).append(number)
    order = {use.slice: i for i, use in reversed(list(enumerate(remaining)))}
    return [sorted(cell, key=lambda number: order.get(number, slices)) for cell in by_windows.values()]


def ending_now(remaining: Sequence[Use]) -> list[Use]:
    """The same uses where the loop itself says that this micro-step ends in a step: every later one lies beyond it."""
    first, later = remaining[0], remaining[1:]
    shift = int(bool(later) and later[0].window == first.window)
    return [first, *(Use(use.slice, use.window + shift) for use in later)]


def due(
    remaining: Sequence[Use],
    anchored: Collection[int],
    steps_left: int,
    max_age: int | None = None,
    age: int = 0,
    sized: bool = True,
) -> list[int]:
    """Slices that need old log-probs before the step that ends the current window, in order of first use.

    Args:
        remaining: uses that are left, the current micro-step's first.
        anchored: slices that have theirs.
        steps_left: optimizer steps to the end of the run, the coming one included.
        max_age: age in steps beyond which a rollout is re-anchored when used.
        age: steps taken since the batch was generated.
        sized: whether the windows of `remaining` are exact, as they are but for a stream.

    Not due: a slice first used in this window (free), one never used again, one whose turn comes after the run's last step, and
    one that `max_age` would re-anchor at its first use anyway. On a stream only the run's last step excuses.
    """
    first: dict[int, int] = {}
    for use in remaining:
        first.setdefault(use.slice, use.window - remaining[0].window)

    def is_due(number: int, steps: int) -> bool:
        if number in anchored or steps == 0:
            return False
        if steps >= steps_left if sized else steps_left <= 1:
            return False
        return not (sized and too_old(0, age + steps, max_age))

    return [number for number, steps in first.items() if is_due(number, steps)]


def rows_now(pending: int, budget: int | None, deadline: bool) -> int:
    """How many of the `pending` due rows to compute at this micro-step.

    deadline: the micro-step ends in an optimizer step, after which it is too late: all of them. Before it, at most `budget`
    rows, so that the work is spread over the window; none without a budget, since the deadline is early enough."""
    if deadline:
        return pending
    return min(pending, budget or 0)


def portions(pending: Iterable[tuple[int, int, int]], n: int) -> list[tuple[int, int, int]]:
    """The first `n` rows of (slice, rows done, rows) in order, as (slice, start, stop)."""
    taken = []
    for number, done, rows in pending:
        stop = min(rows, done + n)
        if stop > done:
            taken.append((number, done, stop))
            n -= stop - done
    return taken


def too_old(anchor_version: int, version: int, max_age: int | None) -> bool:
    """Whether a rollout anchored at `anchor_version` is to be re-anchored when used at `version` (both in optimizer steps)."""
    return max_age is not None and version - anchor_version > max_age


@dataclass
class RowCounts:
    """Rows by how their old log-probs came about, since the last `drain`.

    free: taken from the training forward at first use. recomputed: a forward of their own. reanchored: taken anew from the
    training forward at a later use. due: rows that a step would have made too late (what the rule asks for, whatever the mode
    computes)."""

    free: int = 0
    recomputed: int = 0
    reanchored: int = 0
    due: int = 0

    def drain(self) -> dict[str, int]:
        counts = {"free": self.free, "recomputed": self.recomputed, "reanchored": self.reanchored, "due": self.due}
        self.free = self.recomputed = self.reanchored = self.due = 0
        return counts
