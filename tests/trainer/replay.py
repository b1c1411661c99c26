"""Train on recorded rollouts and report what a parity test compares."""

from collections.abc import Callable
from typing import Any

import torch
from trl import GRPOConfig, GRPOTrainer

from benchmarks.replay import ForwardCount, RecordedRollouts, lognormal, recorded, token_reward, uniform
from grpo_ext import GRPOExtConfig, GRPOExtTrainer
from tests.tiny import config_kwargs, sums

VOCAB = 98
# What stock TRL's configuration does not have.
OWN = ("old_logps", "group_rollouts", "shared_prompt", "logps_", "ref_logps_", "resume_", "prob_diff", "enable_token_level")


def rollouts(**kwargs: Any) -> RecordedRollouts:
    """Long-tailed completions of at most 24 tokens after prompts of 2 to 6."""
    return RecordedRollouts(**{**dict(vocab=VOCAB, completion=lognormal(6, 0.8, 24), prompt=uniform(2, 6)), **kwargs})


def train(
    trainer: type,
    model: Any,
    out: Any,
    *,
    func: RecordedRollouts | None = None,
    before: Callable[[Any], None] | None = None,
    prompts: Any = None,
    evaluate: bool = False,
    peft_config: Any = None,
    resume: str | None = None,
    ranks: bool = False,
    tokenizer: Any = None,
    **config: Any,
) -> Any:
    """A finished trainer; `history` (logs of the steps), `forwards` (counts) and `rollouts` on it."""
    kind = GRPOExtConfig if issubclass(trainer, GRPOExtTrainer) or ranks else GRPOConfig
    kwargs = config_kwargs(
        out, **{**dict(use_vllm=True, max_steps=4, num_generations=4, per_device_train_batch_size=4), **config}
    )
    if ranks:
        del kwargs["use_cpu"]  # chosen by the configuration
    func = func or rollouts()
    made = recorded(trainer)(
        model,
        token_reward,
        kind(**kwargs),
        prompts if prompts is not None else sums(32),
        sums(4) if evaluate else None,
        tokenizer,
        rollout_func=func,
        peft_config=peft_config,
    )
    if before is not None:
        before(made)
    made.rollouts, made.forwards = func, ForwardCount()
    with made.forwards.watching(made):
        made.train(resume_from_checkpoint=resume)
    made.history = [entry for entry in made.state.log_history if "loss" in entry]
    made.evaluations = [entry for entry in made.state.log_history if "eval_loss" in entry]
    return made


def both(model: Any, out: Any, stock: type = GRPOTrainer, ours: type = GRPOExtTrainer, **kwargs: Any) -> tuple[Any, Any]:
    """The same run by stock TRL and by us."""
    theirs = {key: value for key, value in kwargs.items() if not key.startswith(OWN)}
    make = kwargs.get("func")
    runs = []
    for trainer, arguments in ((stock, theirs), (ours, kwargs)):
        if make is not None:
            arguments = {**arguments, "func": make()}
        torch.manual_seed(0)
        runs.append(train(trainer, model, f"{out}/{len(runs)}", **arguments))
    return runs[0], runs[1]


def series(run: Any, name: str) -> torch.Tensor:
    return torch.tensor([entry[name] for entry in run.history], dtype=torch.float64)


def worst_relative(stock: Any, ours: Any, name: str) -> float:
    a, b = series(stock, name), series(ours, name)
    return float(((a - b).abs() / a.abs().clamp(min=1e-12)).max())


def weight_difference(stock: Any, ours: Any) -> float:
    pairs = zip(stock.model.parameters(), ours.model.parameters(), strict=True)
    return max(float((a - b).detach().abs().max()) for a, b in pairs)
