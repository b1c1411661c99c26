"""A plan as tables that a person can follow: every number with the arithmetic it comes from."""

from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from grpo_ext.plan.answer import Answer
from grpo_ext.plan.arithmetic import Pass, Plan, columns, has_correction, shares_prompts, widest
from grpo_ext.plan.memory import GB, Memory

Line = tuple[str, Any, str]  # what, how much, where from
LETTERS = {
    "f": "free", "c": "computed", "k": "kept", "a": "anew for its age", "e": "the engine's", "|": "step",
}  # fmt: skip


def show(console: Console, answer: Answer) -> None:
    """Print the plan, then what fails, then remarks."""
    s, plan, memory = answer.settings, answer.plan, answer.memory
    if plan is not None:
        sections = {
            f"One generation, {plan.processes} rank(s)": generation(s, plan),
            "Training on it, each rank": training(s, plan),
            "Old log-probs": old_logps(s, plan),
            "Reference log-probs, each rank": reference(s, plan),
            "Engine": engine(s, plan),
            "Evaluation step": evaluation(s, plan),
            "Whole run": run(s, plan),
            "Memory of a device (ZeRO-3), an estimate": memory_lines(s, plan, memory) if memory else iter(()),
        }
        for title, lines in sections.items():
            table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 2, 0, 0))
            table.add_column(width=27)
            table.add_column(width=16, justify="right")
            table.add_column()
            for name, value, origin in lines:
                table.add_row(Text(name), Text(number(value)), Text(origin, style="dim"))
            if table.row_count:
                console.print(Text(title, style="bold"))
                console.print(table)
                console.print()
    said = Table(box=None, pad_edge=False, show_header=False, padding=(0, 2, 0, 0))
    for problem in answer.problems:
        said.add_row(Text("fails", style="bold red"), Text(problem.text))
    for remark in answer.remarks:
        said.add_row(Text("remark", style="yellow"), Text(remark))
    if not answer.problems:
        said.add_row(Text("fine", style="green"), Text("every rule holds"))
    console.print(said)


def number(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.2f}".rstrip("0").rstrip(".")
    return f"{value:,}" if isinstance(value, int) else str(value)


def generation(s: Any, plan: Plan) -> Iterator[Line]:
    g = plan.generation
    yield "prompts", g.prompts, f"{g.rollouts:,} rollouts / num_generations {s.num_generations}"
    yield "rollouts", g.rollouts, f"{g.rows_per_slice} rows x {g.slices} slices x {plan.processes} rank(s)"
    yield "rollouts a rank", g.rollouts_per_rank, f"{g.rows_per_slice} rows x {g.slices} slices"
    origin = "gradient_accumulation_steps"
    if s.steps_per_generation is not None:
        origin = "steps_per_generation"
    elif s.generation_batch_size is not None:
        origin = f"generation_batch_size {g.rollouts:,} / ({g.rows_per_slice} x {plan.processes})"
    yield "slices", g.slices, origin
    yield "rows a slice", g.rows_per_slice, "per_device_train_batch_size"
    if g.completion_tokens_at_most is not None:
        yield (
            "completion tokens, at most",
            g.completion_tokens_at_most,
            f"{g.rollouts:,} x max_completion_length {s.max_completion_length:,}",
        )
    if g.tokens_at_most is not None:
        yield "tokens, at most", g.tokens_at_most, f"{g.rollouts:,} x vllm_max_model_length {s.vllm_max_model_length:,}"
    else:
        yield "tokens, at most", "no bound", "set vllm_max_model_length"
    yield "prompts the data must have", g.prompts, "fewer make an empty epoch"


def training(s: Any, plan: Plan) -> Iterator[Line]:
    g, t = plan.generation, plan.training
    yield "forwards and backwards", t.micro_steps, f"{g.slices} slices x num_iterations {s.num_iterations}"
    yield "optimizer steps", t.optimizer_steps, f"{t.micro_steps} / {s.gradient_accumulation_steps} accumulated"
    accumulated = f"{g.rows_per_slice} x {s.gradient_accumulation_steps} x {plan.processes}"
    yield "rollouts an optimizer step", t.rollouts_per_optimizer_step, accumulated
    if t.tokens_per_micro_step_at_most is not None:
        yield (
            "tokens of each, at most",
            t.tokens_per_micro_step_at_most,
            padded(s, g.rows_per_slice),
        )
    yield "slices go as", "rows or trees" if shares_prompts(s) else "rows", f"shared_prompt {s.shared_prompt}"
    together = " + ".join(map(str, t.rows_sorted_together)) or "none"
    yield "rows sorted together", together, "by length, or by prompt for trees" if shares_prompts(s) else "by length"


def old_logps(s: Any, plan: Plan) -> Iterator[Line]:
    g, o = plan.generation, plan.old_logps
    for i, pattern in enumerate(o.patterns):
        yield f"generation {i + 1} of {o.generations_per_cycle}", "", pattern if len(pattern) <= 99 else f"{pattern[:96]}..."
    yield "", "", ", ".join(f"{letter} {word}" for letter, word in LETTERS.items() if letter in "".join(o.patterns))
    mean = "" if o.generations_per_cycle == 1 else f", a mean over {o.generations_per_cycle} generations"
    yield "rows for free", o.rows_free, f"of {g.rollouts:,}, all ranks{mean}"
    yield (
        "rows computed",
        o.rows_computed,
        "kl_in_reward takes all"
        if s.kl_in_reward and s.old_logps != "rollout"
        else {"window": "due before a step", "always": "old_logps always", "rollout": "none in this mode"}[s.old_logps],
    )
    if o.rows_reanchored:
        yield "rows taken anew", o.rows_reanchored, f"older than {s.old_logps_max_age} step(s), free"
    yield (
        "rows stock TRL computes",
        o.rows_computed_by_trl,
        "to correct for the engine" if has_correction(s) else "by its static rule",
    )
    if o.rows_computed:
        yield from pass_lines(s, plan.old_logps_pass, "logps_micro_batch_size")


def reference(s: Any, plan: Plan) -> Iterator[Line]:
    if plan.reference_pass is not None:
        yield "rows", plan.reference_pass.rows, f"all of the rank's: {f'beta {s.beta:g}' if s.beta else 'kl_in_reward'}"
        yield from pass_lines(s, plan.reference_pass, "ref_logps_micro_batch_size")


def pass_lines(s: Any, p: Pass, setting: str) -> Iterator[Line]:
    size = setting if getattr(s, setting) else "per_device_train_batch_size"
    cap = f"logps_max_tokens {s.logps_max_tokens:,}" if s.logps_max_tokens else ""
    limit = f"{size} {p.rows_per_forward}" if p.rows_per_forward else ""
    as_rows = p.forwards_at_most != p.forwards_as_rows_at_most
    yield (
        "forwards a rank, at most",
        p.forwards_at_most,
        (f"{number(p.forwards_as_rows_at_most)} as rows: " if as_rows else "")
        + f"{number(p.rows)} rows by "
        + " and ".join(filter(None, (limit, cap))),
    )
    if p.tokens_per_forward_at_most is not None:
        both = padded(s, p.rows_per_forward) if p.rows_per_forward else ""
        yield "tokens a forward, at most", p.tokens_per_forward_at_most, " or ".join(filter(None, (cap, both)))


def padded(s: Any, rows: int) -> str:
    """How many tokens `rows` padded rows take: the longest prompt and the longest completion may be of different rows."""
    both = columns(s)
    if both is None:
        return ""
    return f"{rows} x (prompt {both[0]:,} + {both[1]:,})" if rows > 1 else f"{widest(s, 1):,}"


def engine(s: Any, plan: Plan) -> Iterator[Line]:
    e = plan.engine
    if e is None:
        yield "engines", "none", "use_vllm false" if not s.use_vllm else f"vllm_mode {s.vllm_mode}: a server of its own"
        return
    yield "engines", e.engines, f"{plan.processes} rank(s) / tensor parallel {e.ranks}"
    yield "sequences an engine", e.sequences, f"{plan.generation.rollouts_per_rank} a rank x {e.ranks} rank(s)"
    if e.row_tokens_at_most is not None:
        yield "tokens of each, at most", e.row_tokens_at_most, "vllm_max_model_length"


def evaluation(s: Any, plan: Plan) -> Iterator[Line]:
    e = plan.evaluation
    if e is not None:
        yield "rollouts", e.rollouts_per_step, f"per_device_eval_batch_size {s.per_device_eval_batch_size} x {plan.processes}"
        yield (
            "prompts",
            e.prompts_per_step,
            f"{e.rollouts_per_step} / {s.num_generations_eval or s.num_generations} generations",
        )


def run(s: Any, plan: Plan) -> Iterator[Line]:
    r = plan.run
    if r is not None:
        yield "optimizer steps", r.optimizer_steps, "max_steps"
        yield (
            "generations",
            r.generations,
            f"{s.max_steps:,} x {s.gradient_accumulation_steps} / {plan.training.micro_steps}, rounded up",
        )
        yield "rollouts", r.rollouts, f"{r.generations:,} x {plan.generation.rollouts:,}"


def memory_lines(s: Any, plan: Plan, m: Memory) -> Iterator[Line]:
    def size(value: int) -> str:
        return f"{value / GB:,.2f} GB" if value >= GB / 10 else f"{value / 10**6:,.2f} MB"

    yield "parameters", m.parameters, f"largest layer {m.largest_layer:,}"
    yield "model states", size(m.states), f"DeepSpeed's estimate on {plan.processes} rank(s)"
    yield "CPU memory, a machine", size(m.cpu_per_machine), "DeepSpeed's estimate"
    if m.reference:
        yield "reference model", size(m.reference), f"weights / {plan.processes} rank(s)"
    if m.engine is not None:
        origin = f"vllm_gpu_memory_utilization {s.vllm_gpu_memory_utilization:g} x {m.device}"
        yield "engine", size(m.engine), f"{origin}; weights {size(m.engine_weights)}, the rest cache" if m.engine else "none"
    elif m.engine_weights:
        yield "engine's weights", size(m.engine_weights), "its cache comes on top"
    if m.left is not None and m.device_memory is not None:
        yield "left", size(m.left), f"of {size(m.device_memory)}, for activations and logits"
