"""Which ZeRO stage a run will have, read from the files that say so: an Accelerate YAML, a DeepSpeed JSON. Imports neither."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_ext.plan.recipe import RecipeError, coerced, read_yaml

OFFLOADS = ("offload_optimizer", "offload_param")


@dataclass(frozen=True)
class Zero:
    """stage 0: none. offload_*: whether it lives in CPU memory. processes: what the launcher's file starts, None if unsaid."""

    stage: int = 0
    offload_optimizer: bool = False
    offload_param: bool = False
    machines: int = 1
    processes: int | None = None


def zero_of(deepspeed: Any, accelerate: Path | None) -> Zero:
    """From the recipe's `deepspeed` (a mapping or a JSON file) and the file given to `accelerate launch`. Raises RecipeError."""
    launcher = read_yaml(accelerate) if accelerate is not None else {}
    try:
        return _zero(deepspeed, launcher)
    except ValueError as error:
        where = "the DeepSpeed settings" if accelerate is None else accelerate
        raise RecipeError(f"The ZeRO stage cannot be read from {where}: {str(error).rstrip('.')}.") from None


def _zero(deepspeed: Any, launcher: dict[Any, Any]) -> Zero:
    settings = _mapping("deepspeed_config", launcher.get("deepspeed_config"))
    if deepspeed is None:
        deepspeed = settings.get("deepspeed_config_file")
    if deepspeed is not None:
        given = deepspeed if isinstance(deepspeed, dict) else _mapping(str(deepspeed), _read_json(Path(str(deepspeed))))
        zero = _mapping("zero_optimization", given.get("zero_optimization"))
        stage, devices = zero.get("stage"), {name: _mapping(name, zero.get(name)).get("device") for name in OFFLOADS}
    else:
        stage, devices = settings.get("zero_stage"), {name: settings.get(f"{name}_device") for name in OFFLOADS}
    return Zero(
        stage=coerced("zero_stage", stage or 0, "int"),
        offload_optimizer=devices["offload_optimizer"] not in (None, "none"),
        offload_param=devices["offload_param"] not in (None, "none"),
        machines=coerced("num_machines", launcher.get("num_machines", 1), "int"),
        processes=coerced("num_processes", launcher.get("num_processes"), "int?"),
    )


def _mapping(name: str, value: Any) -> dict[Any, Any]:
    """`value`, or an empty one where nothing is given. Raises ValueError for anything else."""
    if value is not None and not isinstance(value, dict):
        raise ValueError(f"{name} is {value!r}, and a mapping is needed. Write one `key: value` a line below it")
    return value or {}


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{path}: {getattr(error, 'strerror', None) or error}; its path counts from the folder the run is started in, so "
            "start plan there too"
        ) from None
