"""One training run, whole or in two parts, and what must not depend on which: the weights' bits and every logged number."""

import json
import re
import time
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from benchmarks.replay import RecordedRollouts, lognormal, recorded, token_reward, uniform
from grpo_ext import GRPOExtConfig, GRPOExtTrainer
from tests.tiny import config_kwargs, distinct_characters, sums

# A generation batch of 4 slices, each used twice, is 8 micro-steps: 4 optimizer steps. Checkpoints 1, 2 and 3 stand in its middle.
MIDDLE = {"gradient_accumulation_steps": 2, "steps_per_generation": 4, "num_iterations": 2}
STEPS = {"max_steps": 12, "save_strategy": "steps", "save_steps": 1}
_CLOCK = re.compile(r"timing_s/|tokens_per_s|step_time|runtime|per_second")


class Replayed(RecordedRollouts):
    """Recorded rollouts by the number of the generation batch, which a resumed run must know."""

    def __call__(self, prompts: Any, trainer: Any) -> dict[str, list]:
        self.calls = {mode: trainer.generations.number(mode) for mode in self.calls}
        return super().__call__(prompts, trainer)


class Stall(TrainerCallback):
    """Stops the clock at an optimizer step: leaves a file that says so, and waits to be killed."""

    def __init__(self, step: int, folder: str):
        self.step, self.folder = step, Path(folder)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            (self.folder / f"stalled{args.process_index}").write_text("")
            time.sleep(600)


def make(
    model: str,
    out: Any,
    *,
    engine: bool = False,
    adapter: str | None = None,
    dropout: float = 0.0,
    ranks: bool = False,
    evaluate: bool = False,
    prompts: int = 64,
    stream: bool = False,
    trainer: type = GRPOExtTrainer,
    reward: Any = None,
    **config: Any,
) -> Any:
    """A trainer on the real engine, or on recorded rollouts."""
    kwargs = config_kwargs(out, **{**MIDDLE, **STEPS, "per_device_train_batch_size": 4, "use_vllm": True, **config})
    if ranks:
        del kwargs["use_cpu"]  # chosen by the configuration
    peft_config = None
    if adapter:
        from peft import LoraConfig

        peft_config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=dropout)
    rollouts = Replayed(vocab=98, completion=lognormal(6, 0.8, 24), prompt=uniform(2, 6))
    made = (trainer if engine else recorded(trainer))(
        model,
        reward or (distinct_characters if engine else token_reward),
        GRPOExtConfig(**kwargs),
        sums(prompts).to_iterable_dataset() if stream else sums(prompts),
        sums(8) if evaluate else None,
        peft_config=peft_config,
        **({} if engine else {"rollout_func": rollouts}),
    )
    return made


def train(
    model: str,
    out: Any,
    *,
    resume: str | bool | None = None,
    stall: int | None = None,
    before: Callable[[Any], None] | None = None,
    **config: Any,
) -> dict[str, Any]:
    """Train and report; with `stall`, wait there to be killed instead."""
    made = make(model, out, **config)
    if stall is not None:
        made.add_callback(Stall(stall, str(out)))
    if before is not None:
        before(made)
    made.train(resume_from_checkpoint=resume)
    return report(made)


def report(trainer: Any) -> dict[str, Any]:
    """weights: a digest of all parameters, gathered where they are partitioned. logs: all that was logged but times."""
    logs = [{key: value for key, value in entry.items() if not _CLOCK.search(key)} for entry in trainer.state.log_history]
    return {
        "weights": digest(trainer.model),
        "logs": logs,
        "step": trainer.state.global_step,
        "distributed_type": str(trainer.accelerator.distributed_type.value),
        "partitioned": sum(p.numel() == 0 for p in trainer.model.parameters()),
    }


def digest(model: Any) -> str:
    parameters = list(model.parameters())
    found = blake2b(digest_size=16)
    if hasattr(parameters[0], "ds_id"):
        import deepspeed

        with deepspeed.zero.GatheredParameters(parameters):
            for parameter in parameters:
                found.update(parameter.detach().contiguous().view(torch.uint8).numpy())
        return found.hexdigest()
    for parameter in parameters:
        found.update(parameter.detach().contiguous().view(torch.uint8).numpy())
    return found.hexdigest()


def in_turn(model: str, runs: list[dict[str, Any]]) -> None:
    """What a rank does: each of `runs` (arguments of `make`, with `resume` and `stall` as in `train`), all engines kept alive. The
    reports go to `report{rank}.json` where the run wrote its checkpoints."""
    kept = []
    for run in runs:
        arguments = dict(run)
        out, resume, stall = arguments.pop("out"), arguments.pop("resume", None), arguments.pop("stall", None)
        trainer = make(model, out, **arguments)
        kept.append(trainer)
        if stall is not None:
            trainer.add_callback(Stall(stall, out))
        trainer.train(resume_from_checkpoint=resume)
        (Path(out) / f"report{trainer.accelerator.process_index}.json").write_text(json.dumps(report(trainer)))


def sampled(model: str, out: str, **config: Any) -> list[tuple[list[int], list[int]]]:
    """What a rank does to tell its first generation batch: (prompt, completion) of every rollout, in tokens."""
    trainer = make(model, out, engine=True, max_steps=1, save_strategy="no", **config)
    trainer.train()

    def tokens(rows: Any, name: str) -> list[list[int]]:
        pairs = zip(rows[f"{name}_ids"].tolist(), rows[f"{name}_mask"].tolist(), strict=True)
        return [[token for token, real in zip(ids, mask, strict=True) if real] for ids, mask in pairs]

    slices = trainer._buffered_inputs
    return [pair for rows in slices for pair in zip(tokens(rows, "prompt"), tokens(rows, "completion"), strict=True)]
