"""A sampling seed for every rollout, so that what is sampled depends neither on who shares the batch nor on the number of ranks. Pure."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b


@dataclass(frozen=True)
class EngineCall:
    """mode: "train" or "eval". batch: number of the generation batch in its mode. turn: number of the call within the batch (a
    rollout with tools takes several)."""

    mode: str
    batch: int
    turn: int


class GenerationCount:
    """Numbers the generation batches, those of training and of evaluation each from 0: to evaluate does not move training."""

    def __init__(self) -> None:
        self._begun = {"train": 0, "eval": 0}
        self._mode, self._turns = "train", 0

    def begins(self, mode: str) -> None:
        """A generation batch of `mode` is about to be generated."""
        self._mode, self._turns = mode, 0
        self._begun[mode] += 1

    def number(self, mode: str) -> int:
        """Number of the latest generation batch of `mode`, -1 before the first."""
        return self._begun[mode] - 1

    def call(self) -> EngineCall:
        """The engine is called."""
        self._turns += 1
        return EngineCall(self._mode, self.number(self._mode), self._turns - 1)

    def state_dict(self) -> dict[str, int]:
        return dict(self._begun)

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._begun = dict(state)


def prompt_key(token_ids: Sequence[int]) -> str:
    """A short name for a prompt's tokens."""
    return blake2b(",".join(map(str, token_ids)).encode(), digest_size=8).hexdigest()


def rollout_seeds(base: int, place: str, prompts: Sequence[str], earlier: Iterable[str] = ()) -> list[int]:
    """Seeds of rollouts, from the run's seed, the place (generation batch), each one's prompt and its number among equal prompts.

    Args:
        prompts: a `prompt_key` per rollout.
        earlier: keys of the rollouts that come before these, on other ranks. Equal prompts are numbered through, so that neither
            the samples of a group nor two groups with the same prompt share a seed.

    Returns: 63 bits of BLAKE2 per rollout.
    """
    seen = Counter(earlier)
    seeds = []
    for prompt in prompts:
        digest = blake2b(f"{base}/{place}/{prompt}/{seen[prompt]}".encode(), digest_size=8).digest()
        seeds.append(int.from_bytes(digest, "big") >> 1)
        seen[prompt] += 1
    return seeds
