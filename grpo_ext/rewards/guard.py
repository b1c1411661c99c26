"""What goes wrong in a reward function ends the run on all ranks alike, with the function's name.

A reward function is the user's code and runs on every rank by itself. Where it raises on one, the others would wait in TRL's gather for
rewards that never come. So a fault is noted, zeros take the rewards' place, and past the gather all ranks raise the same error.
"""

import asyncio
import contextvars
import functools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from trl.trainer.utils import is_async_callable

from grpo_ext import ranks

NO_SCORE = "Return one reward per completion, None for one that cannot be scored"


@dataclass(frozen=True)
class Fault:
    """kind: the exception that all ranks raise. cause: what was raised here, if anything was."""

    kind: type[Exception]
    text: str
    cause: BaseException | None = None


class Overrun(Exception):
    """A function that did not return in time."""


class RewardGuard:
    """Watches a trainer's reward functions. Reward models (`torch.nn.Module`) are run by TRL, in lockstep, and left alone.

    Args:
        timeout_s: seconds a function may take, or None. A function with a limit runs in a thread of its own, with the accelerator,
            the gradient mode and the context variables of the caller. Python cannot kill a thread: one that overran goes on
            until the process ends, which it does not hold up. An async function is cancelled.
    """

    def __init__(self, trainer: Any, timeout_s: float | None):
        self._trainer, self.timeout_s = trainer, timeout_s

    @contextmanager
    def watching(self) -> Iterator[None]:
        """For the duration of TRL's scoring. Afterwards a collective.

        Raises:
            TimeoutError: a function took longer than `timeout_s`.
            ValueError: a function returned the wrong number of rewards, or no list of numbers.
            RuntimeError: a function raised.
        """
        trainer, faults = self._trainer, list[Fault]()
        functions, names = trainer.reward_funcs, trainer.reward_func_names
        trainer.reward_funcs = [self._watched(f, name, faults) for f, name in zip(functions, names, strict=True)]
        try:
            yield
        finally:
            trainer.reward_funcs = functions
        mine = faults[0] if faults else None
        told = ranks.from_all(trainer.accelerator, mine and (mine.kind, mine.text))
        found = [(rank, fault) for rank, fault in enumerate(told) if fault is not None]
        if found:
            rank, (kind, text) = found[0]
            raise kind(f"Rank {rank}: {text}") from (mine.cause if mine else None)

    def _watched(self, function: Any, name: str, faults: list[Fault]) -> Any:
        if isinstance(function, torch.nn.Module):
            return function
        if is_async_callable(function):

            async def scored_async(**kwargs: Any) -> list[float | None]:
                with self._noting(name, faults, kwargs) as rewards:
                    rewards.extend(_numbers(await _awaited(function(**kwargs), self.timeout_s), kwargs, name))
                return rewards

            return scored_async

        def scored(**kwargs: Any) -> list[float | None]:
            call = functools.partial(function, **kwargs)
            with self._noting(name, faults, kwargs) as rewards:
                rewards.extend(_numbers(call() if self.timeout_s is None else bounded(call, self.timeout_s), kwargs, name))
            return rewards

        return scored

    @contextmanager
    def _noting(self, name: str, faults: list[Fault], kwargs: dict[str, Any]) -> Iterator[list[float | None]]:
        """Yields a list to put the rewards in; it holds zeros, and `faults` one more, where that could not be done."""
        rewards: list[float | None] = []
        try:
            yield rewards
            return
        except _Misfit as error:
            faults.append(Fault(ValueError, str(error)))
        except Overrun:
            faults.append(
                Fault(
                    TimeoutError,
                    f"the reward function {name!r} did not return within reward_timeout_s={self.timeout_s:g} on "
                    f"{len(kwargs['completions'])} completions. Give it a limit of its own that returns None for what it could "
                    "not score, or set a higher reward_timeout_s.",
                )
            )
        except Exception as error:
            text = f"the reward function {name!r} raised {type(error).__name__}: {error}. {NO_SCORE}."
            faults.append(Fault(RuntimeError, text, error))
        rewards[:] = [0.0] * len(kwargs["completions"])


class _Misfit(Exception):
    """Something else than one reward per completion."""


def _numbers(rewards: Any, kwargs: dict[str, Any], name: str) -> list[float | None]:
    wanted = len(kwargs["completions"])
    try:
        numbers = [None if reward is None else float(reward) for reward in rewards]
    except (TypeError, ValueError) as error:
        raise _Misfit(f"the reward function {name!r} returned no list of numbers ({error}). {NO_SCORE}.") from None
    if len(numbers) != wanted:
        raise _Misfit(f"the reward function {name!r} returned {len(numbers)} rewards for {wanted} completions. {NO_SCORE}.")
    return numbers


def bounded(call: Callable[[], Any], limit_s: float) -> Any:
    """`call()`, in a thread of its own. Raises `Overrun` if it has not returned after `limit_s` seconds."""
    outcome: Future = Future()
    gradients = torch.is_grad_enabled()
    device = torch.accelerator.current_device_index() if torch.accelerator.is_available() else None

    def work() -> None:
        if device is not None:
            torch.accelerator.set_device_index(device)  # a new thread is on the first one
        try:
            with torch.set_grad_enabled(gradients):
                outcome.set_result(call())
        except BaseException as error:
            outcome.set_exception(error)

    # A daemon: one that hangs must not keep the process from ending, as a pool's threads would.
    threading.Thread(target=contextvars.copy_context().run, args=(work,), daemon=True, name="reward").start()
    if not wait([outcome], limit_s).done:
        raise Overrun
    return outcome.result()


async def _awaited(coroutine: Any, limit_s: float | None) -> Any:
    task = asyncio.ensure_future(coroutine)
    done, _ = await asyncio.wait([task], timeout=limit_s)
    if not done:
        task.cancel()
        raise Overrun
    return task.result()
