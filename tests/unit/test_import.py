"""What importing costs: an API as much as any function."""

import subprocess
import sys

HEAVY = ("torch", "transformers", "trl", "vllm", "deepspeed", "peft", "accelerate", "datasets", "matplotlib", "pandas")


def loaded_after(statement):
    code = f"import sys; {statement}; print(*(m for m in {HEAVY!r} if m in sys.modules))"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()


def test_import_grpo_ext_is_light():
    assert loaded_after("import grpo_ext; grpo_ext.__version__; dir(grpo_ext)") == []


def test_pure_modules_import_torch_and_nothing_heavier():
    modules = "grpo_ext.batch.padding, grpo_ext.batch.micro_batches, grpo_ext.batch.rollouts, grpo_ext.logprobs.window, "
    modules += "grpo_ext.logprobs.ratio, grpo_ext.logprobs.metrics, grpo_ext.consistency.prob_diff, grpo_ext.rollout.scores, "
    modules += "grpo_ext.rollout.seeds, grpo_ext.resume.state, grpo_ext.batch.empty, grpo_ext.batch.look, grpo_ext.rewards.kl, "
    modules += "grpo_ext.rewards.usable"
    assert set(loaded_after(f"import {modules}")) <= {"torch"}


def test_the_public_face():
    import grpo_ext

    for name in grpo_ext.__all__:
        assert getattr(grpo_ext, name) is not None
    assert {"GRPOExtConfig", "GRPOExtMixin", "GRPOExtTrainer"} <= set(grpo_ext.__all__)


def test_an_unknown_name_lists_the_public_ones():
    import pytest

    import grpo_ext

    with pytest.raises(AttributeError, match="GRPOExtTrainer"):
        grpo_ext.GRPOTrainer  # noqa: B018
