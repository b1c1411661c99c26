"""Consistency on two real ranks: the aggregates of one, one dump for both, one decision, and a probe that cannot hang."""

import numpy as np
import pytest

from grpo_ext.consistency.sums import consistency_metrics, consistency_sums
from tests.distributed.consistency_jobs import ROWS, rows_of
from tests.distributed.launch import run_ranks

pytestmark = [pytest.mark.distributed]


def test_two_ranks_have_the_aggregates_of_one(tmp_path):
    reports = run_ranks("tests.distributed.consistency_jobs:watch", tmp_path, zero3=False, timeout=120, out=str(tmp_path))
    each = [consistency_sums(*rows_of(step)) for step in (1, 2)]
    for report in reports:
        assert report["ranks"] == 2
        for metrics, whole in zip(report["reports"], each, strict=True):
            assert metrics == pytest.approx(consistency_metrics(whole), rel=1e-12, abs=1e-12)
        logged = report["logged"]
        assert logged.pop("training/rollout_policy_version") == 1
        assert logged == pytest.approx(consistency_metrics(each[0] + each[1]), rel=1e-12, abs=1e-12)
    assert len(rows_of(1)[0]) == ROWS


@pytest.mark.engine
@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.slow)], ids=["an engine each", "one engine"])
def test_one_dump_one_decision_and_a_cause(models, tmp_path, size):
    reports = run_ranks(
        "tests.distributed.consistency_jobs:stop_and_dump", tmp_path, zero3=True, timeout=300, model=models("qwen2"),
        out=str(tmp_path / "out"), vllm_tensor_parallel_size=size,
    )  # fmt: skip
    for rank, run in enumerate(reports):
        assert (run["step"], run["checkpoint"], run["engine"]) == (2, True, "DeepSpeedEngine")
        assert run["dumps"] == [f"prob_{kind}_step_{step}.npy" for kind in ("diff", "mask") for step in (1, 2)]
        said = [text for text in run["said"] if "Training stops with a checkpoint" in text]
        assert len(said) == (rank == 0)
        if rank == 0:
            assert "Likely cause: truncated sampling. Evidence: bias -" in said[0]
        diff, mask = (np.load(tmp_path / f"out/dumps/prob_{kind}_step_1.npy", allow_pickle=False) for kind in ("diff", "mask"))
        assert (len(diff), mask.sum()) == (16, run["tokens"][0])
        assert diff[mask].mean() > 1e-3
        for entry in run["times"]:  # the optimizer steps inside DeepSpeed's backward, and is told apart nevertheless
            phases = {name: value for name, value in entry.items() if name.startswith("timing_s/") and name != "timing_s/step"}
            assert sum(phases.values()) == pytest.approx(entry["timing_s/step"], rel=0.05)
            assert phases["timing_s/optimizer"] > 0
