"""grpo-ext doctor on a tiny model: health passes every check, and each planted fault fails the check that is meant for it."""

import os
import shutil
import subprocess
import sys

import pytest
from peft import LoraConfig

from grpo_ext import _trl
from grpo_ext.consistency.doctor import examine_pair
from tests.engine.conftest import let_go, make_trainer

pytestmark = pytest.mark.engine


def command(*arguments):
    environment = {**os.environ, "COLUMNS": "200"}
    run = [sys.executable, "-m", "grpo_ext", "doctor", *map(str, arguments)]
    return subprocess.run(run, capture_output=True, text=True, env=environment, timeout=300)


def failed(checks):
    return {check.name for check in checks if check.passed is False}


def test_health_with_a_recipe_and_lora(models, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("temperature: 0.8\nbf16: false\nmax_steps: 1000\n")
    result = command("--model", models("qwen2"), "--config", recipe, "--lora", 4)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "FAILS" not in result.stdout
    for line in ("before any update", "tied head", "prefix cache", "LoRA adapter (r=4)", "bit-equal", "short and long rows"):
        assert line in result.stdout
    assert "engine 0.80, actor 0.80" in result.stdout


@pytest.mark.slow
def test_a_recipe_that_truncates_fails(models, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("generation_kwargs:\n  top_k: 3\n")
    result = command("--model", models("qwen2"), "--config", recipe)
    assert result.returncode == 1
    assert "top_k=3: bias -" in result.stdout
    assert "Likely cause: truncated sampling" in result.stdout


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("temprature: 1.0\n", "temprature"),
        pytest.param("a: !!python/object:os.system {}\n", "tag", marks=pytest.mark.slow),
        pytest.param("\tx: 1\n", "tabs", marks=pytest.mark.slow),
        # this one by the engine
        pytest.param("generation_kwargs:\n  nonsense: 3\n", "Unexpected keyword argument 'nonsense'", marks=pytest.mark.slow),
    ],
)
def test_a_bad_recipe_is_refused(models, tmp_path, text, said):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(text)
    result = command("--model", models("qwen2"), "--config", recipe)
    assert (result.returncode, "Traceback" in result.stdout + result.stderr) == (1, False)
    assert said in result.stdout


@pytest.mark.slow
def test_a_model_that_is_not_there(tmp_path):
    result = command("--model", tmp_path / "nothing")
    assert (result.returncode, "Traceback" in result.stdout + result.stderr) == (1, False)
    assert "nothing" in result.stdout


def test_a_model_that_cannot_be_read(models, tmp_path):
    shutil.copytree(models("qwen2"), tmp_path / "cut")
    weights = tmp_path / "cut/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:2000])
    result = command("--model", tmp_path / "cut")
    assert (result.returncode, "Traceback" in result.stdout + result.stderr) == (1, False)
    assert "SafetensorError" in result.stdout


def test_an_adapter_push_is_checked_as_such(train):
    lora = LoraConfig(r=4, target_modules="all-linear")
    trainer = train(start=False, peft_config=lora, vllm_weight_sync="adapter", max_completion_length=32)
    checks, findings = examine_pair(trainer, 4)
    assert (failed(checks), findings) == (set(), [])
    assert [check.passed for check in checks if "base model" in check.name] == [None]


def test_a_prefix_cache_that_keeps_nothing_is_not_said_to_be_well(train):
    trainer = train(start=False, model_config={"max_position_embeddings": 64}, max_completion_length=16)
    (check,) = [check for check in examine_pair(trainer, None)[0] if "prefix cache" in check.name]
    assert (check.passed, check.measured) == (None, "prompts of 31 tokens fill none of its blocks")


def prefix_cache_kept(trainer, monkeypatch):
    monkeypatch.setattr(trainer.vllm_generation.llm, "reset_prefix_cache", lambda: True)


def head_left_alone(trainer, monkeypatch):
    monkeypatch.setattr(_trl, "rebuild_packed_copies", lambda llm: None)


def nothing_pushed(trainer, monkeypatch):
    monkeypatch.setattr(trainer.vllm_generation, "sync_weights", lambda: None)


def dropout(trainer, monkeypatch):
    for layer in trainer.model.model.layers:
        monkeypatch.setattr(layer.self_attn, "attention_dropout", 0.2)


@pytest.fixture(scope="module")
def long(models, tmp_path_factory):
    made = [
        make_trainer(
            models, tmp_path_factory.mktemp("long"), model_config={"max_position_embeddings": 1024}, max_completion_length=32,
            generation_kwargs={"ignore_eos": True},
        )
    ]  # fmt: skip
    yield made[0]
    let_go(made)


@pytest.mark.parametrize(
    ("plant", "caught"),
    [
        (prefix_cache_kept, "prefix cache dropped by a push (long prompts again)"),
        (head_left_alone, "tied head rebuilt by the push"),
        (nothing_pushed, "after a change of the weights and a push"),
        (dropout, "dropout"),
    ],
    ids=["prefix cache", "tied head", "no push", "dropout"],
)
def test_a_fault_fails_its_check(long, monkeypatch, plant, caught):
    long.mark_weights_changed()
    with monkeypatch.context() as planted:
        plant(long, planted)
        checks, findings = examine_pair(long, None)
    assert caught in failed(checks)
    assert findings or plant is prefix_cache_kept
    long.mark_weights_changed()
    assert failed(examine_pair(long, None)[0]) == set()
