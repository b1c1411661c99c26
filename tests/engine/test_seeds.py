"""What the real engine samples under `rollout_seed`: it depends on run, generation batch, prompt and sample, on nothing else."""

from types import SimpleNamespace

import pytest

from grpo_ext.rollout import engine as module
from grpo_ext.rollout.seeds import GenerationCount, prompt_key

pytestmark = pytest.mark.engine

A, B = [20, 14, 21, 32], [25, 14, 26, 32]


def sampled(engine, prompts, mode="train", batch=0):
    """Completions of a generation batch, in order."""
    engine.generations = GenerationCount()
    for _ in range(batch + 1):
        engine.generations.begins(mode)
    return [tuple(ids) for ids in engine.generate(prompts, None, 4)[1]]


def test_seeds_in_the_engine(train, monkeypatch):
    engine = train(start=False, rollout_seed=7).vllm_generation
    whole = sampled(engine, [A] * 4 + [B] * 4)
    assert len(set(whole)) == 8
    assert sampled(engine, [A] * 4 + [B] * 4) == whole
    # neither the order nor the rest of the batch
    assert sampled(engine, [B] * 4 + [A] * 4) == whole[4:] + whole[:4]
    assert sampled(engine, [B] * 4) == whole[4:]
    # another generation batch, evaluation, another run
    assert not set(sampled(engine, [A] * 4, batch=1)) & set(whole)
    assert not set(sampled(engine, [A] * 4, mode="eval")) & set(whole)
    # a prompt that comes twice
    twice = sampled(engine, [A] * 8)
    assert twice[:4] == whole[:4] and len(set(twice)) == 8
    # as two ranks would: groups cut anywhere
    for cut in (3, 4, 6):
        ranks = [([A] * 4 + [B] * 4)[:cut], ([A] * 4 + [B] * 4)[cut:]]
        keys = [[prompt_key(prompt) for prompt in prompts] for prompts in ranks]
        monkeypatch.setattr(module, "gather_object", lambda mine, keys=keys: keys)
        found = []
        for rank, prompts in enumerate(ranks):
            monkeypatch.setattr(engine, "accelerator", SimpleNamespace(process_index=rank, num_processes=1))
            found += sampled(engine, prompts)
        assert found == whole
    engine.rollout_seed = 8
    assert not set(sampled(engine, [B] * 4)) & set(whole)
