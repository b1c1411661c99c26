"""How log-probs are computed: as rows or as trees, in micro-batches where no gradient is needed, the same number on every rank.

Everything goes through the trainer's own `_get_per_token_logps_and_entropies`, so that a user's override of it, TRL's fused
head, autocast and PEFT keep doing their work. Knows the trainer; the arithmetic is in `grpo_ext.batch`.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from grpo_ext import _trl
from grpo_ext.batch.groups import Inputs
from grpo_ext.batch.micro_batches import Chunks, cut, in_lockstep, put_back
from grpo_ext.batch.padding import lengths_of, rounded
from grpo_ext.batch.rollouts import MULTIMODAL_KEYS, per_token
from grpo_ext.logprobs.neutral import trimming_obstacle
from grpo_ext.logprobs.positions import has_absolute_positions, positions_passed
from grpo_ext.logprobs.sharing import SharedPrompts
from grpo_ext.logprobs.support import OnSupport
from grpo_ext.logprobs.tree_forward import Scored
from grpo_ext.notices import Notices
from grpo_ext.rollout.guards import corrected_sampling


def agree_on_maximum(accelerator: Any, value: int) -> int:
    """The largest `value` of any rank. A collective."""
    if accelerator.num_processes == 1:
        return value
    return int(accelerator.gather(torch.tensor([value], device=accelerator.device)).max())


def micro_batched(
    score: Callable[..., Scored],
    model: Any,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    logits_to_keep: int,
    *,
    max_rows: int | None,
    max_tokens: int | None,
    trims: bool,
    multiple: int | None,
    accelerator: Any,
    on_alone: Callable[[int], None],
    chunks: Chunks | None = None,
    compute_entropy: bool = False,
    **per_token: torch.Tensor | None,
) -> Scored:
    """`score` of (B, P + T) rows, forward by forward, each trimmed to its own rows; results (B, T) in the rows' order.

    Args:
        score: the method that makes log-probs, `score(model, input_ids, attention_mask, logits_to_keep, ...)`.
        max_rows, max_tokens: at most so many rows, or padded tokens, to a forward (None: no limit).
        trims: whether padding may be cut off (False where it is not neutral: rows are chunked only).
        multiple: `pad_to_multiple_of`.
        on_alone: told how many rows exceed `max_tokens` by themselves.
        chunks: which rows each forward takes, where that is not to be decided by length.
        per_token: further (B, P + T) inputs, such as token-type ids.
    """
    T = logits_to_keep
    P = input_ids.size(1) - T
    lengths = rounded(lengths_of(attention_mask[:, :P], attention_mask[:, P:]), multiple)
    if not trims:
        lengths = type(lengths)(torch.full_like(lengths.prompt, P), torch.full_like(lengths.completion, T))
    chunks = cut(lengths, max_rows, max_tokens) if chunks is None else chunks
    on_alone(chunks.alone)
    chunks = in_lockstep(chunks, agree_on_maximum(accelerator, len(chunks)))
    logps, entropies = [], []
    for number, chunk in enumerate(chunks.rows):
        index = torch.tensor(chunk, device=input_ids.device)
        p, t = (min(int(each[list(chunk)].max()), most) for each, most in ((lengths.prompt, P), (lengths.completion, T)))
        columns = slice(P - p, P + t)
        extra: dict[str, Any] = {key: value[index, columns] for key, value in per_token.items() if value is not None}
        extra |= {"compute_entropy": True} if compute_entropy else {}
        part = score(model, input_ids[index, columns], attention_mask[index, columns], t, **extra)
        if number < len(chunks.real):
            logps.append(part[0])
            entropies.append(part[1])
    back = _back(chunks, input_ids.size(0), T)
    return back(logps), back(entropies) if compute_entropy else None, None


def _back(chunks: Chunks, n_rows: int, width: int) -> Callable[[list], torch.Tensor]:
    return lambda parts: put_back(parts, chunks, n_rows, width)


@contextmanager
def scoring_wrapped(trainer: Any, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Within, `wrap(method)` stands for the trainer's log-prob method, on the instance: a user's override of it is what it gets."""
    name = "_get_per_token_logps_and_entropies"
    outer = trainer.__dict__.get(name)
    setattr(trainer, name, wrap(getattr(trainer, name)))
    try:
        yield
    finally:
        delattr(trainer, name)
        if outer is not None:
            setattr(trainer, name, outer)


def is_plain(kwargs: dict[str, Any]) -> bool:
    """Whether a call can be cut into micro-batches: text only, and no loss over the whole batch beside the log-probs."""
    return not kwargs.get("compute_aux_loss") and all(kwargs.get(key) is None for key in MULTIMODAL_KEYS)


@dataclass
class Scoring:
    """What passes by while TRL scores a generation of B rows and T completion tokens, for a reward that needs it.

    tool_mask, logprobs: as `_generate` returned them. arguments, keywords, reference (B, T): of TRL's reference pass. actor
    (B, T): log-probs of the actor, once somebody has computed them with the same arguments."""

    tool_mask: list[list[int]] | None = None
    logprobs: list[list[float | None]] | None = None
    arguments: tuple = ()
    keywords: dict[str, Any] = field(default_factory=dict)
    reference: torch.Tensor | None = None
    actor: torch.Tensor | None = None

    def loss_mask(self) -> torch.Tensor:
        """(B, T), as `grpo_ext.batch.rollouts.loss_mask` has it later."""
        _, attention_mask, width = self.arguments
        mask = attention_mask[:, attention_mask.size(1) - width :].bool()
        if self.tool_mask is not None:
            mask = mask & per_token(self.tool_mask, width, 0.0).to(mask.device).bool()
        return mask

    def rollout_logps(self) -> torch.Tensor:
        """(B, T): the engine's, NaN where it gave none."""
        if self.logprobs is None:
            raise ValueError(
                "old_logps='rollout' takes the log-probs of the engine, but these rollouts came without any. Return "
                "'logprobs' from rollout_func, or set old_logps='window'."
            )
        return per_token(self.logprobs, self.arguments[2], 0.0).to(self.arguments[0].device)


class Passes:
    """What becomes of each call of the trainer's log-prob method. `score` stands in for the method, which it is given."""

    def __init__(self, trainer: Any, notices: Notices, sharing: SharedPrompts):
        self._trainer, self._notices, self.sharing = trainer, notices, sharing
        self._generating = self._omits_next = False
        self.scoring = Scoring()
        self._absolute: dict[int, bool] = {}
        self._support = corrected_sampling(trainer)

    def scored(self) -> Scoring:
        """What passed by since the tokens were there, now that TRL is done; it is forgotten here."""
        scoring, self.scoring = self.scoring, Scoring()
        return scoring

    @contextmanager
    def generating(self) -> Iterator[None]:
        """Within, TRL computes neither its old pass nor the engine's ratio; the reference pass stays, as do users' calls.

        With the KL in the reward the reference pass is made although the loss has no use for it, and noted."""
        trainer, notes = self._trainer, bool(self._trainer._setting("kl_in_reward"))
        correction, beta = trainer.vllm_importance_sampling_correction, trainer.beta
        trainer.vllm_importance_sampling_correction, trainer.beta = False, 1.0 if notes else beta
        self._generating = True
        try:
            with scoring_wrapped(trainer, self._noting) if notes else nullcontext():
                yield
        finally:
            trainer.vllm_importance_sampling_correction, trainer.beta = correction, beta
            self._generating = self._omits_next = False

    def _noting(self, method: Any) -> Callable[..., Any]:
        def noting(model: Any, *args: Any, **kwargs: Any) -> Any:
            result = method(model, *args, **kwargs)
            scoring = self.scoring
            if scoring.reference is None and self._is_reference(model):
                scoring.arguments, scoring.keywords, scoring.reference = args, kwargs, result[0]
            return result

        return noting

    def generated(self, tool_mask: list | None = None, logprobs: list | None = None) -> None:
        """Tokens are there. What TRL calls next, by its static rule (the correction is off), is its old pass, if anything."""
        self.scoring = Scoring(tool_mask, logprobs)
        args = self._trainer.args
        lifetime = args.steps_per_generation * self._trainer.num_iterations
        self._omits_next = self._generating and args.gradient_accumulation_steps % lifetime != 0

    def score(self, method: Any, model: Any, *args: Any, **kwargs: Any) -> Scored | tuple[None, None, None]:
        """Nothing for TRL's old pass; else the method itself, by trees where they are cheaper, in micro-batches without gradient."""
        reference = self._is_reference(model)
        if self._omits_next and not reference:
            self._omits_next = False
            return None, None, None
        with ExitStack() as around:
            if self._has_absolute_positions(model):
                around.enter_context(positions_passed(model))
            if self._generating and reference:
                around.enter_context(self._trainer.phase_times.phase("ref_logps"))
            if self._support is not None and not reference:
                model = OnSupport(model, self._support)
            if not is_plain(kwargs):
                return method(model, *args, **kwargs)
            around.enter_context(self.sharing.head())
            return self._plain(method, reference, model, *args, **kwargs)

    def _plain(
        self,
        method: Any,
        reference: bool,
        model: Any,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        **kwargs: Any,
    ) -> Scored:
        """With gradient one forward, as rows or as trees; without, micro-batches of either."""
        trainer, grad, inputs = self._trainer, torch.is_grad_enabled(), (input_ids, attention_mask, logits_to_keep)
        rows, tokens = (None, None) if grad else self._limits(reference, batch_size)
        further = {key: value for key, value in kwargs.items() if value is not None and key != "compute_aux_loss"}
        lines = None
        if further.keys() <= {"compute_entropy"}:  # nothing else that goes with every token
            lines = self.sharing.lines(method, model, Inputs(*inputs), rows, tokens)
        if grad and lines is None:
            return method(model, *inputs, batch_size=batch_size, **kwargs)
        if lines is not None:
            method = self.sharing.by_trees(method, model)
        if grad:
            return method(model, *inputs, **further)
        return micro_batched(
            method,
            model,
            *inputs,
            max_rows=rows,
            max_tokens=tokens,
            trims=trimming_obstacle(trainer, input_ids.size(1)) is None,
            multiple=trainer.pad_to_multiple_of,
            accelerator=trainer.accelerator,
            on_alone=self._alone,
            chunks=lines,
            **further,
        )

    def _limits(self, reference: bool, batch_size: int | None) -> tuple[int | None, int | None]:
        """(rows, tokens) of a forward without gradient."""
        tokens = self._trainer._setting("logps_max_tokens")
        rows = self._trainer._setting("ref_logps_micro_batch_size" if reference else "logps_micro_batch_size")
        return rows or (None if tokens else batch_size), tokens

    def _is_reference(self, model: Any) -> bool:
        trainer = self._trainer
        if trainer.ref_model is not None:
            return model is trainer.ref_model
        return _trl.is_reference_pass(trainer.accelerator.unwrap_model(trainer.model))

    def _has_absolute_positions(self, model: Any) -> bool:
        if id(model) not in self._absolute:
            self._absolute[id(model)] = has_absolute_positions(self._trainer.accelerator.unwrap_model(model))
        return self._absolute[id(model)]

    def _alone(self, n: int) -> None:
        if n:
            limit = self._trainer._setting("logps_max_tokens")
            self._notices.once(
                "alone",
                f"{n} row(s) are longer than logps_max_tokens={limit}; such a row runs in a forward of its own. Raise "
                "logps_max_tokens to the longest prompt plus completion if memory allows.",
            )
