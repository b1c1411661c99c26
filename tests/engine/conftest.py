"""Engine tests share one process, and so one vLLM at a time: each engine is let go before the next starts."""

import gc

import pytest


@pytest.fixture
def train(models, tmp_path):
    """Train a tiny model with the real engine: `train("qwen2", peft_config=..., **config)` returns the trainer."""
    from grpo_ext import GRPOExtConfig, GRPOExtTrainer
    from tests.floor import FloorMixin
    from tests.tiny import config_kwargs, distinct_characters, sums

    class Trainer(FloorMixin, GRPOExtTrainer):
        pass

    made = []

    def run(
        kind="qwen2", *, model=None, model_config=None, peft_config=None, evaluate=False, start=True, trainer=Trainer, **config
    ):
        args = GRPOExtConfig(**config_kwargs(tmp_path, use_vllm=True, **config))
        model = model or models(kind, **(model_config or {}))
        eval_dataset = sums(8) if evaluate else None
        made.append(trainer(model, distinct_characters, args, sums(), eval_dataset, peft_config=peft_config))
        if start:
            made[-1].train()
        return made[-1]

    yield run
    for trainer in made:
        trainer.vllm_generation = None
    made.clear()
    gc.collect()
