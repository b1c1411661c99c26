"""Every recipe's YAML is read by the parser its script uses, and every Accelerate file by Accelerate."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

RECIPES = Path(__file__).parents[2] / "recipes"
sys.path.insert(0, str(RECIPES))

SCRIPTS = {
    "grpo_arithmetic": [RECIPES / "grpo_arithmetic.yaml"],
    "grpo_reasoning_gym": sorted((RECIPES / "reasoning_gym").glob("*.yaml")),
}


@pytest.mark.parametrize(
    "script, path", [(s, p) for s, paths in SCRIPTS.items() for p in paths], ids=lambda v: getattr(v, "stem", v)
)
def test_training_yaml(script, path, monkeypatch, tmp_path):
    import importlib

    from trl import TrlParser

    from grpo_ext import GRPOExtConfig

    module = importlib.import_module(script)
    arguments = ["--config", str(path), "--output_dir", str(tmp_path)]
    if script == "grpo_reasoning_gym":
        arguments += ["--model_name_or_path", "somewhere"]
    _, config = TrlParser((module.TaskArguments, GRPOExtConfig)).parse_args_and_config(arguments)
    assert config.use_vllm and config.vllm_mode == "colocate" and config.max_steps > 0


def test_every_yaml_belongs_to_a_script():
    known = {p for paths in SCRIPTS.values() for p in paths}
    assert set(RECIPES.rglob("*.yaml")) - set((RECIPES / "accelerate").glob("*.yaml")) == known


@pytest.mark.parametrize("path", sorted((RECIPES / "accelerate").glob("*.yaml")), ids=lambda p: p.stem)
def test_accelerate_yaml(path):
    from accelerate.commands.config.config_args import load_config_from_file

    config = load_config_from_file(str(path))
    assert str(config.distributed_type.value) == "DEEPSPEED" and not config.use_cpu
    settings = config.deepspeed_config
    if "deepspeed_config_file" in settings:
        import json

        stage = json.loads((RECIPES.parent / settings["deepspeed_config_file"]).read_text())["zero_optimization"]["stage"]
    else:
        stage = settings["zero_stage"]
    assert stage == 3 and settings["zero3_init_flag"] is True


def test_what_the_slurm_script_starts_on_each_node(tmp_path):
    """Slurm's commands and the launcher are stand-ins: the first list the nodes and run a task on each, the last says how it was called."""
    script = RECIPES / "slurm" / "multi_node.sbatch"
    stand_ins = {
        "scontrol": 'printf "node-a\\nnode-b\\n"',
        "srun": 'shift; for id in 0 1; do SLURM_NODEID=$id "$@"; done',
        "accelerate": 'printf "%s\\n" "$*"',
    }
    for name, body in stand_ins.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    slurm = {"SLURM_JOB_NODELIST": "node-[a-b]", "SLURM_JOB_ID": "123456", "SLURM_NNODES": "2", "SLURM_GPUS_ON_NODE": "8"}
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", **slurm}
    command = ["bash", str(script), "train.py", "--note", "two words"]
    lines = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.splitlines()
    assert lines == [
        "launch --config_file recipes/accelerate/multi_node_zero3.yaml --num_machines 2 --num_processes 16 "
        f"--machine_rank {rank} --main_process_ip node-a --main_process_port 23456 train.py --note two words"
        for rank in (0, 1)
    ]
    assert (RECIPES / "accelerate" / "multi_node_zero3.yaml").exists()


def test_the_arithmetic_task():
    from arithmetic_task import HELD_OUT, build_model, exact_match, sums

    train, held_out = sums()
    assert len(held_out) == HELD_OUT and len(train) == 900 - HELD_OUT
    assert not {r["prompt"] for r in train} & {r["prompt"] for r in held_out}
    assert exact_match(["12", "12 ", "13", ""], ["12"] * 4) == [1.0, 1.0, 0.0, 0.0]
    assert 0.8e6 < sum(p.numel() for p in build_model().parameters()) < 1.2e6


def test_reasoning_gym_scores_answers_and_wants_its_tags():
    pytest.importorskip("reasoning_gym")
    from grpo_reasoning_gym import TaskArguments, problems, score_with

    class Plain:
        chat_template = None

    class Chat:
        chat_template = "{{ messages }}"

    task = TaskArguments("x", task="chain_sum", task_kwargs={"min_terms": 2, "max_terms": 2}, task_size=3)
    dataset, gym = problems(task, Plain(), seed=0)
    answer = gym[1]["answer"]
    score = score_with(gym)
    assert isinstance(dataset[1]["prompt"], str)
    assert score([f"so <answer>{answer}</answer>", answer, "<answer>nonsense</answer>"], [1, 1, 1])[:2] == [1.0, 0.1]
    assert score(["<answer>nonsense</answer>"], [1])[0] < 0.5
    assert problems(task, Chat(), seed=0)[0][0]["prompt"][0]["role"] == "user"
