"""Actor, reference and engine on two real ranks under ZeRO-3: the floor, the bits of the base weights, what is saved."""

import os
import subprocess
import time

import pytest
import torch

from tests.distributed import launch
from tests.distributed.launch import ROOT, environment, kill_tree, launch_arguments, run_ranks
from tests.floor import worst

pytestmark = [pytest.mark.engine, pytest.mark.distributed]

FULL = {"beta": 0.1}
LORA = {"adapter": "lora", "beta": 0.1}
TENSOR_PARALLEL = {"vllm_tensor_parallel_size": 2}


def assert_floor(reports, name):
    for report in reports:
        run = report[name]
        found = worst(run["floor"])
        print(f"\n{name}: mean |dp| {found['mean_prob']:.1e}, max |dlogp| {found['max_logp']:.1e}")
        assert [entry["version"] for entry in run["floor"]] == [0, 1, 2, 3]
        assert found["mean_prob"] <= 1e-6 and found["max_logp"] <= 1e-5


def assert_zero3(reports, name):
    for report in reports:
        run = report[name]
        assert (run["distributed_type"], run["zero_stage"], run["engine"]) == ("DEEPSPEED", 3, "DeepSpeedEngine")
        assert run["partitioned"] == run["parameters"] > 0


def test_two_engines(models, tmp_path):
    """One engine a rank; a bucket smaller than the embedding, so that a push takes many."""
    runs = {"full": {**FULL, "weight_sync_bucket_mb": 0.02}, "lora": {**LORA, "weight_sync_bucket_mb": 0.02}}
    reports = run_ranks("tests.distributed.jobs:floors", tmp_path, model=models("qwen2"), out=str(tmp_path), runs=runs)
    for name in runs:
        assert_zero3(reports, name)
        assert_floor(reports, name)
    for report in reports:
        assert report["full"]["reference_partitioned"] == report["full"]["parameters"]
        assert report["lora"]["frozen"] > 0 and report["lora"]["frozen_changed"] == []
        assert report["full"]["kl"][0] == pytest.approx(0, abs=1e-6) and report["full"]["kl"][3] > 0
        assert report["lora"]["kl"][3] > 0


def test_one_tensor_parallel_engine(models, tmp_path):
    runs = {"full": {**FULL, **TENSOR_PARALLEL}, "lora": {**LORA, **TENSOR_PARALLEL}}
    reports = run_ranks("tests.distributed.jobs:floors", tmp_path, model=models("qwen2"), out=str(tmp_path), runs=runs)
    for name in runs:
        assert_floor(reports, name)


@pytest.mark.slow
def test_other_adapters(models, tmp_path):
    """What an adapter needs to be merged is gathered with it, whatever its kind."""
    runs = {name: {"adapter": name} for name in ("dora", "lora_bias", "ia3")}
    reports = run_ranks("tests.distributed.jobs:floors", tmp_path, model=models("qwen2"), out=str(tmp_path), runs=runs)
    for name in runs:
        assert_zero3(reports, name)
        assert_floor(reports, name)
        assert all(report[name]["frozen_changed"] == [] for report in reports)


@pytest.mark.slow
@pytest.mark.parametrize("adapter", [None, "moe_experts"])
def test_a_mixture_of_experts(models, tmp_path, adapter):
    runs = {"moe": {"adapter": adapter} if adapter else {}}
    reports = run_ranks("tests.distributed.jobs:floors", tmp_path, model=models("qwen3_moe"), out=str(tmp_path), runs=runs)
    assert_zero3(reports, "moe")
    assert_floor(reports, "moe")


def test_tensor_parallel_beside_another_run_and_after_a_killed_one(models, tmp_path):
    """vLLM's shared memory is named after the run here, so neither a living nor a dead neighbour is in the way."""
    import json

    folder = tmp_path / "other"
    folder.mkdir()
    (folder / "arguments.json").write_text(json.dumps({"model": models("qwen2"), "out": str(folder), "started": str(folder)}))
    command = [
        *launch_arguments(folder, zero3=True, processes=2),
        launch.__file__,
        "tests.distributed.jobs:wait_to_be_killed",
        str(folder),
    ]
    other = subprocess.Popen(
        command, cwd=ROOT, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        deadline = time.monotonic() + 240
        while len(list(folder.glob("up*"))) < 2:
            assert other.poll() is None and time.monotonic() < deadline, "the other run did not come up"
            time.sleep(0.5)
        runs = {"beside": dict(TENSOR_PARALLEL)}
        arguments = dict(model=models("qwen2"), out=str(tmp_path), runs=runs)
        assert_floor(run_ranks("tests.distributed.jobs:floors", tmp_path / "a", **arguments), "beside")
    finally:
        kill_tree(other.pid)
        other.wait()
    assert [name for name in os.listdir("/dev/shm") if "cpushm" in name] == []
    runs = {"after": dict(TENSOR_PARALLEL)}
    assert_floor(run_ranks("tests.distributed.jobs:floors", tmp_path / "b", **{**arguments, "runs": runs}), "after")


def test_what_is_saved_opens_in_plain_transformers(models, tmp_path):
    from peft import PeftModel
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    runs = {"full": {}, "lora": {"adapter": "lora"}}
    reports = run_ranks("tests.distributed.jobs:save", tmp_path, model=models("qwen2"), out=str(tmp_path), runs=runs)
    ids = torch.arange(5, 25).reshape(1, 20)
    for name in runs:
        directory, logits = reports[0][name]["directory"], torch.tensor(reports[0][name]["logits"])
        if name == "full":
            model = AutoModelForCausalLM.from_pretrained(directory)
        else:
            assert all(t.numel() > 0 for t in load_file(f"{directory}/adapter_model.safetensors").values())
            model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(models("qwen2")), directory)
        with torch.no_grad():
            torch.testing.assert_close(model(input_ids=ids).logits[0, :, :95], logits, atol=1e-5, rtol=0)
        assert AutoTokenizer.from_pretrained(directory).eos_token == "<eos>"
