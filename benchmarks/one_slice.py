"""One slice of one group, as stock TRL's rows and as a tree, attended to branch by branch and with a dense mask: seconds, peak
memory, and how far log-probs and gradients are apart.

    python benchmarks/one_slice.py 512 8 256     # prompt, rollouts to a prompt, longest completion

TRL's side is its log-prob method at the width of a generation batch of eight slices: the old pass, then forward and backward.
Ours is the forward over the tree and its backward; the dense mask goes to the same kernel, and is there for comparison. CPU time on one thread, float32, the model of train_side.py; minutes at most."""

import argparse
import inspect
import random
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from types import MethodType, SimpleNamespace
from typing import Any
from unittest.mock import patch

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
    from grpo_ext.logprobs import tree_forward

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
        options = {"attention": "sdpa", "dtype": torch.float32, "compute_entropy": True}
        with _trl.labelled_positions_only():
            return tree_forward.score_as_trees(method, model, *rows, **options)[0]

    def dense(*rows: Any) -> torch.Tensor:
        masks = {"attention_inputs": lambda layout, *_: {"attention_mask": layout.dense_mask()}}
        with patch.multiple(tree_forward, **masks):
            return tree(*rows)

    def measure(score: Any, rows: tuple) -> tuple[float, float, torch.Tensor, torch.Tensor]:
        model.zero_grad()
        with PeakMemory() as memory:
            start = time.process_time()
            logps = score(*rows)
            logps.sum().backward()
            seconds = time.process_time() - start
        grads = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
        return seconds, memory.mib, logps.detach(), grads

    for score in (stock, tree, dense):
        measure(score, make_rows(16, 4, 16, 0))
    rows = make_rows(options.prompt, options.group, options.cap, options.seed)
    s, m, logps, grads = measure(stock, rows)
    print(f"TRL's rows         {s:6.2f} s {m:7.0f} MiB")
    for name, score in (("branch by branch", tree), ("dense mask", dense)):
        own_s, own_m, own_logps, own_grads = measure(score, rows)
        apart, gradient = (logps - own_logps).abs().max(), (grads - own_grads).norm() / grads.norm()
        print(f"{name:<19}{own_s:6.2f} s {own_m:7.0f} MiB", f"{own_s / s:7.3f} {own_m / m:7.3f}", end="   ")
        print(f"log-probs apart {float(apart):.1e}, gradient {float(gradient):.1e} relative")


if __name__ == "__main__":
    main()
