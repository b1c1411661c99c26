"""Trees on two real ranks, under ZeRO-3 and under DDP: the training of stock TRL, and no hang where the ranks' trees differ."""

import pytest

from tests.distributed.launch import run_ranks
from tests.distributed.test_window_two_ranks import HALF, SGD, assert_same

pytestmark = [pytest.mark.distributed]

TREES = {**HALF, **SGD, "shared_prompt": True}
RUNS = {
    "half": TREES,
    "two iterations": {**TREES, "steps_per_generation": 3, "num_iterations": 2},
    "reference, tokens": {**TREES, "beta": 0.1, "logps_max_tokens": 24},
    "adapter": {**TREES, "beta": 0.1, "adapter": "lora"},
    "checkpointing": {**TREES, "gradient_checkpointing": True},
    "cheaper": {**TREES, "shared_prompt": "auto"},
}


@pytest.mark.parametrize("zero3", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["zero3", "ddp"])
def test_two_ranks_train_as_stock_trl_does(models, tmp_path, zero3):
    arguments = dict(model=models("qwen2"), out=str(tmp_path), runs=RUNS)
    for report in run_ranks("tests.distributed.window_jobs:compare", tmp_path, zero3=zero3, timeout=480, **arguments):
        for name, run in report.items():
            if zero3:
                assert run["engine"] == "DeepSpeedEngine" and run["partitioned"] > 0
            assert_same(run)
            stock, ours = (forwards["grad"]["tokens"] for forwards in run["forwards"])
            assert ours < 0.7 * stock or name == "cheaper"


def test_trees_as_uneven_as_can_be_do_not_hang(models, tmp_path):
    """One rank's old pass takes a row of 1,000 tokens alone; the other's fits into fewer forwards, and it waits by idle ones."""
    run = {**TREES, "beta": 0.1, "logps_max_tokens": 1024, "stock": False, "max_completion_length": 1000}
    reports = run_ranks(
        "tests.distributed.window_jobs:compare",
        tmp_path,
        timeout=240,
        model=models("qwen2"),
        out=str(tmp_path),
        runs={"uneven": run},
        rollouts={"by_rank": [[1000, 10, 10, 10], [10, 10, 10, 10]]},
    )
    counts = [report["uneven"]["forwards"][0] for report in reports]
    for kind in ("grad", "no_grad", "reference"):
        assert counts[0][kind]["forwards"] == counts[1][kind]["forwards"] > 0
    assert counts[0]["no_grad"]["tokens"] > 2 * counts[1]["no_grad"]["tokens"]
