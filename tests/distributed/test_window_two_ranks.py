"""The window check on two real ranks, under ZeRO-3 and under DDP: the training of stock TRL, and no hang on uneven lengths."""

import pytest

from tests.distributed.launch import run_ranks

pytestmark = [pytest.mark.distributed]

SGD = {"optim": "sgd", "learning_rate": 0.05, "max_grad_norm": 0.0, "max_steps": 4}
HALF = {"gradient_accumulation_steps": 2, "steps_per_generation": 4}
RUNS = {
    "free": {"gradient_accumulation_steps": 2, "steps_per_generation": 2},
    "half": HALF,
    "two iterations, not a multiple": {"gradient_accumulation_steps": 2, "steps_per_generation": 3, "num_iterations": 2},
    "reference, budget, tokens": {**HALF, "beta": 0.1, "old_logps_budget": 3, "logps_max_tokens": 24},
    "adapter": {**HALF, "beta": 0.1, "adapter": "lora"},
    "checkpointing": {**HALF, "gradient_checkpointing": True},
}


def losses(history, name):
    return [entry[name] for entry in history]


def assert_same(run):
    stock, ours = run["histories"]
    assert len(stock) == len(ours) == 4
    assert losses(ours, "grad_norm") == pytest.approx(losses(stock, "grad_norm"), rel=1e-5)
    assert losses(ours, "loss") == pytest.approx(losses(stock, "loss"), abs=1e-5)
    assert run["weights_apart"] <= 1e-5


@pytest.mark.parametrize("zero3", [True, False], ids=["zero3", "ddp"])
def test_two_ranks_train_as_stock_trl_does(models, tmp_path, zero3):
    runs = {name: {**SGD, **run} for name, run in RUNS.items()}
    # DeepSpeed wraps its own optimizer; the negative run has steps large enough to matter.
    runs["without the due pass"] = {**SGD, "learning_rate": 0.5, **HALF, "gradient_accumulation_steps": 1, "broken": True}
    reports = run_ranks(
        "tests.distributed.window_jobs:compare",
        tmp_path,
        zero3=zero3,
        timeout=480,
        model=models("qwen2"),
        out=str(tmp_path),
        runs=runs,
    )
    for report in reports:
        for name, run in report.items():
            if zero3:
                assert (run["distributed_type"], run["engine"]) == ("DEEPSPEED", "DeepSpeedEngine") and run["partitioned"] > 0
            else:
                assert (run["distributed_type"], run["engine"]) == ("MULTI_CPU", "DistributedDataParallel")
            stock, ours = run["histories"]
            if name == "without the due pass":
                apart = [abs(a / b - 1) for a, b in zip(losses(ours, "grad_norm"), losses(stock, "grad_norm"), strict=True)]
                assert max(apart) > 1e-3
                continue
            assert_same(run)
        assert losses(report["free"]["histories"][1], "old_logps/rows_recomputed") == [0.0] * 4
        assert losses(report["half"]["histories"][1], "old_logps/rows_recomputed") == [16.0, 0.0, 16.0, 0.0]
    rows = [row for report in reports for row in report["half"]["row_ids"]]
    assert rows == list(range(32))  # 2 ranks, 4 slices of 4 rows: every one is still known by its number


def test_lengths_as_uneven_as_can_be_do_not_hang(models, tmp_path):
    """[1000, 10, 10, 10] on one rank, [10] * 4 on the other, 1,024 tokens to a forward: as many forwards on both."""
    uneven = [[1000, 10, 10, 10], [10, 10, 10, 10]]
    run = {
        **HALF,
        **SGD,
        "beta": 0.1,
        "shared_prompt": False,
        "logps_max_tokens": 1024,
        "stock": False,
        "max_completion_length": 1000,
    }
    reports = run_ranks(
        "tests.distributed.window_jobs:compare",
        tmp_path,
        timeout=240,
        model=models("qwen2"),
        out=str(tmp_path),
        runs={"uneven": run},
        rollouts={"by_rank": uneven},
    )
    counts = [report["uneven"]["forwards"][0] for report in reports]
    for kind in ("no_grad", "reference"):
        assert counts[0][kind]["forwards"] == counts[1][kind]["forwards"] > 0
    assert counts[0]["no_grad"]["rows"] == 2 * 8  # two generations, half of 16 rows due
    assert counts[1]["no_grad"]["rows"] > counts[0]["no_grad"]["rows"]  # the rows of the idle forwards
    assert counts[1]["reference"]["rows"] > counts[0]["reference"]["rows"]
