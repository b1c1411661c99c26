"""Before a long run: does the engine give every token the probability that the actor gives it, before and after a push?

The trainer of a real run is built on the model, with the engine and sampling settings of a recipe, and looked at by the same
probe that explains a crossed threshold (`grpo_ext.consistency.probe`). Prompts are random tokens, short and long. One process:
what only shows on several ranks (a gather under ZeRO-3, a tensor-parallel engine) is not looked at.
"""

import os
import random
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_ext import _trl
from grpo_ext.plan.recipe import RecipeError, read_recipe
from grpo_ext.rollout.sampling import as_mapping

# Settings of a recipe that decide how engine and actor compute; what it trains on and for how long does not matter here.
_TAKEN = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "generation_kwargs", "sampling_mismatch", "bf16", "fp16", "model_init_kwargs",
    "disable_dropout", "cast_lm_head_to_fp32", "pad_to_multiple_of", "vllm_dtype", "vllm_engine_kwargs", "vllm_weight_sync",
    "vllm_gpu_memory_utilization", "vllm_model_impl", "vllm_max_model_length", "logps_micro_batch_size", "logps_max_tokens",
    "vllm_structured_outputs_regex",
)  # fmt: skip
# What a launcher may have left in the environment: this is one process of its own.
_LAUNCHED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "ACCELERATE_USE_DEEPSPEED")
_NEW_TOKENS, _LONG_PROMPT = 32, 288  # a long prompt fills more than one block of the engine's prefix cache (CPU: 128 tokens)


@dataclass(frozen=True)
class Check:
    """One line of the table. measured and limit are texts; passed is None where a check does not apply."""

    name: str
    measured: str
    limit: str
    passed: bool | None


def run_doctor(model: str, *, config: Path | None = None, lora_rank: int | None = None) -> int:
    """Print the table of checks for a model; 0 if all that apply passed, 1 if not or if it cannot be checked."""
    from grpo_ext.quiet import quiet

    quiet()
    for name in _LAUNCHED:
        os.environ.pop(name, None)
    from rich.console import Console

    console = Console()
    try:
        settings = _settings_of(config) if config is not None else None
        with tempfile.TemporaryDirectory() as folder:
            trainer = _build(model, settings, lora_rank, folder)
            checks, findings = examine_pair(trainer, lora_rank)
    except Exception as error:  # whatever a model, a recipe or an engine raises is what was asked for, and no crash
        kind = "" if isinstance(error, (RecipeError, ValueError, OSError, ImportError)) else f"{type(error).__name__}: "
        console.print(f"grpo-ext doctor: {kind}{error}", style="red", markup=False, highlight=False)
        return 1
    console.print(_table(model, checks))
    for finding in findings:
        console.print(str(finding), markup=False, highlight=False)
    return 0 if all(check.passed is not False for check in checks) else 1


def _settings_of(config: Path) -> Any:
    recipe = read_recipe(config)
    for problem in recipe.problems:
        raise RecipeError(problem.text)
    return recipe.settings


def _build(model: str, settings: Any, lora_rank: int | None, folder: str) -> Any:
    import torch
    from datasets import Dataset

    from grpo_ext import GRPOExtConfig, GRPOExtTrainer

    given = {name: getattr(settings, name) for name in _TAKEN if hasattr(settings, name)} if settings is not None else {}
    on_cpu = not torch.accelerator.is_available()
    if given.get("bf16") is None:  # TRL's default is for accelerators
        given["bf16"] = not on_cpu
    given["generation_kwargs"] = {**(as_mapping(given.get("generation_kwargs")) or {}), "ignore_eos": True}  # or rows are short
    args = GRPOExtConfig(
        output_dir=folder, use_vllm=True, vllm_mode="colocate", use_cpu=on_cpu, per_device_train_batch_size=2, num_generations=2,
        gradient_accumulation_steps=1, max_completion_length=_NEW_TOKENS, report_to="none", save_strategy="no", disable_tqdm=True,
        gradient_checkpointing=False, prob_diff_warn=None, **given,
    )  # fmt: skip
    adapter = None
    if lora_rank is not None:
        from peft import LoraConfig

        adapter = LoraConfig(r=lora_rank, target_modules="all-linear", task_type="CAUSAL_LM")
    rows = Dataset.from_dict({"prompt": ["a", "b"]})
    return GRPOExtTrainer(model, lambda completions, **_: [0.0] * len(completions), args, rows, peft_config=adapter)


def examine_pair(trainer: Any, lora_rank: int | None) -> tuple[list[Check], list[Any]]:
    """All checks, in an order in which each finds what the one before has left: a filled prefix cache, pushed weights."""
    from grpo_ext.consistency.diagnosis import diagnose
    from grpo_ext.consistency.probe import gather_evidence

    def look(prompts: list[list[int]]) -> Any:
        evidence.append(gather_evidence(trainer, prompts))
        return evidence[-1]

    evidence: list[Any] = []
    short, long = _prompts(trainer, (3, 17, 5, 40)), _prompts(trainer, (_LONG_PROMPT,) * 2)
    mixed = [*short, *long]
    first = look(mixed)
    checks = [_agreement("same log-probs before any update", first), _padding(first), *_settings(first)]
    if trainer.vllm_generation.pushes_adapter:
        checks.append(Check("a changed base model after a push", "adapter pushes carry no base weights", "", None))
    else:
        changed = _disturb(trainer, adapter=False)
        after = look(mixed)
        checks += [_agreement("after a change of the weights and a push", after), _moved(changed), _head(after)]
    if lora_rank is not None:
        base = _base_weights(trainer)
        changed = _disturb(trainer, adapter=True)
        after = look(mixed)
        checks += [_agreement(f"after a change of the LoRA adapter (r={lora_rank}) and a push", after), _moved(changed)]
        checks.append(_untouched(trainer, base))
    _disturb(trainer, adapter=lora_rank is not None)
    checks.append(_prefix_cache(trainer, len(long[0]), look(long)))
    findings = {finding.cause: finding for each in evidence for finding in diagnose(each)}
    return checks, list(findings.values())


# ---- what is looked at -------------------------------------------------------------------------------------------------


def _limits(dtype: str) -> tuple[float, float]:
    """Largest healthy mean |dp|, and largest relative difference of a head's logits, of an engine in `dtype`."""
    return (1e-5, 1e-5) if dtype == "float32" else (0.005, 0.03)


def _agreement(name: str, e: Any) -> Check:
    limit = _limits(e.actor_dtype)[0]
    measured = f"mean |dp| {e.probability:.1e}, largest |dlogp| {e.largest:.1e} ({e.tokens} tokens)"
    return Check(name, measured, f"mean |dp| {limit:g}", e.probability <= limit)


def _prefix_cache(trainer: Any, prompt: int, e: Any) -> Check:
    name, block = "prefix cache dropped by a push (long prompts again)", _trl.cached_block(trainer.vllm_generation.llm)
    if block is None or prompt <= block:  # nothing of a prompt is kept, so nothing can be stale
        return Check(name, "it is off" if block is None else f"prompts of {prompt} tokens fill none of its blocks", "", None)
    return _agreement(name, e)


def _padding(e: Any) -> Check:
    from grpo_ext.consistency.diagnosis import NOISE

    limit = NOISE[e.actor_dtype]
    return Check(
        "short and long rows in one batch", f"mean |dlogp| {e.padding:.1e} against one by one", f"{limit:g}", e.padding <= limit
    )


def _settings(e: Any) -> list[Check]:
    (engine, loss), asked = e.fitted, e.temperature
    near = all(abs(fitted / asked - 1) < 0.05 for fitted in (engine, loss))
    departures = {**e.truncation, **e.penalties, **{name: True for name in e.restrictions}}
    named = ", ".join(f"{name}={value}" for name, value in departures.items())
    dtypes = f"engine {e.engine_dtype}, actor {e.actor_dtype}"
    return [
        Check("dtype", dtypes, "the same", e.engine_dtype == e.actor_dtype),
        # Under truncation no temperature fits, and the next line says so.
        Check("temperature", f"engine {engine:.2f}, actor {loss:.2f}", f"{asked:g}", near if not departures else None),
        Check(
            "sampling from the whole distribution",
            f"{named}: bias {e.bias:+.3f} nats{', corrected' * e.corrected}" if departures else "no truncation, no penalty",
            "none, or corrected",
            e.corrected or not departures,
        ),
        Check("dropout", f"{len(e.dropout_modules)} module(s), {e.dropout:.1e} nats", "0", e.dropout == 0.0),
    ]


def _head(e: Any) -> Check:
    name = "tied head rebuilt by the push" if e.tied else "head pushed"
    limit = _limits(e.engine_dtype)[1]
    if e.head is None:
        return Check(name, "not comparable", "", None)
    return Check(name, f"logits of equal hidden states {e.head:.1e} apart", f"{limit:g}", e.head <= limit)


def _moved(by: float) -> Check:
    return Check("... which the change moved", f"relative change of the weights {by:.1e}", "above 0", by > 0)


def _untouched(trainer: Any, before: dict[str, Any]) -> Check:
    import torch

    same = all(torch.equal(before[name], value) for name, value in _base_weights(trainer).items())
    return Check("base weights after the LoRA push", "bit-equal" if same else "changed", "bit-equal", same)


# ---- the trainer, put to the test --------------------------------------------------------------------------------------


def _prompts(trainer: Any, lengths: tuple[int, ...]) -> list[list[int]]:
    """Random token ids, none of them special, short enough for the engine."""
    room = trainer.vllm_generation.llm.llm_engine.model_config.max_model_len - _NEW_TOKENS - 1
    special = set(trainer._tokenizer.all_special_ids)
    ids = [i for i in range(len(trainer._tokenizer)) if i not in special]
    draw = random.Random(0)
    return [[draw.choice(ids) for _ in range(max(1, min(length, room)))] for length in lengths]


def _disturb(trainer: Any, adapter: bool) -> float:
    """Change every matrix of the base, or of the adapter, by a few percent; returns the relative change. Not pushed yet."""
    import torch

    generator, change, size = torch.Generator().manual_seed(trainer.vllm_generation.pushes), 0.0, 0.0
    with torch.no_grad():
        for name, parameter in trainer.model.named_parameters():
            if parameter.dim() < 2 or ("lora_" in name) != adapter:
                continue
            scale = 0.05 * float(parameter.float().pow(2).mean()) ** 0.5 or 0.02  # LoRA's B begins at 0
            noise = scale * torch.randn(parameter.shape, generator=generator).to(parameter)
            parameter.add_(noise)
            change, size = change + float(noise.float().norm()), size + float(parameter.float().norm())
    trainer.mark_weights_changed()
    return change / size if size else 0.0


def _base_weights(trainer: Any) -> dict[str, Any]:
    return {n: p.detach().clone() for n, p in trainer.model.named_parameters() if "lora_" not in n}


def _table(model: str, checks: list[Check]) -> Any:
    from rich.table import Table

    table = Table(title=f"grpo-ext doctor: {model}", title_justify="left")
    for column in ("check", "measured", "limit", "verdict"):
        table.add_column(column, overflow="fold")
    verdicts = {True: "[green]ok[/]", False: "[bold red]FAILS[/]", None: "[dim]-[/]"}
    for check in checks:
        table.add_row(check.name, check.measured, check.limit, verdicts[check.passed])
    return table
