"""Facts about TRL 1.16 that grpo_ext relies on. When TRL is upgraded, what fails here says which one no longer holds."""

import inspect
import re

import pytest
import torch
from trl import GRPOConfig, GRPOTrainer
from trl.generation import vllm_generation
from trl.generation.vllm_generation import VLLMGeneration
from trl.trainer import grpo_trainer

from tests.tiny import config_kwargs, distinct_characters, sums


def source(function):
    return inspect.getsource(function)


def parameters(function):
    return list(inspect.signature(function).parameters)


def test_signatures():
    assert parameters(GRPOTrainer._generate_and_score_completions) == ["self", "inputs"]
    assert parameters(GRPOTrainer._prepare_inputs) == ["self", "generation_batch"]
    assert parameters(GRPOTrainer.compute_loss) == ["self", "model", "inputs", "return_outputs", "num_items_in_batch"]
    assert parameters(GRPOTrainer._compute_loss) == ["self", "model", "inputs"]
    assert parameters(GRPOTrainer.log) == ["self", "logs", "start_time"]
    assert parameters(GRPOTrainer._generate) == ["self", "prompts"]
    assert parameters(GRPOTrainer._get_per_token_logps_and_entropies)[:7] == [
        "self", "model", "input_ids", "attention_mask", "logits_to_keep", "batch_size", "compute_entropy",
    ]  # fmt: skip
    assert parameters(GRPOTrainer.__init__)[1:6] == ["model", "reward_funcs", "args", "train_dataset", "eval_dataset"]
    assert parameters(GRPOTrainer.__init__)[6] == "processing_class"
    assert parameters(VLLMGeneration.generate) == ["self", "prompts", "images", "num_generations", "profiler"]


def test_the_engine_is_constructed_by_its_name_in_the_module():
    assert grpo_trainer.VLLMGeneration is VLLMGeneration
    call = re.search(r"self\.vllm_generation = VLLMGeneration\((.*?)\n            \)", source(GRPOTrainer.__init__), re.S)
    assert call and "mode=args.vllm_mode" in call[1] and "generation_kwargs=args.generation_kwargs" in call[1]
    assert "= LLM(" in source(VLLMGeneration._init_vllm) and hasattr(vllm_generation, "LLM")
    assert 'logprobs_mode="processed_logprobs"' in source(VLLMGeneration._init_vllm)


def test_a_push_happens_where_the_step_differs_from_the_last_loaded():
    text = source(GRPOTrainer._generate_single_turn)
    assert "self.state.global_step != self._last_loaded_step" in text
    assert text.index("self.vllm_generation.sync_weights()") < text.index("self.vllm_generation.generate(")
    assert "self.state.global_step != self._last_loaded_step" in source(GRPOTrainer._generate)


def test_a_sleeping_engine_is_synced_before_it_generates():
    text = source(VLLMGeneration.generate)
    assert text.index("self.sync_weights()") < text.index("self.llm.generate(")
    assert "self._llm_weights_sleeping" in text
    assert text.index('self.llm.wake_up(tags=["kv_cache"])') < text.index("self.llm.generate(")


def test_the_loss_reads_old_log_probs_and_ratio_after_its_forward():
    text = source(GRPOTrainer._compute_loss)
    forward = text.index("self._get_per_token_logps_and_entropies(")
    assert forward < text.index('inputs.get("old_per_token_logps")')
    assert forward < text.index('inputs["importance_sampling_ratio"]')


def test_the_correction_is_skipped_where_its_switch_is_off():
    text = source(GRPOTrainer._generate_and_score_completions)
    assert text.count("self.use_vllm and self.vllm_importance_sampling_correction") >= 4
    assert 'output["sampling_per_token_logps"]' in text


def test_the_buffer_is_split_from_one_dict_and_extra_keys_ride_along(models, tmp_path):
    class Marked(GRPOTrainer):
        def _generate_and_score_completions(self, inputs):
            rows = super()._generate_and_score_completions(inputs)
            if self.model.training:
                self.keys = set(rows)
                rows["row_id"] = torch.arange(len(rows["prompt_ids"]))
            return rows

    config = config_kwargs(tmp_path, max_steps=1, gradient_accumulation_steps=2, per_device_train_batch_size=4)
    trainer = Marked(models("qwen2"), distinct_characters, GRPOConfig(**config), sums())
    trainer.train()
    ids = torch.cat([piece["row_id"] for piece in trainer._buffered_inputs])
    assert sorted(ids.tolist()) == list(range(8)) and ids.tolist() != list(range(8))
    assert {
        "prompt_ids",
        "prompt_mask",
        "completion_ids",
        "completion_mask",
        "advantages",
        "num_items_in_batch",
    } <= trainer.keys


def test_metrics_are_averaged_and_nan_left_out(models, tmp_path):
    trainer = GRPOTrainer(models("qwen2"), distinct_characters, GRPOConfig(**config_kwargs(tmp_path)), sums())
    trainer._metrics["train"]["x"] = [1.0, 3.0, float("nan")]
    trainer.model.train()
    trainer.log({})
    assert trainer.state.log_history[-1]["x"] == 2.0


@pytest.mark.parametrize("name", ["_step", "_buffered_inputs", "_metrics", "_last_loaded_step", "_tokenizer"])
def test_attributes_are_set(name):
    assert f"self.{name} = " in source(GRPOTrainer.__init__)


# ---- rewards ---------------------------------------------------------------------------------------------------------
def test_the_reference_is_made_by_beta_and_by_nothing_else():
    text = source(GRPOTrainer.__init__)
    assert text.count("self.beta") == 3 and "self.beta = args.beta" in text  # the reference model, and sync_ref_model
    assert "elif is_peft_model(model) and args.beta != 0.0:" in text
    scored = source(GRPOTrainer._generate_and_score_completions)
    assert scored.count("self.beta") == 1 and "if self.beta != 0.0:" in scored
    assert 'output["ref_per_token_logps"]' in scored


def test_rewards_are_given_after_the_reference_pass_with_the_adapter_back_on():
    text = source(GRPOTrainer._generate_and_score_completions)
    assert text.index("use_adapter(") < text.index("        rewards_per_func = self._calculate_rewards(")
    assert re.search(r"^        rewards_per_func = self\._calculate_rewards\(inputs, prompts,", text, re.M), (
        "outside every `with`"
    )


def test_log_probs_are_made_of_ids_mask_and_width():
    text = re.sub(r"\s+", " ", source(GRPOTrainer._generate_and_score_completions))
    passed = r"self\._get_per_token_logps_and_entropies\( self\.(ref_)?model, prompt_completion_ids, attention_mask, logits_to_keep, batch"
    assert len(re.findall(passed, text)) == 3


def test_a_reward_function_has_a_name_a_processing_class_and_a_weight():
    text = source(GRPOTrainer._calculate_rewards)
    assert "zip(self.reward_funcs, self.reward_processing_classes, self.reward_func_names, strict=True)" in text
    assert "prompts=prompts, completions=completions, completion_ids=completion_ids_list, **reward_kwargs" in text
    assert text.rstrip().endswith("rewards_per_func = gather(rewards_per_func)\n        return rewards_per_func")
    assert "self.reward_weights = torch.cat([self.reward_weights, torch.ones(1)])" in source(GRPOTrainer.__init__)


def test_rewards_of_nan_are_left_out_and_rows_of_nan_get_no_advantage():
    text = source(GRPOTrainer._generate_and_score_completions)
    assert "unscorable_mask = torch.isnan(rewards_per_func).all(dim=1)" in text
    assert "torch.nanmean(rewards.view(-1, num_generations), dim=1)" in text
    assert "advantages = torch.nan_to_num(advantages, nan=0.0)" in text


def test_a_generation_is_eight_things_and_a_turn_is_two():
    returned = "return prompt_ids, completion_ids, tool_mask, completions, logprobs, extra_fields, images, tool_images"
    assert returned in source(GRPOTrainer._generate)
    assert "return completion_ids, logprobs" in source(GRPOTrainer._generate_single_turn)
    assert 'tool_mask = extra_fields.pop("env_mask", None)' in source(GRPOTrainer._generate)
    assert "self.rollout_func(prompts, self)" in source(GRPOTrainer._generate)


def test_reward_functions_are_taken_from_a_list_when_they_are_called_and_then_gathered():
    text = source(GRPOTrainer._calculate_rewards)
    assert "zip(self.reward_funcs, self.reward_processing_classes, self.reward_func_names, strict=True)" in text
    assert text.count("is_async_callable(reward_func)") == 1
    assert text.index("reward_func(") < text.index("gather(rewards_per_func)")


def test_the_log_takes_the_mean_of_what_is_in_a_list():
    assert "sum(valid) / len(valid)" in source(GRPOTrainer.log)
