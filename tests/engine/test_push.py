"""When weights are pushed, that a push which cannot work is refused before it starts, and that sleeping never loses a weight."""

import pytest
import torch
from torch import nn

from grpo_ext import _trl
from grpo_ext.rollout.rehearse import rehearse_push
from tests.floor import worst

pytestmark = pytest.mark.engine


def engine_of(trainer):
    return trainer.vllm_generation


def greedy(trainer):
    """What the engine answers without randomness: a fingerprint of its weights."""
    from vllm import SamplingParams

    prompts = [{"prompt_token_ids": [20, 14, 21, 32]}]
    out = engine_of(trainer).llm.generate(prompts, SamplingParams(temperature=0, max_tokens=8, logprobs=0), use_tqdm=False)
    return [next(iter(step.values())).logprob for step in out[0].outputs[0].logprobs]


def test_pushed_once_for_each_policy_version(train):
    trainer = train(max_steps=4, gradient_accumulation_steps=2, steps_per_generation=1, per_device_train_batch_size=4)
    assert [entry["version"] for entry in trainer.floor] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert engine_of(trainer).pushes == 4


def test_mark_weights_changed_pushes_what_no_step_changed(train):
    trainer = train(max_steps=1, evaluate=True)
    trainer.evaluate()
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    trainer.mark_weights_changed()
    trainer.floor.clear()
    trainer.evaluate()
    assert worst(trainer.floor)["max_logp"] <= 1e-5


def test_best_model_is_pushed_before_it_is_evaluated(train):
    """The best model is reloaded at the last step, so the step count alone would say that nothing changed."""
    trainer = train(
        start=False,
        evaluate=True,
        max_steps=3,
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="steps",
        save_steps=1,
        load_best_model_at_end=True,
        metric_for_best_model="eval_reward",
        per_device_eval_batch_size=8,
    )
    trainer.train()
    last = {n: p.detach().clone() for n, p in trainer.model.named_parameters()}
    trainer.state.best_model_checkpoint = f"{trainer.args.output_dir}/checkpoint-1"
    trainer._load_best_model()
    assert any(not torch.equal(p, last[n]) for n, p in trainer.model.named_parameters())
    trainer.floor.clear()
    trainer.evaluate()
    assert worst(trainer.floor)["max_logp"] <= 1e-5


def test_resume_from_a_checkpoint_pushes_its_weights(train):
    trainer = train(max_steps=2, save_strategy="steps", save_steps=1)
    again = train(start=False, evaluate=True, max_steps=3)
    again.evaluate()
    again.train(resume_from_checkpoint=f"{trainer.args.output_dir}/checkpoint-2")
    assert [e["version"] for e in again.floor][-1] == 2
    assert worst(again.floor)["max_logp"] <= 1e-5


# ---- a push that cannot work -----------------------------------------------------------------------------------------


def outlines(trainer):
    return list(engine_of(trainer)._names.outlines)


def test_rehearsal_leaves_the_engine_as_it_was(train):
    trainer = train(max_steps=1)
    before = greedy(trainer)
    rehearse_push(engine_of(trainer).llm, outlines(trainer))
    assert greedy(trainer) == before


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda o: [*o, ("model.layers.0.extra.weight", torch.empty(4, device="meta"))], "extra"),
        (lambda o: [e for e in o if "k_proj.weight" not in e[0]], "qkv_proj.weight"),
        (lambda o: [e for e in o if "layers.1.self_attn.v_proj.bias" not in e[0]], "layers.1.self_attn.qkv_proj.bias"),
        (lambda o: [e for e in o if "norm.weight" not in e[0]], "norm"),
        (lambda o: [e for e in o if "embed_tokens" not in e[0]], "embed_tokens"),
    ],
    ids=["unknown name", "part of a fused layer", "a bias", "norms", "embeddings"],
)
def test_a_push_that_does_not_fit_raises_and_harms_nothing(train, change, message):
    trainer = train(max_steps=1)
    before = greedy(trainer)
    with pytest.raises(ValueError, match=message):
        rehearse_push(engine_of(trainer).llm, change(outlines(trainer)))
    assert greedy(trainer) == before
    engine_of(trainer).sync_weights()


def test_an_actor_with_a_module_the_engine_lacks_is_refused_at_the_start(train, models):
    from transformers import AutoModelForCausalLM

    actor = AutoModelForCausalLM.from_pretrained(models("qwen2"))
    actor.model.layers[0].mlp.gate = nn.Linear(4, 4)
    with pytest.raises(ValueError, match=r"mlp\.gate"):
        train(model=actor, start=False)


def test_an_expert_left_out_is_noticed(train):
    trainer = train("qwen3_moe", start=False)
    partial = [e for e in outlines(trainer) if "experts.3.down_proj" not in e[0]]
    assert len(partial) < len(outlines(trainer))
    with pytest.raises(ValueError, match="experts"):
        rehearse_push(engine_of(trainer).llm, partial)


# ---- sleep -----------------------------------------------------------------------------------------------------------


class SpoilingEngine:
    """A real engine whose sleep does what level 2 does on a GPU: the weights are gone until somebody pushes them."""

    def __init__(self, llm):
        self._llm, self.events = llm, []

    def __getattr__(self, name):
        return getattr(self._llm, name)

    def sleep(self, level=1):
        self.events.append(f"sleep {level}")
        with torch.no_grad():
            for parameter in _trl.engine_model(self._llm).parameters():
                parameter.fill_(float("nan")) if parameter.is_floating_point() else None

    def wake_up(self, tags=None):
        self.events.append(f"wake {','.join(tags)}")

    def generate(self, *args, **kwargs):
        self.events.append("generate")
        return self._llm.generate(*args, **kwargs)

    def reset_prefix_cache(self):
        self.events.append("pushed")
        return self._llm.reset_prefix_cache()


def test_every_wake_up_is_followed_by_a_push_before_anything_is_generated(train, monkeypatch):
    from grpo_ext.rollout.engine import ColocatedEngine

    build = ColocatedEngine._build_llm

    def spoiled(self, **kwargs):
        kwargs["enable_sleep_mode"] = False  # the CPU build has none; the wrapper is what sleeps
        return SpoilingEngine(build(self, **kwargs))

    monkeypatch.setattr(ColocatedEngine, "_build_llm", spoiled)
    trainer = train(
        vllm_enable_sleep_mode=True, max_steps=2, per_device_train_batch_size=4, gradient_accumulation_steps=2,
        steps_per_generation=1,
    )  # fmt: skip
    events = engine_of(trainer).llm.events
    assert events == ["sleep 2", *(["wake weights", "pushed", "wake kv_cache", "generate", "sleep 2"] * 4)]
    assert worst(trainer.floor)["max_logp"] <= 1e-5
