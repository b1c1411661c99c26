"""Gathers evidence on a trainer whose rollouts and actor disagree: a few fresh rollouts, looked at from every side.

It costs a generation of at most ROWS completions of at most TOKENS tokens and some forwards over them, and is done only when a
threshold was crossed (or by `grpo-ext doctor`). Every rank takes part and looks at the main process's rows, so all of them run
the same forwards, and the main process's evidence counts.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.utils import is_peft_model

from grpo_ext import ranks
from grpo_ext.consistency.diagnosis import Evidence, Finding, diagnose, finding
from grpo_ext.consistency.hypotheses import fitted_temperature, hypotheses, residual
from grpo_ext.logprobs.dropout import active_dropout
from grpo_ext.logprobs.support import log_kept_mass
from grpo_ext.rollout.guards import corrected_sampling
from grpo_ext.rollout.sampling import SamplingSettings, effective_sampling

ROWS, TOKENS = 8, 48


@dataclass(frozen=True)
class ProbeRows:
    """Prompts and completions as token ids, and the engine's log-probs of the latter (None where it gave none)."""

    prompts: list[list[int]]
    completions: list[list[int]]
    logprobs: list[list[float | None]]

    @property
    def mu(self) -> torch.Tensor:
        values = [float("nan") if value is None else value for row in self.logprobs for value in row]
        return torch.tensor(values, dtype=torch.float64)


def examine(trainer: Any, prompts: list[list[int]] | None = None) -> list[Finding]:
    """Likely causes of a disagreement, likeliest first. A collective, to be called between two optimizer steps.

    Args:
        prompts: token ids to generate from; by default those of the newest rollouts.
    """
    evidence = gather_evidence(trainer, prompts)
    return diagnose(evidence) if evidence is not None else _from_settings(trainer)


def _from_settings(trainer: Any) -> list[Finding]:
    """What the settings alone give cause to suspect, where no engine in this process can be asked."""
    given = SamplingSettings.of(effective_sampling(trainer.args))
    unmeasured = "the engine is not in this process, so it was not measured"
    found = [
        finding(cause, f"{', '.join(f'{name}={value}' for name, value in settings.items())} is set; {unmeasured}")
        for cause, settings in (("truncated sampling", given.truncation), ("penalty or logit bias", given.penalties))
        if settings
    ]
    if dropout := active_dropout(trainer.model):
        found.append(
            finding("dropout active in the actor", f"it is on in {', '.join(each.where for each in dropout[:3])}; {unmeasured}")
        )
    return found or [finding("unknown", unmeasured)]


def gather_evidence(trainer: Any, prompts: list[list[int]] | None = None) -> Evidence | None:
    """What `diagnose` looks at, or None where no colocated engine can be asked. A collective."""
    engine = getattr(trainer, "vllm_generation", None)
    own = prompts if prompts is not None else trainer.monitor.newest_prompts()
    prompts = ranks.from_main(trainer.accelerator, own[:ROWS])
    if not hasattr(engine, "score") or not prompts:
        return None
    with trainer.phase_times.phase("diagnosis", whole=True), torch.random.fork_rng(), torch.no_grad():
        rows = _generate(trainer, engine, (prompts * ROWS)[:ROWS])
        return _evidence(trainer, engine, rows)


def _generate(trainer: Any, engine: Any, prompts: list[list[int]]) -> ProbeRows:
    """Fresh rollouts of the main process's engine, weights pushed first if the trainer holds them to be old."""
    if trainer.state.global_step != trainer._last_loaded_step:
        engine.sync_weights()
        trainer._last_loaded_step = trainer.state.global_step
    limit, engine.max_completion_length = engine.max_completion_length, min(engine.max_completion_length, TOKENS)
    try:
        _, completions, logprobs, _ = engine.generate(prompts, None, 1)
    finally:
        engine.max_completion_length = limit
    return ranks.from_main(trainer.accelerator, ProbeRows(prompts, completions, [[v[0] for v in row] for row in logprobs]))


def _evidence(trainer: Any, engine: Any, rows: ProbeRows) -> Evidence:
    model, settings = trainer.model, SamplingSettings.of(engine.sampling_params)
    mu, loss = rows.mu, _loss_logps(trainer, rows, training=True)
    steady = _loss_logps(trainer, rows, training=False)
    with _mode(model, training=False):
        actor = _look(model, rows, settings)
        base = None
        if is_peft_model(model):
            with model.disable_adapter():
                base = _look(model, rows, settings)
    given = {name: residual(mu, values) for name, values in actor.logps.items()}
    fits = [fitted_temperature(actor.logits, actor.ids, logps) for logps in (mu, steady)]
    given["fitted"] = residual(mu, actor.at(fits[0]))
    if base is not None:
        given["adapter off"] = residual(mu, base.logps["plain"])
    scored = engine.score([p + c for p, c in zip(rows.prompts, rows.completions, strict=True)])
    asked = None
    if scored is not None:
        asked = torch.tensor([v for row, c in zip(scored, rows.completions, strict=True) for v in row[len(row) - len(c) :]])
    difference = loss.double() - mu
    difference = difference[torch.isfinite(difference)]
    stale, compared = engine.stale_parameters()
    return Evidence(
        tokens=len(mu),
        engine_dtype=engine.engine_dtype,
        actor_dtype=engine.actor_dtype,
        actor=residual(mu, loss),
        bias=float(difference.mean()) if len(difference) else 0.0,
        probability=residual(mu.exp(), loss.exp()),
        largest=float(difference.abs().max()) if len(difference) else 0.0,
        padding=residual(steady, _expected(trainer, actor)),
        hypotheses=given,
        model=None if asked is None else residual(asked, actor.at(1.0)),
        base=None if asked is None or base is None else residual(asked, base.at(1.0)),
        dropout=residual(loss, steady),
        dropout_modules=tuple(each.where for each in active_dropout(model)),
        head=engine.head_difference(),
        tied=bool(getattr(trainer.model.config, "tie_word_embeddings", False)),
        stale=tuple(stale),
        compared=compared,
        log_kept_mass=actor.log_kept_mass,
        truncation=settings.truncation,
        penalties=settings.penalties,
        restrictions=settings.restrictions,
        fitted=(fits[0], fits[1]),
        temperature=settings.temperature,
        corrected=corrected_sampling(trainer) is not None,
        pushes=f"; {engine.pushes} push(es) so far, optimizer step {trainer.state.global_step}",
    )


def _expected(trainer: Any, actor: "_Look") -> torch.Tensor:
    """(N,): what the loss should see, made row by row."""
    corrected = corrected_sampling(trainer)
    if corrected is None:
        return actor.at(trainer.temperature)
    return actor.logps["truncated" if corrected.truncation else "penalised"]


@dataclass(frozen=True)
class _Look:
    """The actor's view of all completion tokens (N,): logits (N, V) before the temperature, ids, log-probs by hypothesis."""

    logits: torch.Tensor
    ids: torch.Tensor
    logps: dict[str, torch.Tensor]
    log_kept_mass: float

    def at(self, temperature: float) -> torch.Tensor:
        return (self.logits / temperature).log_softmax(dim=-1).gather(-1, self.ids[:, None]).squeeze(-1)


def _look(model: Any, rows: ProbeRows, settings: SamplingSettings) -> _Look:
    logits, ids, logps, kept = [], [], [], []
    for prompt, completion in zip(rows.prompts, rows.completions, strict=True):  # row by row: no padding to think of
        tokens = torch.tensor([prompt + completion], device=model.device)
        row = model(input_ids=tokens, attention_mask=torch.ones_like(tokens)).logits[0, len(prompt) - 1 : -1].float().cpu()
        token = torch.tensor(completion)
        logits.append(row)
        ids.append(token)
        logps.append(hypotheses(row, token, prompt, settings))
        kept.append(log_kept_mass(row / settings.temperature, settings))
    by_name = {name: torch.cat([each[name] for each in logps]) for name in logps[0]}
    return _Look(torch.cat(logits), torch.cat(ids), by_name, float(torch.cat(kept).mean()))


def _loss_logps(trainer: Any, rows: ProbeRows, training: bool) -> torch.Tensor:
    """(N,): log-probs by the method that the loss uses; in its mode, training, or without dropout."""
    from trl.trainer.utils import pad

    device = trainer.accelerator.device
    prompts = [torch.tensor(ids, device=device) for ids in rows.prompts]
    completions = [torch.tensor(ids, device=device) for ids in rows.completions]
    ids = [pad(prompts, trainer._tokenizer.pad_token_id, "left"), pad(completions, trainer._tokenizer.pad_token_id, "right")]
    mask = [pad([torch.ones_like(x) for x in side], 0, which) for side, which in ((prompts, "left"), (completions, "right"))]
    with _mode(trainer.model, training):
        score = trainer._get_per_token_logps_and_entropies
        logps = score(trainer.model, torch.cat(ids, 1), torch.cat(mask, 1), ids[1].size(1), batch_size=len(prompts))[0]
    return logps[mask[1].bool()].float().cpu()


@contextmanager
def _mode(model: Any, training: bool) -> Iterator[None]:
    was = model.training
    model.train(training)
    try:
        yield
    finally:
        model.train(was)
