"""What the processes do in the tests of faults. Each function runs on every rank and returns something JSON can hold."""

import os
from typing import Any

from tests.faults.signs import Sign
from tests.resume.runs import make, train


def on_rank(number: int, function: Any, otherwise: Any) -> Any:
    """`function` on one rank and `otherwise` on the others, under the former's name."""
    chosen = function if int(os.environ.get("RANK", "0")) == number else lambda *args, **kwargs: otherwise(*args, **kwargs)
    if chosen is not function:
        chosen.__name__ = function.__name__
    return chosen


def faulty_rewards(model: str, out: str) -> dict[str, list[str]]:
    """Rank 1's reward function raises, returns too few rewards, hangs: {fault: [kind of the error, its text]}."""
    from tests.faults.test_rewards import hangs, judge, raises, short

    told = {}
    for function in (raises, short, hangs):
        reward = on_rank(1, function, judge)
        trainer = make(model, out, ranks=True, reward=reward, reward_timeout_s=2, max_steps=2, save_strategy="no")
        try:
            trainer.train()
        except Exception as error:
            told[function.__name__] = [type(error).__name__, str(error)]
    return told


class EngineFault:
    """Lets the engine of one rank (None: of all) raise within a generation, requests half done: in the train batches of `batches`,
    at each batch's first try, or at every one."""

    def __init__(self, rank: int | None, batches: list[int], always: bool = False):
        self.rank, self.batches, self.always = rank, set(batches), always
        self.raised: set[int] = set()

    def __call__(self, trainer: Any) -> None:
        if self.rank not in (None, trainer.accelerator.process_index):
            return
        engine = trainer.vllm_generation.llm.llm_engine
        step, calls = engine.step, []

        def faulty() -> Any:
            batch = trainer.generations.number("train")
            calls.append(batch)
            if batch in self.batches and calls.count(batch) > 1 and (self.always or batch not in self.raised):
                self.raised.add(batch)
                raise RuntimeError("the engine is out of order")
            return step()

        engine.step = faulty


def engine_faults(model: str, out: str, runs: dict[str, dict[str, Any]], leave: bool = False) -> dict[str, Any]:
    """Each of `runs` (arguments of `runs.train`; `fault` those of an EngineFault): its report, or the error that ended it; with `leave`
    that error ends the process."""
    told, kept = {}, []
    for name, run in runs.items():
        arguments = dict(run)
        fault = arguments.pop("fault", None)
        arms = [EngineFault(**fault)] if fault else []

        def before(trainer: Any, arms: list[EngineFault] = arms) -> None:
            kept.append(trainer)  # an engine that is let go takes the process groups with it
            for arm in arms:
                arm(trainer)

        try:
            told[name] = train(model, f"{out}/{arguments.pop('folder', name)}", engine=True, before=before, **arguments)
        except Exception as error:
            if leave:
                raise
            told[name] = {"error": type(error).__name__, "text": str(error), "step": kept[-1].state.global_step}
    return told


def train_on(model: str, out: str, **run: Any) -> None:
    """Train until a rank is killed by someone else; `Sign` tells which processes these are."""
    trainer = make(model, out, ranks=True, **run)
    trainer.add_callback(Sign(out))
    trainer.train()
