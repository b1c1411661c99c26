"""Two machines on one: two network namespaces joined by a veth pair, a process in each, started as on two hosts."""

import json
import os
import shutil
import subprocess
import sys

import pytest
import yaml

from tests.distributed import launch
from tests.distributed.launch import ROOT, ZERO3, environment, kill_tree, run_ranks

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

RUN = {"ranks": True, "per_device_train_batch_size": 2, "max_steps": 4, "save_strategy": "no", "beta": 0.1}
PORT = 29543  # free for sure: nothing else lives in the namespaces


def ip(*arguments):
    return subprocess.run(["ip", *arguments], capture_output=True, text=True)


@pytest.fixture
def hosts():
    """Names of two namespaces that reach each other at 192.0.2.1 and 192.0.2.2, and nothing else. Deleted in any case."""
    if sys.platform != "linux" or shutil.which("ip") is None:
        pytest.skip("network namespaces need Linux and the `ip` command (iproute2)")
    names = [f"grpo-ext-{os.getpid()}-{number}" for number in (0, 1)]
    commands = [["netns", "add", name] for name in names]
    commands += [["link", "add", "veth0", "netns", names[0], "type", "veth", "peer", "name", "veth0", "netns", names[1]]]
    for number, name in enumerate(names, start=1):
        commands += [["-n", name, "address", "add", f"192.0.2.{number}/30", "dev", "veth0"]]
        commands += [["-n", name, "link", "set", device, "up"] for device in ("lo", "veth0")]
    try:
        for command in commands:
            result = ip(*command)
            if result.returncode:
                pytest.skip(f"network namespaces are not allowed here: `ip {' '.join(command)}`: {result.stderr.strip()}")
        yield names
    finally:
        for name in names:
            ip("netns", "delete", name)  # and with it its end of the pair, and so the other


def start(host, rank, folder):
    command = [
        "ip", "netns", "exec", host, sys.executable, "-m", "accelerate.commands.launch",
        "--config_file", str(folder / "two_nodes.yaml"), "--num_processes", "2", "--machine_rank", str(rank),
        "--main_process_ip", "192.0.2.1", "--main_process_port", str(PORT),
        launch.__file__, "tests.resume.runs:in_turn", str(folder),
    ]  # fmt: skip
    # The name of this machine leads to an address that no namespace has, so gloo is told the device.
    with open(folder / f"output{rank}", "w") as output:
        return subprocess.Popen(
            command,
            cwd=ROOT,
            env={**environment(), "GLOO_SOCKET_IFNAME": "veth0"},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def on_two_hosts(hosts, folder, timeout=300, **arguments):
    """Run on both hosts from the recipe's file, ZeRO-3 made to partition a tiny model too."""
    recipe = yaml.safe_load((ROOT / "recipes/accelerate/multi_node_zero3.yaml").read_text())
    kept = {name: recipe["deepspeed_config"][name] for name in ("zero3_init_flag", "deepspeed_multinode_launcher")}
    del recipe["mixed_precision"]  # Accelerate refuses it, as much of the rest, beside a file of DeepSpeed's
    folder.mkdir()
    (folder / "ds.json").write_text(json.dumps(ZERO3))
    recipe |= {"use_cpu": False, "deepspeed_config": {**kept, "deepspeed_config_file": str(folder / "ds.json")}}
    (folder / "two_nodes.yaml").write_text(yaml.safe_dump(recipe))
    (folder / "arguments.json").write_text(json.dumps(arguments))
    processes = []
    try:
        processes += [start(host, rank, folder) for rank, host in enumerate(hosts)]
        for process in processes:
            process.wait(timeout)
    finally:
        for process in processes:
            if process.poll() is None:
                kill_tree(process.pid)
            process.wait()
    for rank, process in enumerate(processes):
        assert process.returncode == 0, (folder / f"output{rank}").read_text()[-6000:]


def reports(out):
    return [json.loads((out / f"report{rank}.json").read_text()) for rank in (0, 1)]


def test_two_hosts_train_as_two_ranks_on_one(hosts, models, tmp_path):
    model, whole, apart = models("qwen2"), tmp_path / "one host", tmp_path / "two hosts"
    run_ranks("tests.resume.runs:in_turn", tmp_path / "a", model=model, runs=[{**RUN, "out": str(whole)}])
    on_two_hosts(hosts, tmp_path / "b", model=model, runs=[{**RUN, "out": str(apart)}])
    for one, two in zip(reports(whole), reports(apart), strict=True):
        assert two["distributed_type"] == "DEEPSPEED" and two["partitioned"] > 0 and two["step"] == 4
        assert [entry["loss"] for entry in two["logs"][:4]] == [entry["loss"] for entry in one["logs"][:4]]
        assert one["weights"] == two["weights"] and one["logs"] == two["logs"]


def test_the_namespaces_are_apart_from_the_world_and_joined_to_each_other(hosts):
    assert all(ip("-n", name, "route", "get", "192.0.2.2").returncode == 0 for name in hosts)
    assert all(ip("-n", name, "route", "get", "198.51.100.1").returncode != 0 for name in hosts)
    assert set(hosts) <= set(ip("netns", "list").stdout.split())
