"""Engine tests share one process, and so one vLLM at a time: each engine is let go before the next starts."""

import gc

import pytest


def make_trainer(
    models, out, kind="qwen2", *, model=None, model_config=None, peft_config=None, evaluate=False, trainer=None, **config
):
    """A trainer of a tiny model with the real engine, not yet trained."""
    from grpo_ext import GRPOExtConfig, GRPOExtTrainer
    from tests.floor import FloorMixin
    from tests.tiny import config_kwargs, distinct_characters, sums

    class Trainer(FloorMixin, GRPOExtTrainer):
        pass

    args = GRPOExtConfig(**config_kwargs(out, use_vllm=True, **config))
    eval_dataset = sums(8) if evaluate else None
    model = model or models(kind, **(model_config or {}))
    return (trainer or Trainer)(model, distinct_characters, args, sums(), eval_dataset, peft_config=peft_config)


def let_go(trainers):
    for trainer in trainers:
        trainer.vllm_generation = None
    trainers.clear()
    gc.collect()


@pytest.fixture
def train(models, tmp_path):
    """Train a tiny model with the real engine: `train("qwen2", peft_config=..., **config)` returns the trainer."""
    made = []

    def run(kind="qwen2", *, start=True, **kwargs):
        made.append(make_trainer(models, tmp_path, kind, **kwargs))
        if start:
            made[-1].train()
        return made[-1]

    yield run
    let_go(made)


@pytest.fixture(scope="module")
def standing(models, tmp_path_factory):
    """One trainer for the tests of a module, its engine running, for faults that can be planted and taken out again."""
    made = [make_trainer(models, tmp_path_factory.mktemp("standing"), max_completion_length=16)]
    yield made[0]
    let_go(made)
