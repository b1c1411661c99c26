"""What the ranks do in `test_consistency_two_ranks`. Each function runs on every rank and returns something JSON can hold."""

from pathlib import Path
from typing import Any

import torch

from tests.distributed.jobs import _trainer

ROWS, WIDTH = 12, 40


def rows_of(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(seed)
    mu = -3 * torch.rand(ROWS, WIDTH, dtype=torch.float64)
    pi = (mu + 0.2 * torch.randn(ROWS, WIDTH, dtype=torch.float64)).clamp(max=0)
    mu[0, 0], pi[5, 1], mu[7, 2] = torch.nan, torch.nan, -torch.inf
    return mu, pi, torch.rand(ROWS, WIDTH) < 0.8


def watch(out: str) -> dict[str, Any]:
    """A monitor fed with this rank's half of some rows, over two steps and a log interval."""
    from accelerate import Accelerator

    from grpo_ext.consistency.monitor import ProbDiffMonitor

    accelerator = Accelerator(cpu=True)
    monitor = ProbDiffMonitor(accelerator)
    mine = slice(accelerator.process_index, None, accelerator.num_processes)
    reports = []
    for step in (1, 2):
        mu, pi, mask = rows_of(step)
        for part in (slice(0, 3), slice(3, 6)):
            rows = {"sampling_per_token_logps": mu[mine][part], "old_per_token_logps": pi[mine][part]}
            rows |= {"prompt_ids": torch.ones(3, 2), "prompt_mask": torch.ones(3, 2)}
            monitor.observe("train", step - 1, rows, mask[mine][part], None)
        reports.append(monitor.close(step).metrics)
    return {"reports": reports, "logged": monitor.drain("train"), "ranks": accelerator.num_processes}


def stop_and_dump(model: str, out: str, **run: Any) -> dict[str, Any]:
    """The real engine samples from the three likeliest tokens: a warning with its cause, dumps, and a stop at the second step."""
    import logging

    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("grpo_ext.consistency.callback").addHandler(handler)
    trainer = _trainer(
        model, out, max_steps=4, top_k=3, prob_diff_warn=None, prob_diff_stop=1e-3, prob_diff_patience=2,
        enable_token_level_prob_diff=True, prob_diff_save_dir=str(Path(out) / "dumps"), **run,
    )  # fmt: skip
    trainer.train()
    return {
        "step": trainer.state.global_step,
        "said": said,
        "dumps": sorted(path.name for path in (Path(out) / "dumps").iterdir()),
        "checkpoint": (Path(out) / "checkpoint-2").is_dir(),
        "tokens": [report.metrics["training/rollout_tokens"] for report in trainer.monitor.reports],
        "engine": type(trainer.model_wrapped).__name__,
    }
