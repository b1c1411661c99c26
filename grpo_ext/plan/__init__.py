"""`grpo-ext plan`: the arithmetic of a step, and every rule that fails, from a recipe's YAML. Loads no model and no heavy package.

    recipe      the YAML as settings; fields.json has the defaults, `record` writes it
    arithmetic  the plan: numbers; cycle: generation batches against optimizer windows
    zero        the ZeRO stage; memory: DeepSpeed's estimate, the one part that imports torch
    answer      all of it put together; table: for a person
What must hold is in `grpo_ext.rules`, which `GRPOExtConfig` uses as well.
"""

import json
import sys
from pathlib import Path

from grpo_ext.plan.answer import answer_for


def run_plan(
    config: Path,
    num_processes: int,
    *,
    tensor_parallel: int | None = None,
    as_json: bool = False,
    model: str | None = None,
    device: str | None = None,
    accelerate: Path | None = None,
) -> int:
    """Print the plan of the recipe `config` on `num_processes` ranks; 0 if every rule holds, 1 if one fails or a file is bad."""
    answer = answer_for(config, num_processes, tensor_parallel, model, device, accelerate)
    if as_json:
        json.dump(answer.as_json(), sys.stdout, indent=2)
        print()
    else:
        from rich.console import Console

        from grpo_ext.plan.table import show

        show(Console(highlight=False), answer)
    return 1 if answer.problems else 0
