"""What `plan` answers: the plan and the memory where the rules hold, else every problem; and what may surprise."""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from grpo_ext.plan.arithmetic import Plan, is_colocated, longest_row, make_plan
from grpo_ext.plan.memory import Memory, NoEstimate, estimate
from grpo_ext.plan.recipe import Recipe, RecipeError, read_recipe
from grpo_ext.plan.zero import Zero, zero_of
from grpo_ext.rules import problems
from grpo_ext.rules.problem import Problem


@dataclass
class Answer:
    """What `plan` has to say; `plan` is None where a rule fails, `memory` where there is no estimate."""

    settings: Any = None
    plan: Plan | None = None
    memory: Memory | None = None
    problems: list[Problem] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """Keys as docs/plan.md lists them."""
        return {
            "problems": [asdict(problem) for problem in self.problems],
            "remarks": self.remarks,
            "plan": self.plan and asdict(self.plan),
            "memory": self.memory and asdict(self.memory),
        }


def answer_for(
    config: Path,
    processes: int,
    tensor_parallel: int | None = None,
    model: str | None = None,
    device: str | None = None,
    accelerate: Path | None = None,
) -> Answer:
    """Everything `plan` has to say. tensor_parallel, model and device win over the recipe's; accelerate: the launcher's file."""
    if processes < 1:
        return Answer(problems=[Problem(f"--num-processes {processes}: a run needs at least 1. Give the number of ranks.")])
    try:
        recipe = read_recipe(config)
        zero = zero_of(recipe.settings.deepspeed, accelerate)
    except RecipeError as error:
        return Answer(problems=[Problem(str(error))])
    s = recipe.settings
    if tensor_parallel is not None:
        s.vllm_tensor_parallel_size = tensor_parallel
    answer = Answer(
        s, problems=[*recipe.problems, *problems(s, processes)], remarks=[*recipe.remarks, *remarks(s, processes, zero)]
    )
    if tensor_parallel is not None and not is_colocated(s):
        answer.remarks.append(
            "--tensor-parallel has no effect: without use_vllm=true and vllm_mode=colocate there is no engine here."
        )
    if answer.problems:
        return answer
    answer.plan = make_plan(s, processes)
    add_memory(answer, recipe, processes, zero, model, device)
    return answer


def remarks(s: Any, processes: int, zero: Zero) -> list[str]:
    """What works but may surprise."""
    found = []
    if zero.processes not in (None, processes):
        found.append(
            f"The Accelerate file starts {zero.processes} process(es), this plan has {processes}: launch with --num_processes {processes}."
        )
    longest = longest_row(s)
    if longest is not None and longest <= (s.max_completion_length or 0):
        found.append(
            f"vllm_max_model_length={longest} holds prompt and completion, and max_completion_length="
            f"{s.max_completion_length} leaves no room for a prompt: completions will be cut short. Raise it to "
            f"{s.max_completion_length} plus the longest prompt."
        )
    return found


def add_memory(answer: Answer, recipe: Recipe, processes: int, zero: Zero, model: str | None, device: str | None) -> None:
    """The memory estimate where the run is under ZeRO-3 and its model is known; else why there is none, if it was asked for."""
    name = model or recipe.own.get("model_name_or_path")
    asked = model is not None or device is not None
    if zero.stage != 3 or name is None:
        if asked or zero.stage == 3:
            lacks = (
                "a model: give --model" if zero.stage == 3 else "ZeRO-3: give --accelerate FILE, or `deepspeed:` in the recipe"
            )
            answer.remarks.append(f"No memory estimate: it needs {lacks}.")
        return
    from grpo_ext.quiet import quiet

    quiet()
    adapter = bool(recipe.own.get("use_peft", recipe.own.get("lora_r", 0)))
    try:
        answer.memory = estimate(recipe.settings, processes, zero, name, device, adapter)
    except NoEstimate as error:
        text = f"No memory estimate. {error}"
        answer.problems += [Problem(text)] if asked else []
        answer.remarks += [] if asked else [text]
        return
    answer.remarks += memory_remarks(answer.settings, answer.memory, adapter)


def memory_remarks(s: Any, m: Memory, adapter: bool) -> list[str]:
    found = []
    if adapter:
        found.append(
            "The estimate counts gradients and optimizer states for every parameter; an adapter has them for its own alone."
        )
    if m.device_memory is None:
        found.append("The device is not known: name one with --device, such as H100, to hold the estimate against.")
        return found
    if m.engine is not None and m.engine_weights > m.engine:
        found.append(
            f"The engine's weights do not fit into its share. Raise vllm_gpu_memory_utilization above "
            f"{m.engine_weights / m.device_memory:.2f}, or vllm_tensor_parallel_size."
        )
    if m.left is not None and m.left <= 0:
        spare = (m.device_memory - m.states - m.reference) / m.device_memory
        advice = f"Lower vllm_gpu_memory_utilization below {spare:.2f}, " if spare > 0.05 and m.engine else ""
        found.append(
            f"This does not fit on {m.device}. {advice or 'Take '}more ranks, or offload (recipes/accelerate/zero3_offload.yaml)."
        )
    return found
