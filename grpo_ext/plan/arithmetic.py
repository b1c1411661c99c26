"""The arithmetic of a step: what a generation batch is, how it is used, and what its passes take. Pure: numbers in, numbers out.

Units: a rollout is a prompt with one completion, a row the same seen from a rank. Everything is for one generation batch, a mean
over a cycle (see `cycle`) where batches differ. "At most" bounds what rows of full length take, padding included, whether a
slice goes as rows or as trees (docs/trees.md); None stands where nothing bounds it.
"""

import math
from dataclasses import dataclass
from typing import Any

from grpo_ext.logprobs.window import Loop
from grpo_ext.plan.cycle import play, sorted_together
from grpo_ext.rollout.sampling import SamplingSettings, effective_sampling
from grpo_ext.rules.logps import NEUTRAL_LOSSES, SHARED_PROMPT

PATTERNS = 4  # how many generation batches of a cycle are shown


@dataclass(frozen=True)
class Generation:
    """One call to the engine, over all ranks."""

    prompts: int
    rollouts: int
    rollouts_per_rank: int
    slices: int
    rows_per_slice: int
    completion_tokens_at_most: int | None
    tokens_at_most: int | None


@dataclass(frozen=True)
class Training:
    """micro_steps: forwards and backwards of a rank. rows_sorted_together: of a rank, by cell, in the cycle's first batch."""

    micro_steps: int
    optimizer_steps: float
    rollouts_per_optimizer_step: int
    tokens_per_micro_step_at_most: int | None
    rows_sorted_together: tuple[int, ...]


@dataclass(frozen=True)
class OldLogps:
    """Rows by how they get their old log-probs, over all ranks; patterns as in `cycle.Cycle`, of the first few batches."""

    generations_per_cycle: int
    patterns: tuple[str, ...]
    rows_free: float
    rows_computed: float
    rows_reanchored: float
    rows_computed_by_trl: int


@dataclass(frozen=True)
class Pass:
    """Forwards without gradient on a rank. forwards_as_rows_at_most: where no pass goes as trees, which keep groups together."""

    rows: float
    rows_per_forward: int | None
    tokens_per_forward_at_most: int | None
    forwards_at_most: float
    forwards_as_rows_at_most: float


@dataclass(frozen=True)
class Engine:
    engines: int
    ranks: int
    sequences: int
    row_tokens_at_most: int | None  # prompt and completion


@dataclass(frozen=True)
class Evaluation:
    prompts_per_step: int
    rollouts_per_step: int


@dataclass(frozen=True)
class Run:
    """The whole run by max_steps, short windows at the ends of epochs left aside."""

    optimizer_steps: int
    generations: int
    rollouts: int


@dataclass(frozen=True)
class Plan:
    processes: int
    generation: Generation
    training: Training
    old_logps: OldLogps
    old_logps_pass: Pass
    reference_pass: Pass | None
    engine: Engine | None
    evaluation: Evaluation | None
    run: Run | None


def make_plan(s: Any, processes: int) -> Plan:
    """The plan of settings that pass `grpo_ext.rules`, on `processes` ranks."""
    rows, slices, longest = s.per_device_train_batch_size, slices_of(s, processes), longest_row(s)
    rollouts = rows * slices * processes
    loop = Loop(s.gradient_accumulation_steps, slices, s.num_iterations)
    cycle = play(loop, rows, mode_of(s), s.old_logps_max_age, s.old_logps_budget)
    everywhere = processes / cycle.batches
    stock = has_correction(s) or loop.accumulation % loop.lifetime != 0
    return Plan(
        processes=processes,
        generation=Generation(
            prompts=rollouts // s.num_generations,
            rollouts=rollouts,
            rollouts_per_rank=rows * slices,
            slices=slices,
            rows_per_slice=rows,
            completion_tokens_at_most=_times(rollouts, s.max_completion_length),
            tokens_at_most=_times(rollouts, longest),
        ),
        training=Training(
            micro_steps=loop.lifetime,
            optimizer_steps=loop.lifetime / loop.accumulation,
            rollouts_per_optimizer_step=rows * loop.accumulation * processes,
            tokens_per_micro_step_at_most=_times(rows, widest(s, rows)),
            rows_sorted_together=sorted_together(loop, rows) if groups_by_length(s, slices) else (),
        ),
        old_logps=OldLogps(
            generations_per_cycle=cycle.batches,
            patterns=tuple(cycle.patterns[:PATTERNS]),
            rows_free=cycle.free * everywhere,
            rows_computed=cycle.computed * everywhere,
            rows_reanchored=cycle.reanchored * everywhere,
            rows_computed_by_trl=rollouts if stock else 0,
        ),
        old_logps_pass=no_grad_pass(s, s.logps_micro_batch_size, cycle.portions, cycle.batches),
        reference_pass=no_grad_pass(s, s.ref_logps_micro_batch_size, [rows * slices]) if has_reference(s) else None,
        engine=engine_of(s, processes, slices) if is_colocated(s) else None,
        evaluation=evaluation_of(s, processes),
        run=run_of(s, loop, rollouts),
    )


def slices_of(s: Any, processes: int) -> int:
    """steps_per_generation as TRL derives it (`GRPOConfig.__post_init__`)."""
    if s.steps_per_generation is not None:
        return s.steps_per_generation
    if s.generation_batch_size is not None:
        return s.generation_batch_size // (s.per_device_train_batch_size * processes)
    return s.gradient_accumulation_steps


def mode_of(s: Any) -> str:
    """old_logps as it comes to: the KL in the reward needs the actor's log-probs of every rollout at once."""
    return "always" if s.kl_in_reward and s.old_logps == "window" else s.old_logps


def has_reference(s: Any) -> bool:
    return bool(s.beta) or s.kl_in_reward


def is_colocated(s: Any) -> bool:
    return s.use_vllm and s.vllm_mode == "colocate"


def has_correction(s: Any) -> bool:
    return s.use_vllm and s.vllm_importance_sampling_correction


def longest_row(s: Any) -> int | None:
    """Tokens of the longest row, prompt and completion, where the engine's window bounds it."""
    length = s.vllm_max_model_length if is_colocated(s) else None
    return length if length and length > 0 else None


def columns(s: Any) -> tuple[int, int] | None:
    """(prompt, completion) columns of rows that are padded together: the longest of each may be of different rows."""
    longest, multiple = longest_row(s), padding_multiple(s)
    if longest is None:
        return None
    prompt, completion = longest - 1, min(s.max_completion_length or longest, longest - 1)
    return math.ceil(prompt / multiple) * multiple, math.ceil(completion / multiple) * multiple


def widest(s: Any, rows: int) -> int | None:
    """Columns of `rows` rows, padded. A tree takes no more than its rows without any padding."""
    both, longest, multiple = columns(s), longest_row(s), padding_multiple(s)
    if both is None or longest is None:
        return None
    return sum(both) if rows > 1 else min(sum(both), longest + 2 * (multiple - 1))


def padding_multiple(s: Any) -> int:
    """pad_to_multiple_of as it comes to on the devices of today: "auto" pads on Neuron only."""
    given = str(s.pad_to_multiple_of)
    return max(int(given), 1) if given.isdigit() else 1


def shares_prompts(s: Any) -> bool:
    """Whether slices may go as trees, as far as settings tell (a model may still forbid it)."""
    corrects = s.use_vllm and s.sampling_mismatch == "correct" and SamplingSettings.of(effective_sampling(s)).departures
    return SHARED_PROMPT[str(s.shared_prompt).lower()] is not False and not s.torch_compile and not corrects


def groups_by_length(s: Any, slices: int) -> bool:
    """Whether rows are put in order of length, as far as settings tell (a model's balancing loss may still forbid it)."""
    neutral = (
        s.loss_type in NEUTRAL_LOSSES and s.top_entropy_quantile >= 1 and not s.entropy_coef and not s.use_adaptive_entropy
    )
    return slices > 1 and s.group_rollouts_by_length is not False and neutral


def no_grad_pass(s: Any, micro_batch_size: int | None, portions: list[int], batches: int = 1) -> Pass:
    """Forwards over `portions` of rows, the mean of `batches` generation batches.

    A forward is closed by the token budget only once it holds as many rows as would fit if each were the longest."""
    tokens, longest = s.logps_max_tokens, longest_row(s)
    rows = micro_batch_size or (None if tokens else s.per_device_train_batch_size)

    def surely(row: int | None) -> int:
        """Rows that a forward holds before it is closed, if a row takes so many tokens of it."""
        return min(n for n in (rows, max(1, tokens // row if row else 1) if tokens else None) if n)

    as_rows = [math.ceil(portion / surely(widest(s, 2))) for portion in portions]
    in_line = surely(longest and longest - 1)  # the last token of a row is in no line
    as_trees = [lines_at_most(portion, in_line) for portion in portions] if shares_prompts(s) else as_rows
    padded = _times(rows, widest(s, rows)) if rows else None
    budget = max(tokens, widest(s, 1) or 0) if tokens else None
    return Pass(
        rows=sum(portions) / batches,
        rows_per_forward=rows,
        tokens_per_forward_at_most=min((n for n in (padded, budget) if n), default=None),
        forwards_at_most=sum(map(max, as_rows, as_trees)) / batches,
        forwards_as_rows_at_most=sum(as_rows) / batches,
    )


def lines_at_most(rows: int, line: int) -> int:
    """Lines of trees that take `rows` rows, where a line has room for `line` of the longest.

    One is closed earlier only before a group that fits into the next one as a whole (`batch.groups.cut_groups`), so any two
    in succession hold more than `line` rows."""
    even, odd = 2 * (rows // (line + 1)), 2 * ((rows - 1) // (line + 1)) + 1
    return max(even, odd)


def engine_of(s: Any, processes: int, slices: int) -> Engine:
    ranks = s.vllm_tensor_parallel_size
    return Engine(processes // ranks, ranks, s.per_device_train_batch_size * slices * ranks, longest_row(s))


def evaluation_of(s: Any, processes: int) -> Evaluation | None:
    if s.eval_strategy == "no":
        return None
    rollouts = s.per_device_eval_batch_size * processes
    return Evaluation(rollouts // (s.num_generations_eval or s.num_generations), rollouts)


def run_of(s: Any, loop: Loop, rollouts: int) -> Run | None:
    if s.max_steps <= 0:
        return None
    generations = math.ceil(s.max_steps * loop.accumulation / loop.lifetime)
    return Run(s.max_steps, generations, generations * rollouts)


def _times(a: int | None, b: int | None) -> int | None:
    return None if a is None or b is None else a * b
