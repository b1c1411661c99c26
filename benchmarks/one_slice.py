"""One slice of one group, as stock TRL's rows and as a tree: seconds, peak memory, and how far log-probs and gradients are apart.

    python benchmarks/one_slice.py 512 8 256     # prompt, rollouts to a prompt, longest completion

TRL's side is its log-prob method at the width of a generation batch of eight slices: the old pass, then forward and backward.
Ours is the forward over the tree and its backward. CPU time on one thread, float32, the model of train_side.py; minutes at most."""

import argparse
import inspect
import random
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from types import MethodType, SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from grpo_ext.quiet import quiet

quiet()

import torch

from benchmarks.replay import lognormal
from benchmarks.train_side import SHAPE, VOCAB, PeakMemory
from grpo_ext import _trl


def make_rows(prompt: int, group: int, cap: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, int]:
    rng, length = random.Random(seed), lognormal(55, 0.8, cap)
    batch = [length(rng) for _ in range(8 * group)]
    T = max(batch)
    ids = torch.randint(3, VOCAB, (group, prompt + T), generator=torch.Generator().manual_seed(seed))
    ids[:, :prompt] = ids[0, :prompt]
    mask = torch.ones_like(ids)
    for row, tokens in zip(mask, batch, strict=False):
        row[prompt + tokens :] = 0
    return ids, mask, T


def make_model() -> tuple[Any, Any]:
    """A model with TRL's fused head, and TRL's log-prob method without a trainer."""
    from transformers import Qwen2Config, Qwen2ForCausalLM
    from trl import GRPOTrainer
    from trl.trainer.utils import add_fused_lm_head

    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(**SHAPE))
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    trainer = SimpleNamespace(accelerator=SimpleNamespace(autocast=nullcontext))
    return model, MethodType(inspect.unwrap(GRPOTrainer._get_per_token_logps_and_entropies), trainer)


def main() -> None:
    from grpo_ext.logprobs.tree_forward import score_as_trees

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("prompt", "group", "cap"):
        parser.add_argument(name, type=int)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    model, method = make_model()
    _trl.serve_trees()

    def stock(*rows: Any) -> torch.Tensor:
        with torch.no_grad():
            method(model, *rows)
        return method(model, *rows, compute_entropy=True)[0]

    def tree(*rows: Any) -> torch.Tensor:
        with _trl.labelled_positions_only():
            return score_as_trees(method, model, *rows, attention="sdpa", dtype=torch.float32, compute_entropy=True)[0]

    def measure(score: Any, rows: tuple) -> tuple[float, float, torch.Tensor, torch.Tensor]:
        model.zero_grad()
        with PeakMemory() as memory:
            start = time.process_time()
            logps = score(*rows)
            logps.sum().backward()
            seconds = time.process_time() - start
        grads = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
        return seconds, memory.mib, logps.detach(), grads

    for score in (stock, tree):
        measure(score, make_rows(16, 4, 16, 0))
    rows = make_rows(options.prompt, options.group, options.cap, options.seed)
    (s, m, logps, grads), (own_s, own_m, own_logps, own_grads) = (measure(score, rows) for score in (stock, tree))
    apart, gradient = (logps - own_logps).abs().max(), (grads - own_grads).norm() / grads.norm()
    print(f"seconds {own_s:.2f} / {s:.2f} = {own_s / s:.3f}   peak MiB {own_m:.0f} / {m:.0f} = {own_m / m:.2f}", end="   ")
    print(f"log-probs apart {float(apart):.1e}, gradient {float(gradient):.1e} relative")


if __name__ == "__main__":
    main()
