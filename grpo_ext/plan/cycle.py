"""How generation batches and optimizer windows fall against each other, and what that makes of old log-probs. Pure.

Both repeat after `lcm(accumulation, lifetime)` micro-steps, a cycle. Short windows at the end of an epoch and the end of the run are
left aside: they depend on the data's length. The rule is that of `grpo_ext.logprobs.window`, played through.
"""

import math
from dataclasses import dataclass, field, replace

from grpo_ext.logprobs.window import Loop, cells, due, ends_window, rows_now, too_old, uses

NEVER = 10**9  # optimizer steps to the end of the run


@dataclass
class Cycle:
    """Of one rank, summed over `batches` generation batches.

    free, reanchored: rows anchored by the training forward at first use, and anew for their age. portions: rows computed by
    forwards of their own, those of one micro-step together. patterns: a string for each batch, a letter for each micro-step
    (f free, c computed before, k kept from an earlier use, a taken anew, e the engine's), | for an optimizer step."""

    batches: int
    free: int = 0
    reanchored: int = 0
    portions: list[int] = field(default_factory=list)
    patterns: list[str] = field(default_factory=list)

    @property
    def computed(self) -> int:
        return sum(self.portions)


def play(loop: Loop, rows: int, mode: str = "window", max_age: int | None = None, budget: int | None = None) -> Cycle:
    """A cycle of `loop` in slices of `rows` rows; mode, max_age and budget as `old_logps` and its kin."""
    loop = replace(loop, epoch=math.lcm(loop.accumulation, loop.lifetime))
    assert loop.epoch is not None
    cycle, version = Cycle(loop.epoch // loop.lifetime), 0
    for start in range(0, loop.epoch, loop.lifetime):
        generated, pattern, done = version, "", 0
        anchors = dict.fromkeys(range(loop.slices), version) if mode == "always" else {}
        cycle.portions += [rows * loop.slices] if mode == "always" else []
        for use in range(loop.lifetime):
            number, deadline = use % loop.slices, ends_window(start + use, loop)
            if number in anchors and too_old(anchors[number], version, max_age):
                del anchors[number]
            if mode == "window" and (deadline or budget):
                wanted = due(uses(loop, start + use, use), anchors, NEVER, max_age, version - generated)
                now = rows_now(len(wanted) * rows - done, budget, deadline)
                cycle.portions += [now] if now else []
                done += now
                if deadline:
                    anchors |= dict.fromkeys(wanted, version)
                    done = 0
            if number in anchors:
                pattern += "k" if use >= loop.slices else "c"
            else:
                engines = mode == "rollout" and not too_old(generated, version, max_age)
                free = engines or version == generated
                cycle.free += rows * free
                cycle.reanchored += rows * (not free)
                pattern += "e" if engines else "f" if free else "a"
                anchors[number] = generated if engines else version
            if deadline:
                pattern, version = pattern + "|", version + 1
        cycle.patterns.append(pattern)
    return cycle


def sorted_together(loop: Loop, rows: int) -> tuple[int, ...]:
    """Rows of a rank's first generation batch that may be put in order of length together, by cell, in order of first use."""
    loop = replace(loop, epoch=math.lcm(loop.accumulation, loop.lifetime))
    return tuple(len(cell) * rows for cell in cells(uses(loop, 0), loop.slices))
