"""Run a function of a test module on several real processes, and bring back what each rank returned."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]

# Persistence threshold 0: with the default ZeRO-3 would leave parameters below 100,000 elements whole.
ZERO3 = {
    "zero_optimization": {
        "stage": 3,
        "stage3_param_persistence_threshold": 0,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
}


def launch_arguments(folder: Path, *, zero3: bool, processes: int, port: int | None = None) -> list[str]:
    """Command prefix that starts a script under Accelerate: DeepSpeed ZeRO-3, or plain processes under torchrun."""
    port = port or free_port()
    if not zero3:
        return [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={processes}", f"--master_port={port}"]
    (folder / "ds.json").write_text(json.dumps(ZERO3))
    (folder / "accelerate.yaml").write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: DEEPSPEED\nnum_machines: 1\nmachine_rank: 0\n"
        f"num_processes: {processes}\nuse_cpu: false\nmain_training_function: main\n"
        f"deepspeed_config:\n  deepspeed_config_file: {folder / 'ds.json'}\n  zero3_init_flag: true\n"
    )
    return [
        sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(folder / "accelerate.yaml"),
        "--main_process_port", str(port),
    ]  # fmt: skip


def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def kill_tree(pid: int) -> None:
    """SIGKILL a launcher and its ranks, which it starts in sessions of their own."""
    import psutil

    launcher = psutil.Process(pid)
    family = [*launcher.children(recursive=True), launcher]
    for member in family:
        member.kill()
    psutil.wait_procs(family, timeout=30)


# What an engine in this process may have set, and a process of its own must not inherit.
LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def forget_launcher() -> None:
    for name in LAUNCHER_VARIABLES:
        os.environ.pop(name, None)


def environment() -> dict[str, str]:
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in LAUNCHER_VARIABLES and not name.startswith("ACCELERATE_")
    }
    return {**kept, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def start_ranks(target: str, folder: Path, *, zero3: bool, processes: int, arguments: dict[str, Any]) -> subprocess.Popen:
    """Start `module:function(**arguments)` on every rank, output to `folder/output`. A single one needs no launcher."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("rank*.json"):
        old.unlink()
    (folder / "arguments.json").write_text(json.dumps(arguments))
    launcher, own = [sys.executable], {"MASTER_PORT": str(free_port())}  # an engine alone takes a port as well
    if zero3 or processes > 1:
        launcher, own = launch_arguments(folder, zero3=zero3, processes=processes), {}
    with open(folder / "output", "w") as output:
        return subprocess.Popen(
            [*launcher, __file__, target, str(folder)],
            cwd=ROOT,
            env=environment() | own,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def run_ranks(
    target: str, folder: Path, *, zero3: bool = True, processes: int = 2, timeout: float = 300, **arguments: Any
) -> list[Any]:
    """Call `module:function(**arguments)` on every rank; returns the JSON-able results by rank.

    Raises:
        AssertionError: with the end of the output, if a rank failed or the time was up (a hang is a failure).
    """
    process = start_ranks(target, folder, zero3=zero3, processes=processes, arguments=arguments)
    try:
        process.wait(timeout)
    except subprocess.TimeoutExpired:
        raise AssertionError(f"{target} did not end within {timeout} s:\n{_end_of_output(folder)}") from None
    finally:  # whoever interrupts the tests leaves no rank behind: the launcher has a session of its own
        if process.poll() is None:
            kill_tree(process.pid)
            process.wait()
    assert process.returncode == 0, f"{target} failed:\n{_end_of_output(folder)}"
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(processes)]


def kill_ranks(
    target: str, folder: Path, signs: Sequence[Path], *, zero3: bool, processes: int, timeout: float = 300, **arguments: Any
) -> None:
    """As `run_ranks`, but all processes are killed by SIGKILL once the files `signs` are there."""
    process = start_ranks(target, folder, zero3=zero3, processes=processes, arguments=arguments)
    try:
        deadline = time.monotonic() + timeout
        while not all(sign.exists() for sign in signs):
            assert process.poll() is None, f"{target} ended before it was killed:\n{_end_of_output(folder)}"
            assert time.monotonic() < deadline, f"{target} gave no sign within {timeout} s:\n{_end_of_output(folder)}"
            time.sleep(0.2)
    finally:
        if process.poll() is None:
            kill_tree(process.pid)
        process.wait()


def _end_of_output(folder: Path) -> str:
    return (folder / "output").read_text(errors="replace")[-6000:]


def _main() -> None:
    import importlib

    target, folder = sys.argv[1], Path(sys.argv[2])
    module, function = target.split(":")
    result = getattr(importlib.import_module(module), function)(**json.loads((folder / "arguments.json").read_text()))
    (folder / f"rank{os.environ.get('RANK', '0')}.json").write_text(json.dumps(result))
    _leave()


def _leave() -> None:
    """Gloo's threads may abort a process that ends with its group alive; vLLM in the process takes the group down by itself."""
    import torch

    parallel = sys.modules.get("vllm.distributed.parallel_state")
    engine = parallel is not None and parallel.model_parallel_is_initialized()
    if torch.distributed.is_initialized() and not engine:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    _main()
