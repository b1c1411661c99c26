"""A reward function that raises, hangs, or returns something else than one reward per completion ends the run, by name, on all ranks."""

import asyncio
import contextvars
import threading
import time

import pytest
import torch

from grpo_ext import GRPOExtConfig
from grpo_ext.rewards.guard import Overrun, bounded
from tests.distributed.launch import run_ranks
from tests.resume.runs import make, train
from tests.tiny import config_kwargs

SHORT = {"max_steps": 2, "save_strategy": "no"}


def judge(completions, **kwargs):
    return [float(len(completion)) for completion in completions]


def raises(completions, **kwargs):
    raise KeyError("answer")


def hangs(completions, **kwargs):
    threading.Event().wait()


async def raises_async(completions, **kwargs):
    await asyncio.sleep(0)
    raise KeyError("answer")


async def hangs_async(completions, **kwargs):
    await asyncio.Event().wait()


def short(completions, **kwargs):
    return [1.0] * 3


def no_list(completions, **kwargs):
    return 1.0


def no_numbers(completions, **kwargs):
    return ["good"] * len(completions)


FAULTS = [
    (
        raises,
        RuntimeError,
        r"Rank 0: the reward function 'raises' raised KeyError: 'answer'\. Return one reward per completion, None",
    ),
    (raises_async, RuntimeError, r"the reward function 'raises_async' raised KeyError: 'answer'"),
    (hangs, TimeoutError, r"'hangs' did not return within reward_timeout_s=0\.5 on 16 completions.*higher reward_timeout_s"),
    (hangs_async, TimeoutError, r"'hangs_async' did not return within reward_timeout_s=0\.5"),
    (short, ValueError, r"'short' returned 3 rewards for 16 completions"),
    (no_list, ValueError, r"'no_list' returned no list of numbers \('float' object is not iterable\)"),
    (no_numbers, ValueError, r"'no_numbers' returned no list of numbers .*'good'"),
]


@pytest.mark.parametrize("reward, kind, message", FAULTS, ids=lambda value: getattr(value, "__name__", None))
def test_a_fault_ends_the_run_and_names_the_function(model, tmp_path, reward, kind, message):
    trainer = make(model, tmp_path, reward=[judge, reward], reward_timeout_s=0.5, **SHORT)
    start = time.monotonic()
    with pytest.raises(kind, match=message) as error:
        trainer.train()
    assert time.monotonic() - start < 30
    assert trainer.reward_funcs == [judge, reward]
    if kind is RuntimeError:
        assert isinstance(error.value.__cause__, KeyError)  # with the line of the user's code


def test_without_a_limit_a_function_runs_in_the_main_thread_and_with_one_it_changes_nothing(model, tmp_path):
    threads = []

    def watched(completions, **kwargs):
        threads.append(threading.current_thread() is threading.main_thread())
        return [None, *judge(completions)[1:]]  # one that cannot be scored

    unlimited = train(model, tmp_path, reward=watched, **SHORT)
    limited = train(model, tmp_path, reward=watched, reward_timeout_s=60, **SHORT)
    assert threads == [True, False]
    assert unlimited == limited


def test_a_thread_of_its_own_has_the_callers_context():
    place = contextvars.ContextVar("place")
    place.set("here")
    with torch.no_grad():
        assert bounded(lambda: (place.get(), torch.is_grad_enabled()), 10) == ("here", False)
    assert bounded(torch.is_grad_enabled, 10)
    with pytest.raises(TimeoutError, match="of the function's own"):
        bounded(lambda: (_ for _ in ()).throw(TimeoutError("of the function's own")), 10)
    with pytest.raises(Overrun):
        bounded(threading.Event().wait, 0.05)


def test_a_limit_must_be_a_time_and_shorter_than_the_others_wait(monkeypatch):
    for limit in (0, -1.0, float("nan"), float("inf"), 1e10, "5"):
        with pytest.raises(ValueError, match=rf"reward_timeout_s={limit!r}: .* above 0".replace("+", r"\+")):
            GRPOExtConfig(**config_kwargs("unused", reward_timeout_s=limit))
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(
        ValueError, match=r"reward_timeout_s=1800 on 2 processes with ddp_timeout=1800.*Set reward_timeout_s=900"
    ):
        GRPOExtConfig(**config_kwargs("unused", reward_timeout_s=1800))


@pytest.mark.distributed
def test_on_one_rank_of_two_both_raise_the_same(models, tmp_path):
    """The launcher ends with them, though one holds a thread that hangs."""
    start = time.monotonic()
    told = run_ranks(
        "tests.faults.jobs:faulty_rewards", tmp_path, model=models("qwen2"), out=str(tmp_path / "out"), timeout=200
    )
    print(f"\n{time.monotonic() - start:.0f} s in all")
    assert told[0] == told[1]
    for name, (kind, text) in told[0].items():
        assert kind == {"raises": "RuntimeError", "hangs": "TimeoutError", "short": "ValueError"}[name]
        assert text.startswith(f"Rank 1: the reward function '{name}' ")
