"""Facts about TRL 1.16, transformers 5.17 and PEFT 0.21 that the window check relies on."""

import inspect
import re
import subprocess
import sys

import pytest
from transformers import Trainer
from trl import GRPOTrainer
from trl.trainer import grpo_trainer

from grpo_ext.batch.rollouts import FORWARD_KEYS
from grpo_ext.logprobs.metrics import MAXIMA, MINIMA, RATIO_MEANS, SEQUENCE_MEANS, TOKEN_MEANS
from grpo_ext.logprobs.ratio import MODES


def source(function):
    return inspect.getsource(function)


def squeezed(function):
    return re.sub(r"\s+", " ", source(function))


def test_the_old_pass_is_the_first_call_after_generation_by_a_static_rule():
    text = squeezed(GRPOTrainer._generate_and_score_completions)
    rule = (
        "generate_every = self.args.steps_per_generation * self.num_iterations # generation frequency "
        "if self.args.gradient_accumulation_steps % generate_every != 0 or ( "
        "self.use_vllm and self.vllm_importance_sampling_correction ): "
        "old_per_token_logps, _, _ = self._get_per_token_logps_and_entropies( self.model,"
    )
    assert rule in text
    generated = text.index("= self._generate(prompts)")
    assert (
        generated
        < text.index("self._get_per_token_logps_and_entropies(")
        == text.index(rule) + len(rule) - len("self._get_per_token_logps_and_entropies( self.model,")
    )
    assert text.index(rule) < text.index("self._calculate_rewards(")


def test_the_buffered_slice_itself_reaches_the_loss():
    text = source(GRPOTrainer._prepare_inputs)
    assert "inputs = self._buffered_inputs[self._step % self.args.steps_per_generation]" in text
    assert "self._step % generate_every == 0 or self._buffered_inputs is None" in text
    assert text.index("shuffle_sequence_dict") < text.index("split_tensor_dict")
    assert "inputs = self._prepare_inputs(inputs)" in source(Trainer.training_step)
    assert source(GRPOTrainer.training_step).index("super().training_step(") < source(GRPOTrainer.training_step).index(
        "_step += 1"
    )


def test_the_loop_says_what_it_will_do_before_it_does_it():
    text = source(Trainer._run_epoch)
    order = [
        "self.current_gradient_accumulation_steps = len(batch_samples)",
        "self.accelerator.gradient_state._set_sync_gradients(do_sync_step)",
        "self.callback_handler.on_step_begin(",
        "self.training_step(model, inputs",
        "self.state.global_step += 1",
        "self.callback_handler.on_step_end(",
    ]
    assert [text.index(each) for each in order] == sorted(text.index(each) for each in order)
    assert "do_sync_step = (step + 1) % self.args.gradient_accumulation_steps == 0 or (step + 1) == steps_in_epoch" in text
    assert "if step % self.args.gradient_accumulation_steps == 0:\n" in text
    assert "self.callback_handler.train_dataloader = train_dataloader" in source(Trainer._prepare_for_training)


def test_a_run_resumes_where_the_formula_says():
    text = source(Trainer._init_training_state)
    assert "self.state.global_step % num_update_steps_per_epoch" in text
    assert "steps_trained_in_current_epoch *= self.args.gradient_accumulation_steps" in text
    assert "num_update_steps_per_epoch = max_steps" in source(Trainer.set_initial_training_values)
    assert "steps_in_epoch = len_dataloader if len_dataloader is not None else max_steps" in source(
        Trainer.set_initial_training_values
    )


def test_the_loss_forwards_what_a_due_pass_forwards():
    call = re.search(r"self\._get_per_token_logps_and_entropies\((.*?)\n        \)", source(GRPOTrainer._compute_loss), re.S)
    assert set(re.findall(r'inputs\.get\("(\w+)"\)', call[1])) == set(FORWARD_KEYS)


@pytest.mark.parametrize("name", [*TOKEN_MEANS, *RATIO_MEANS, *SEQUENCE_MEANS])
def test_these_metrics_are_means_of_one_slice_over_all_ranks(name):
    assert re.search(
        rf'self\._metrics\[mode\]\["{re.escape(name)}"\]\.append\(global_masked_mean\(', source(GRPOTrainer._compute_loss)
    )


@pytest.mark.parametrize("name", [*MINIMA, *MAXIMA])
def test_these_are_extremes_of_one_slice_over_all_ranks(name):
    assert re.search(rf'self\._metrics\[mode\]\["{re.escape(name)}"\]\.append\(nanm', source(GRPOTrainer._compute_loss))


def test_correction_modes():
    text = source(GRPOTrainer._generate_and_score_completions)
    assert all(f'"{mode}"' in text for mode in MODES)


def test_no_other_loss_type_has_come_up():
    found = set(re.findall(r'loss_type in \[([^\]]*)\]|loss_type == "(\w+)"', source(GRPOTrainer._compute_loss)))
    names = {name for listed, single in found for name in [*re.findall(r"\w+", listed), single] if name}
    assert names == {"grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo", "vespo"}


def test_peft_says_by_a_flag_of_the_model_that_adapters_are_off():
    from peft import PeftModel

    assert source(PeftModel.disable_adapter).count("self._adapters_disabled = True") >= 2
    assert 'use_adapter(model, adapter_name="ref"' in source(GRPOTrainer._generate_and_score_completions)


def test_the_fused_head_gives_zero_on_padding():
    assert "masked_fill(~mask, 0)" in source(grpo_trainer.add_fused_lm_head)


def test_pure_modules_import_nothing_heavy():
    code = (
        "import sys, grpo_ext.batch.padding, grpo_ext.batch.micro_batches, grpo_ext.batch.rollouts, grpo_ext.logprobs.window, "
        "grpo_ext.logprobs.ratio, grpo_ext.logprobs.metrics;"
        "print([m for m in ('trl', 'transformers', 'accelerate', 'deepspeed', 'vllm', 'peft') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
