"""The memory estimate of `grpo-ext plan`: DeepSpeed's numbers for a model that is never loaded."""

import json

import pytest

from grpo_ext.plan import run_plan
from grpo_ext.plan.answer import answer_for
from grpo_ext.plan.memory import DEVICES, GB, NoEstimate, deepspeed_estimate, device_of, parameters_of
from grpo_ext.plan.zero import Zero

# Qwen2.5-0.5B's published shape: 494,032,768 parameters, the tied embedding of 151,936 x 896 counted once.
QWEN = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "vocab_size": 151936, "hidden_size": 896,
    "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}  # fmt: skip
PARAMETERS, LARGEST = 494_032_768, 151_936 * 896


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    """A directory with a config.json and no weights."""
    path = tmp_path_factory.mktemp("qwen")
    (path / "config.json").write_text(json.dumps(QWEN))
    return str(path)


@pytest.fixture
def recipe(tmp_path, qwen):
    def write(**further):
        path = tmp_path / "recipe.yaml"
        settings = {
            "use_vllm": True, "per_device_train_batch_size": 8, "num_generations": 8, "vllm_gpu_memory_utilization": 0.5,
            "deepspeed": {"zero_optimization": {"stage": 3}}, "model_name_or_path": qwen,
        }  # fmt: skip
        path.write_text(json.dumps({**settings, **further}))  # JSON is YAML
        return path

    return write


def test_parameters_without_weights(qwen):
    assert parameters_of(qwen) == (PARAMETERS, LARGEST)


@pytest.mark.parametrize(
    "zero, processes, device, cpu",
    [  # DeepSpeed: 4 bytes of the largest layer, and 18 a parameter over all devices or, offloaded, a machine's CPU memory x 1.5
        (Zero(3), 8, 4 * LARGEST + 18 * PARAMETERS // 8, 1.5 * 4 * 8 * LARGEST),
        (Zero(3, machines=2), 16, 4 * LARGEST + 18 * PARAMETERS // 16, 1.5 * 4 * 8 * LARGEST),
        (Zero(3, True, False), 8, 4 * LARGEST + 2 * PARAMETERS // 8, 1.5 * 16 * PARAMETERS),
        (Zero(3, True, True), 8, 4 * LARGEST, 1.5 * 18 * PARAMETERS),
    ],
)
def test_the_estimate_is_deepspeeds(zero, processes, device, cpu):
    assert deepspeed_estimate(PARAMETERS, LARGEST, processes, zero) == (int(cpu), device)


def test_memory_of_a_device(recipe):
    memory = answer_for(recipe(beta=0.1, vllm_tensor_parallel_size=2), 8, device="h100").memory
    assert (memory.device, memory.device_memory) == ("H100", 80 * GB)
    assert memory.reference == 2 * PARAMETERS // 8  # bfloat16, over 8 ranks
    assert (memory.engine, memory.engine_weights) == (40 * GB, 2 * PARAMETERS // 2)
    assert memory.left == 80 * GB - memory.states - memory.reference - 40 * GB


@pytest.mark.parametrize(
    "settings, reference, engine_weights",
    [
        ({"beta": 0.0}, 0, 2),
        ({"beta": 0.1, "bf16": False}, 4, 4),
        ({"beta": 0.1, "vllm_dtype": "float32"}, 2, 4),
        ({"beta": 0.1, "lora_r": 8}, 0, 2),  # the base with its adapter off
        ({"beta": 0.1, "lora_r": 8, "use_peft": False}, 2, 2),
        ({"beta": 0.1, "use_vllm": False}, 2, 0),
    ],
)
def test_bytes_a_parameter(recipe, settings, reference, engine_weights):
    memory = answer_for(recipe(**settings), 1, device="80").memory
    assert (memory.reference, memory.engine_weights) == (reference * PARAMETERS, engine_weights * PARAMETERS)


def test_what_does_not_fit_is_remarked_upon(recipe):
    answer = answer_for(recipe(vllm_gpu_memory_utilization=0.9), 1, device="T4")
    assert answer.problems == [] and answer.memory.left < 0
    assert "Lower vllm_gpu_memory_utilization below 0.41" in answer.remarks[0]  # (16 - 9.44) / 16
    answer = answer_for(recipe(vllm_gpu_memory_utilization=0.05), 1, device="T4")
    assert "above 0.06" in answer.remarks[0]  # 0.99 GB of weights


def test_an_estimate_that_was_asked_for_and_cannot_be_made(recipe, tmp_path):
    assert "is not at hand" in answer_for(recipe(), 2, model=str(tmp_path / "nowhere")).problems[0].text
    assert "H200" in answer_for(recipe(), 2, device="H9000").problems[0].text
    unasked = answer_for(recipe(model_name_or_path=str(tmp_path / "nowhere")), 2)
    assert unasked.problems == [] and "is not at hand" in unasked.remarks[0]
    assert "needs ZeRO-3" in answer_for(recipe(deepspeed=None), 2, device="H100").remarks[0]


@pytest.mark.parametrize(
    "config, said",
    [
        ({"model_type": "t5"}, "No model can be built from .*T5Config"),
        ({"model_type": "llama", "hidden_size": 65, "num_attention_heads": 2}, "hidden size .65. is not a multiple"),
        ({"model_type": "llama", "num_hidden_layers": "x"}, "'num_hidden_layers' expected int"),
        ({"model_type": "new", "auto_map": {"AutoConfig": "code.Config"}}, "contains custom code"),
    ],
)
def test_configurations_that_are_no_models(tmp_path, config, said):
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(NoEstimate, match=said):
        parameters_of(str(tmp_path))


def test_devices():
    assert device_of("l40s") == ("L40S", 48 * GB) and device_of("48") == ("48 GB", 48 * GB)
    with pytest.raises(NoEstimate, match="A100-40, A100-80"):
        device_of("A100")
    for size in ("inf", "nan", "0", "-8"):
        with pytest.raises(NoEstimate, match="its memory in GB"):
            device_of(size)
    assert all(name == device_of(name)[0] for name in DEVICES)


def test_the_table_and_nothing_else_on_stdout(recipe, capfd):
    assert run_plan(recipe(beta=0.1), 8, device="H100") == 0
    printed = capfd.readouterr().out
    assert printed.startswith("One generation") and "of 80.00 GB, for activations" in printed
    assert run_plan(recipe(beta=0.1), 8, device="H100", as_json=True) == 0
    assert json.loads(capfd.readouterr().out)["memory"]["parameters"] == PARAMETERS
