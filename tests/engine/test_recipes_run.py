"""The reasoning-gym recipe runs as its docstring says, full and with LoRA, on a random model."""

import subprocess
import sys

import pytest

from tests.distributed.launch import ROOT, environment

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("config", ["full", "lora"])
def test_reasoning_gym(models, tmp_path, config):
    command = [
        sys.executable, "recipes/grpo_reasoning_gym.py", "--config", f"recipes/reasoning_gym/{config}.yaml",
        "--model_name_or_path", models("qwen2", max_position_embeddings=1024), "--output_dir", str(tmp_path / "out"),
        "--use_cpu", "true", "--bf16", "false", "--max_steps", "1", "--gradient_accumulation_steps", "1",
        "--max_completion_length", "8", "--task_size", "16",
    ]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "step 1/1 | reward" in done.stdout and f"Saved {tmp_path / 'out'}" in done.stdout
    saved = {"full": "model.safetensors", "lora": "adapter_model.safetensors"}[config]
    assert (tmp_path / "out" / saved).exists()
