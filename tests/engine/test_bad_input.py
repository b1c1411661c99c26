"""Wrong settings are refused early, saying what was given, why it cannot work, and a setting that does."""

import shutil

import pytest
from peft import LoraConfig, PromptTuningConfig

from grpo_ext import _trl

pytestmark = pytest.mark.engine


def test_an_engine_argument_vllm_does_not_know(train):
    with pytest.raises(ValueError, match=r"enforce_eagre.*Did you mean enforce_eager"):
        train(start=False, vllm_engine_kwargs={"enforce_eagre": True})


def test_engine_arguments_reach_the_engine(train):
    trainer = train(start=False, vllm_engine_kwargs={"max_num_seqs": 3, "max_model_len": 77})
    config = trainer.vllm_generation.llm.llm_engine.vllm_config
    assert (config.scheduler_config.max_num_seqs, config.model_config.max_model_len) == (3, 77)


def test_a_model_directory_without_tokenizer(train, models, tmp_path):
    directory = tmp_path / "bare"
    shutil.copytree(models("qwen2"), directory)
    for path in directory.glob("tokenizer*"):
        path.unlink()
    with pytest.raises(ValueError, match=r"holds no tokenizer.*processing_class"):
        train(model=str(directory), start=False)


def test_a_tokenizer_from_elsewhere_is_enough(models, tmp_path):
    from grpo_ext import GRPOExtConfig, GRPOExtTrainer
    from tests.tiny import build_tokenizer, config_kwargs, distinct_characters, sums

    directory = tmp_path / "bare"
    shutil.copytree(models("qwen2"), directory)
    for path in directory.glob("tokenizer*"):
        path.unlink()
    args = GRPOExtConfig(**config_kwargs(tmp_path, use_vllm=True, max_steps=1))
    trainer = GRPOExtTrainer(str(directory), distinct_characters, args, sums(), processing_class=build_tokenizer())
    trainer.train()
    assert trainer.state.log_history[0]["sampling/sampling_logp_difference/max"] < 1e-5


@pytest.mark.parametrize(
    "extra, side",
    [
        ({"target_modules": ["q_proj", "embed_tokens"]}, "input embeddings"),
        ({"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]}, "input embeddings"),
    ],
)
def test_an_adapter_on_one_side_of_tied_embeddings(train, extra, side):
    with pytest.raises(ValueError, match=rf"{side} only.*ensure_weight_tying=True"):
        train(peft_config=LoraConfig(r=4, **extra), start=False)


def test_the_same_adapter_on_untied_embeddings_is_fine(train):
    from tests.floor import worst

    peft_config = LoraConfig(r=4, target_modules=["q_proj", "embed_tokens"])
    trainer = train(model_config={"tie_word_embeddings": False}, peft_config=peft_config, max_steps=3)
    assert worst(trainer.floor)["max_logp"] <= 1e-5


def test_virtual_tokens_cannot_be_pushed(train):
    with pytest.raises(ValueError, match=r"PROMPT_TUNING adds virtual tokens.*use_vllm=False"):
        train(peft_config=PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4), start=False)


def test_an_adapter_bias_without_a_base_bias(train):
    with pytest.raises(ValueError, match=r"lora_bias=True on .*o_proj"):
        train(peft_config=LoraConfig(r=4, lora_bias=True, target_modules=["o_proj"]), start=False)


@pytest.mark.parametrize("extra", [{"use_dora": True}, {"bias": "all"}, {"lora_bias": True, "target_modules": ["q_proj"]}])
def test_only_plain_lora_is_pushed_alone(train, extra):
    peft_config = LoraConfig(**{"r": 4, "target_modules": ["q_proj", "v_proj"], **extra})
    with pytest.raises(ValueError, match=r"plain LoRA matrices only.*vllm_weight_sync='merged'"):
        train(peft_config=peft_config, vllm_weight_sync="adapter", start=False)


def test_several_completions_a_row(train):
    with pytest.raises(ValueError, match=r"generation_kwargs\['n'\]=2.*num_generations"):
        train(start=False, generation_kwargs={"n": 2})


@pytest.mark.parametrize("version, line", [(None, "pip install 'vllm"), ("0.22.0", "vLLM 0.22.0 is installed")])
def test_vllm_missing_or_of_another_version(train, monkeypatch, version, line):
    installed = _trl.installed_version
    monkeypatch.setattr(_trl, "installed_version", lambda *names: version if "vllm" in names else installed(*names))
    with pytest.raises(ImportError, match=line):
        train(start=False)


def test_an_unsupported_trl(monkeypatch):
    monkeypatch.setattr(_trl, "installed_version", lambda *names: "1.17.0")
    with pytest.raises(ImportError, match=r"TRL 1\.17\.0 is installed.*pip install 'trl>=1\.16,<1\.17'"):
        _trl.check_trl()
