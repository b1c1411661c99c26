"""Rewards on two real ranks: the KL in the reward trains as stock TRL on the penalised reward, and odd rows of one rank hurt none."""

import math

import pytest

from tests.distributed.launch import run_ranks

pytestmark = [pytest.mark.distributed]

HALF = {"gradient_accumulation_steps": 2, "steps_per_generation": 4, "max_steps": 4}
KL = {"kl_in_reward": True, "kl_in_reward_coef": 0.5, "optim": "sgd", "learning_rate": 0.05, "max_grad_norm": 0.0, **HALF}
RUNS = {
    "full": {**KL, "kl_in_reward_target": 0.01, "kl_in_reward_horizon": 64},
    "adapter": {**KL, "adapter": "lora"},
}


def values(history, name):
    return [entry[name] for entry in history if name in entry]


@pytest.mark.parametrize("zero3", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["zero3", "ddp"])
def test_stock_trl_trains_alike_on_the_penalised_reward(models, tmp_path, zero3):
    reports = run_ranks(
        "tests.distributed.rewards_jobs:penalised", tmp_path, zero3=zero3, timeout=300, model=models("qwen2"),
        out=str(tmp_path), runs=RUNS,
    )  # fmt: skip
    wrapper = "DeepSpeedEngine" if zero3 else "DistributedDataParallel"
    for name in RUNS:
        for report in reports:
            run = report[name]
            stock, ours = run["histories"]
            assert run["engine"] == wrapper and len(stock) == len(ours) == 4
            for metric in ("grad_norm", "loss", "reward"):
                assert values(ours, metric) == pytest.approx(values(stock, metric), rel=1e-5, abs=1e-5)
            assert run["weights_apart"] <= 1e-5
            if name == "full" and zero3:
                assert run["reference"] == "DeepSpeedEngine" and run["reference_partitioned"] > 0
        first, second = (report[name]["histories"][1] for report in reports)
        for metric in ("kl_in_reward/kl", "kl_in_reward/coef"):
            assert values(first, metric) == values(second, metric)
        # The KL is exact over both ranks: the mean of all rows' penalties, divided by the coefficient.
        for generation, (kl, coefficient) in enumerate(
            zip(values(first, "kl_in_reward/kl"), values(first, "kl_in_reward/coef"), strict=True)
        ):
            rows = [row for row in reports[0][name]["rewards"][generation] if row[2]]
            assert kl == pytest.approx(-sum(row[1] for row in rows) / len(rows) / coefficient, rel=1e-4, abs=1e-7)
        assert abs(values(first, "kl_in_reward/kl")[-1]) > 1e-4
    coefficients = values(reports[0]["full"]["histories"][1], "kl_in_reward/coef")
    assert coefficients == pytest.approx([0.5, 0.5 * (1 - 0.2 * 32 / 64)])  # KL 0 at first, below the target


@pytest.mark.parametrize("zero3", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["zero3", "ddp"])
def test_odd_rows_of_one_rank(models, tmp_path, zero3):
    reports = run_ranks(
        "tests.distributed.rewards_jobs:odd", tmp_path, zero3=zero3, timeout=240, model=models("qwen2"), out=str(tmp_path)
    )
    for report in reports:
        assert report["finite"]
        for entry in report["history"]:
            assert all(math.isfinite(value) for value in entry.values() if value is not None)
            if "rows/empty" in entry:
                names = ("rows/empty", "rewards/infinite", "rewards/missing", "rewards/none", "rows/masked")
                assert [entry[name] for name in names] == [1.0, 1.0, 1.0, 2.0, 0.0]
        assert len(report["history"]) == 4
    assert (tmp_path / "output").read_text().count("What the first loss is given") == 1  # one node, one table
