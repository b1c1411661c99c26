"""Facts about vLLM 0.31 that grpo_ext relies on."""

import dataclasses
import inspect

import pytest

pytestmark = pytest.mark.engine


def test_layerwise_reload_has_the_parts_a_rehearsal_replaces():
    from vllm.model_executor.model_loader import reload
    from vllm.model_executor.model_loader.reload import layerwise, meta

    assert callable(reload.initialize_layerwise_reload) and callable(reload.finalize_layerwise_reload)
    assert list(inspect.signature(layerwise.get_numel_loaded).parameters) == ["weight_loader", "args"]
    assert list(inspect.signature(layerwise._layerwise_process).parameters) == ["layer", "info"]
    assert list(inspect.signature(layerwise._place_kernel_tensors).parameters) == ["layer", "info"]
    assert "get_numel_loaded(original_loader, bound_args)" in inspect.getsource(layerwise.make_online_process_loader)
    assert "_layerwise_process(layer, info)" in inspect.getsource(layerwise.make_online_process_loader)
    assert "bias" in meta.SKIP_TENSORS  # biases stay where they are, so a rehearsal counts them on a twin
    assert {"kernel_tensors", "load_numel_total"} <= {field.name for field in dataclasses.fields(layerwise.LayerReloadingInfo)}


def test_shared_memory_of_a_tensor_parallel_cpu_engine_is_named_by_one_function():
    from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed

    assert isinstance(_CPUSHMDistributed.__dict__["make_group_name"], staticmethod)
    assert "make_group_name(communicator)" in inspect.getsource(_CPUSHMDistributed.__init__)


def test_an_engine_that_raises_keeps_its_requests():
    """It can go, with `_trl.drop_requests`, when `_run_engine` aborts what it has not finished."""
    from vllm.entrypoints.offline_utils import OfflineInferenceMixin
    from vllm.v1.engine.llm_engine import LLMEngine
    from vllm.v1.engine.output_processor import OutputProcessor

    assert "abort" not in inspect.getsource(OfflineInferenceMixin._run_engine)
    assert list(inspect.signature(LLMEngine.abort_request).parameters) == ["self", "request_ids", "internal"]
    assert "self.request_states: dict[str, RequestState] = {}" in inspect.getsource(OutputProcessor.__init__)


def test_lora_can_be_built_from_tensors():
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.peft_helper import PEFTHelper

    assert list(inspect.signature(LoRAModel.from_lora_tensors).parameters)[:3] == ["lora_model_id", "tensors", "peft_helper"]
    assert {"from_dict", "validate_legal"} <= set(dir(PEFTHelper))


def test_engine_arguments_are_known_without_an_engine():
    from grpo_ext import _trl

    names = _trl.engine_argument_names()
    assert {"model", "dtype", "enforce_eager", "max_num_seqs", "gpu_memory_utilization", "kv_cache_dtype"} <= names
    assert not {"self", "kwargs"} & names


def test_a_hit_of_zero_logprobs_is_the_sampled_token_alone():
    from vllm import SamplingParams

    params = SamplingParams(logprobs=0, seed=3)
    copy = params.clone()
    copy.seed = 4
    assert (params.seed, copy.seed, params.logprobs) == (3, 4, 0)


def test_an_adapter_layer_can_forget_a_merge():
    import torch
    from peft import LoraConfig, get_peft_model

    from grpo_ext import _trl

    model = get_peft_model(torch.nn.Sequential(torch.nn.Linear(4, 4)), LoraConfig(r=2, target_modules=["0"], use_dora=True))
    layer = model.base_model.model[0]
    layer.merge()
    assert layer.merged and layer._caches
    _trl.forget_merge(layer)
    assert not layer.merged and not layer._caches


@pytest.mark.parametrize(
    "name, refused, taken",
    [
        ("top_p", (0.0, 1.01, "x"), (1.0, 0.01)),
        ("top_k", (-2, 1.5), (-1, 0, 3)),
        ("min_p", (-0.01, 1.01), (0.0, 1.0)),
        ("repetition_penalty", (0.0, float("inf")), (0.1, 3.0)),
        ("frequency_penalty", (-2.1, 2.1), (-2.0, 2.0)),
        ("presence_penalty", (-2.1, 2.1), (-2.0, 2.0)),
        ("min_tokens", (-1,), (0, 3)),
        ("temperature", (2.01, float("nan"), float("inf")), (0.01, 2.0)),
    ],
)
def test_values_of_sampling_parameters_that_are_refused(name, refused, taken):
    """By vLLM, at the first generation; by ours, when the configuration is made."""
    from vllm import SamplingParams
    from vllm.exceptions import VLLMValidationError

    from grpo_ext import GRPOExtConfig
    from tests.tiny import config_kwargs

    def ours(value):
        temperature = value if name == "temperature" else 1.0
        return GRPOExtConfig(**config_kwargs("unused", use_vllm=True, temperature=temperature, generation_kwargs={name: value}))

    for value in refused:
        with pytest.raises((VLLMValidationError, TypeError)):
            SamplingParams(**{name: value})
        with pytest.raises(ValueError, match=rf"\b{name}\b"):
            ours(value)
    for value in taken:
        SamplingParams(**{name: value})
        ours(value)


def test_low_temperatures_are_raised_without_failing():
    from vllm import SamplingParams

    assert SamplingParams(temperature=0.001).temperature == 0.01


def test_an_engine_on_a_cpu_gives_no_sampling_mask(tmp_path):
    """Why `sampling_mismatch="correct"` takes the support from the actor's logits. Masks need model runner V2, that one Triton."""
    from vllm.engine.arg_utils import EngineArgs

    from tests.tiny import build_model

    arguments = EngineArgs(str(build_model(tmp_path)), return_sampling_mask=True, logprobs_mode="processed_logprobs")
    with pytest.raises(ValueError, match="sampling distribution replay requires Model Runner V2"):
        arguments.create_engine_config()
