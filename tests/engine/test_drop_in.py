"""Existing code moves over: a TRL script, another TRL trainer, a subclass with its own loss; and what is saved opens anywhere."""

from dataclasses import dataclass

import pytest
import torch

from tests.floor import FloorMixin, worst
from tests.tiny import config_kwargs, distinct_characters, sums

pytestmark = pytest.mark.engine

TRL_SCRIPT = """
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

def reward(completions, **kwargs):
    return [float(len(set(text))) for text in completions]

args = GRPOConfig(
    output_dir=OUT, use_vllm=True, vllm_mode="colocate", use_cpu=True, bf16=False, per_device_train_batch_size=8,
    num_generations=4, max_completion_length=8, max_steps=2, logging_steps=1, report_to="none", disable_tqdm=True,
)
trainer = GRPOTrainer(model=MODEL, reward_funcs=reward, args=args, train_dataset=Dataset.from_dict({"prompt": ["1+2=", "3+4="] * 8}))
trainer.train()
"""


def test_a_trl_script_moves_over_by_two_names(models, tmp_path):
    script = TRL_SCRIPT.replace("from trl import GRPOConfig, GRPOTrainer", "from grpo_ext import GRPOExtConfig, GRPOExtTrainer")
    script = script.replace("GRPOConfig(", "GRPOExtConfig(").replace("GRPOTrainer(", "GRPOExtTrainer(")
    names = {"OUT": str(tmp_path), "MODEL": models("qwen2")}
    exec(compile(script, "script.py", "exec"), names)
    log = names["trainer"].state.log_history[0]
    assert log["sampling/sampling_logp_difference/max"] < 1e-5 and log["training/rollout_probs_diff_mean"] < 1e-6


def test_trls_own_config_is_enough(models, tmp_path):
    from trl import GRPOConfig

    from grpo_ext import GRPOExtTrainer

    args = GRPOConfig(**config_kwargs(tmp_path, use_vllm=True, max_steps=1))
    trainer = GRPOExtTrainer(models("qwen2"), distinct_characters, args, sums())
    trainer.train()
    assert trainer.state.log_history[0]["training/rollout_probs_diff_mean"] < 1e-6


def test_the_mixin_on_another_trl_trainer(models, tmp_path):
    from trl.experimental.gmpo import GMPOConfig, GMPOTrainer

    from grpo_ext import GRPOExtConfig, GRPOExtMixin

    @dataclass
    class MineConfig(GMPOConfig, GRPOExtConfig):
        pass

    class Mine(FloorMixin, GRPOExtMixin, GMPOTrainer):
        pass

    args = MineConfig(**config_kwargs(tmp_path, use_vllm=True, weight_sync_bucket_mb=1, max_steps=3))
    assert args.epsilon == GMPOConfig(**config_kwargs(tmp_path)).epsilon != GRPOExtConfig(**config_kwargs(tmp_path)).epsilon
    trainer = Mine(models("qwen2"), distinct_characters, args=args, train_dataset=sums())
    trainer.train()
    assert trainer.vllm_generation.bucket_mb == 1
    assert worst(trainer.floor)["max_logp"] <= 1e-5 and trainer.state.global_step == 3


def test_a_users_own_loss_is_called_and_trains(train):
    from grpo_ext import GRPOExtTrainer

    class Mine(FloorMixin, GRPOExtTrainer):
        calls = 0

        def _compute_loss(self, model, inputs):
            type(self).calls += 1
            return super()._compute_loss(model, inputs) * 2

    trainer = train(trainer=Mine, max_steps=3)
    assert Mine.calls == 3 and worst(trainer.floor)["max_logp"] <= 1e-5


def test_evaluation_during_training_logs_its_own_difference(train):
    trainer = train(evaluate=True, eval_strategy="steps", eval_steps=1, max_steps=2, per_device_eval_batch_size=8)
    evaluations = [entry for entry in trainer.state.log_history if "eval_reward" in entry]
    assert len(evaluations) == 2
    assert all(entry["eval_training/rollout_probs_diff_mean"] < 1e-6 for entry in evaluations)


@pytest.mark.parametrize("adapter", [False, True], ids=["full", "lora"])
def test_what_is_saved_opens_in_plain_transformers_and_plain_vllm(train, tmp_path, adapter):
    from peft import LoraConfig, PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from vllm import LLM, SamplingParams

    trainer = train(peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"]) if adapter else None, max_steps=2)
    saved = str(tmp_path / "saved")
    trainer.save_model(saved)
    ids = torch.arange(5, 25).reshape(1, 20)
    with torch.no_grad():
        logits = trainer.model(input_ids=ids).logits
    if adapter:
        model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(trainer.model.name_or_path), saved)
        model.merge_and_unload().save_pretrained(saved := str(tmp_path / "merged"))
        trainer.processing_class.save_pretrained(saved)
    model = AutoModelForCausalLM.from_pretrained(saved)
    with torch.no_grad():
        torch.testing.assert_close(model(input_ids=ids).logits, logits, atol=1e-5, rtol=0)
    assert AutoTokenizer.from_pretrained(saved).eos_token == "<eos>"
    llm = LLM(
        saved,
        dtype="float32",
        enforce_eager=True,
        logprobs_mode="processed_logprobs",
        distributed_executor_backend="external_launcher",
    )
    prompt = {"prompt_token_ids": ids[0].tolist()}
    out = llm.generate([prompt], SamplingParams(temperature=1.0, max_tokens=1, logprobs=20), use_tqdm=False)
    expected = logits[0, -1].log_softmax(-1)
    found = out[0].outputs[0].logprobs[0]
    assert len(found) >= 20
    assert max(abs(entry.logprob - expected[token].item()) for token, entry in found.items()) <= 1e-5


def test_unscored_tokens_are_counted_and_rows_reach_the_user(train):
    """A rollout function may leave tokens without a log-prob; training goes on and they stay NaN."""

    def rollout(prompts, trainer):
        ids = [trainer.processing_class(p).input_ids for p in prompts]
        return {"prompt_ids": ids, "completion_ids": [[20, 21, 1]] * len(ids), "logprobs": [[-0.5, None, -0.7]] * len(ids)}

    from grpo_ext import GRPOExtTrainer

    class Mine(GRPOExtTrainer):
        def _generate_and_score_completions(self, inputs):
            rows = super()._generate_and_score_completions(inputs)
            self.seen = rows["sampling_per_token_logps"]
            return rows

    trainer = train(start=False, trainer=Mine, max_steps=1)
    trainer.rollout_func = rollout
    trainer.reward_funcs = [lambda completions, **kwargs: [float(i) for i in range(len(completions))]]
    trainer.train()
    log = trainer.state.log_history[0]
    assert log["sampling/unscored_tokens"] == 8 and trainer.seen.isnan().sum() == 8
    assert log["loss"] == log["loss"] and log["grad_norm"] == log["grad_norm"]


def test_server_mode_is_trls_own(models, tmp_path, monkeypatch):
    """The client is the one thing faked: no server runs here."""
    from trl.generation import vllm_generation

    from grpo_ext import GRPOExtConfig, GRPOExtTrainer

    class Client:
        def __init__(self, **kwargs):
            self.asked = kwargs

        def init_communicator(self, device):
            pass

        def get_server_info(self):
            return {"model_config": {"logprobs_mode": "processed_logprobs"}}

    monkeypatch.setattr(vllm_generation, "VLLMClient", Client)
    args = GRPOExtConfig(
        **config_kwargs(tmp_path, use_vllm=True, vllm_mode="server", vllm_server_base_url="http://127.0.0.1:9")
    )
    trainer = GRPOExtTrainer(models("qwen2"), distinct_characters, args, sums())
    assert type(trainer.vllm_generation) is vllm_generation.VLLMGeneration
    assert trainer.vllm_generation.vllm_client.asked["base_url"] == "http://127.0.0.1:9"
