"""Dumps are whole or absent, bounded in number, and carry the tokens on request."""

import os
import signal
import subprocess
import sys
import time

import numpy as np
import pyarrow.parquet as pq
import pytest

from grpo_ext.consistency.dump import TokenRecords, check_writable, keep_last, write_pair, write_tokens

MASK = np.array([[True, False], [True, True]])


def test_the_twin_has_a_row_for_every_token_that_counts(tmp_path):
    records = TokenRecords(
        token_id=np.array([[5, 6], [7, 8]]),
        rollout_log_prob=np.array([[-0.5, 0], [np.nan, -2]]),
        old_log_prob=np.array([[-0.4, 0], [-1, -3]]),
        version=np.array([3, 4]),
        prompt_id=["a", "b"],
    )
    rows = pq.read_table(write_tokens(tmp_path, 9, MASK, records, lambda i: f"<{i}>")).to_pylist()
    assert [(r["step"], r["sample"], r["position"], r["token_id"], r["token_text"]) for r in rows] == [
        (9, 0, 0, 5, "<5>"), (9, 1, 0, 7, "<7>"), (9, 1, 1, 8, "<8>"),
    ]  # fmt: skip
    assert [(r["policy_version"], r["prompt_id"]) for r in rows] == [(3, "a"), (4, "b"), (4, "b")]
    assert [r["old_log_prob"] for r in rows] == pytest.approx([-0.4, -1, -3])
    assert np.isnan(rows[1]["rollout_log_prob"])


def test_only_the_steps_written_last_stay(tmp_path):
    """The third is the first of a new run in the directory of an old one."""
    for second, step in enumerate((99, 100, 1, 2)):
        for path in write_pair(tmp_path, step, np.zeros((1, 1)), np.ones((1, 1))):
            os.utime(path, (second, second))
    (tmp_path / "prob_diff_step_notes.npy").write_text("mine")
    keep_last(tmp_path, 3)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "prob_diff_step_1.npy", "prob_diff_step_100.npy", "prob_diff_step_2.npy", "prob_diff_step_notes.npy",
        "prob_mask_step_1.npy", "prob_mask_step_100.npy", "prob_mask_step_2.npy",
    ]  # fmt: skip


def test_of_steps_written_at_once_the_higher_number_stays(tmp_path):
    for step in (10, 9):
        for path in write_pair(tmp_path, step, np.zeros((1, 1)), np.ones((1, 1))):
            os.utime(path, (0, 0))
    keep_last(tmp_path, 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["prob_diff_step_10.npy", "prob_mask_step_10.npy"]


WRITER = """
import sys, numpy as np
from grpo_ext.consistency.dump import write_pair
print("ready", flush=True)
while True:
    write_pair(sys.argv[1], 1, np.random.rand(512, 1024), np.ones((512, 1024)))
"""


def test_a_kill_leaves_no_half_file(tmp_path):
    for seed in range(3):
        writer = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE)
        writer.stdout.readline()
        while not (tmp_path / "prob_diff_step_1.npy").exists():
            time.sleep(0.01)
        time.sleep(0.05 + 0.031 * seed)
        os.kill(writer.pid, signal.SIGKILL)
        writer.wait()
        for kind in ("diff", "mask"):
            assert np.load(tmp_path / f"prob_{kind}_step_1.npy", allow_pickle=False).shape == (512, 1024)


def test_where_dumps_may_go(tmp_path):
    assert check_writable(tmp_path / "new", tmp_path / "elsewhere") is None
    assert (tmp_path / "new").is_dir()
    assert check_writable(tmp_path / "out/run/dumps", tmp_path / "out") is None
    assert "does not exist" in check_writable(tmp_path / "typo/dumps", tmp_path / "out")
    (tmp_path / "file").write_text("")
    assert "nothing can be written" in check_writable(tmp_path / "file", tmp_path)
