"""Reading dumps: what is sensible is read, what is damaged is named, and nothing is ever unpickled."""

import os
import pickle
import re

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from grpo_ext.consistency.report.read import DumpError, Problems, find_steps, read_dumps
from tests.report.dumps import write_dump

GOOD = [[0.1, 0.2, 0.3], [0.4, 0.5, 0.6]]


def read(directory):
    problems = Problems()
    dumps = list(read_dumps(find_steps(directory, problems), problems))
    return dumps, problems.lines()


def test_a_good_directory_has_no_problems(tmp_path):
    write_dump(tmp_path, 3, GOOD, [[1, 1, 0], [1, 0, 0]])
    (dump,), problems = read(tmp_path)
    assert problems == []
    assert dump.step == 3
    np.testing.assert_array_equal(dump.diff_BT, np.float32([[0.1, 0.2, 0], [0.4, 0, 0]]))
    np.testing.assert_array_equal(dump.mask_BT, [[True, True, False], [True, False, False]])


def test_steps_are_in_order_of_their_numbers(tmp_path):
    for step in (10, 9, 100, 0):
        write_dump(tmp_path, step, GOOD)
    assert [dump.step for dump in read(tmp_path)[0]] == [0, 9, 10, 100]


def test_steps_may_differ_in_shape(tmp_path):
    write_dump(tmp_path, 1, GOOD)
    write_dump(tmp_path, 2, [[0.1]])
    assert [dump.diff_BT.shape for dump in read(tmp_path)[0]] == [(2, 3), (1, 1)]


def test_float64_and_a_mask_of_integers_are_read(tmp_path):
    np.save(tmp_path / "prob_diff_step_1.npy", np.array(GOOD))
    np.save(tmp_path / "prob_mask_step_1.npy", np.array([[1, 0, 0], [1, 1, 0]]))
    (dump,), problems = read(tmp_path)
    assert problems == []
    np.testing.assert_array_equal(dump.mask_BT, [[True, False, False], [True, True, False]])


def test_without_a_mask_every_value_counts_and_that_is_said(tmp_path):
    for step in range(3):
        write_dump(tmp_path, step, GOOD)
        (tmp_path / f"prob_mask_step_{step}.npy").unlink()
    dumps, problems = read(tmp_path)
    assert all(dump.mask_BT.all() for dump in dumps)
    assert problems == [
        "prob_diff_step_0.npy and 2 more: no prob_mask_step_*.npy beside it, so padding counts too, and the mean may be too low"
    ]


def cut(path):
    path.write_bytes(path.read_bytes()[:-5])


@pytest.mark.parametrize(
    "spoil, said",
    [
        (lambda d, m: cut(d), r"prob_diff_step_1\.npy: .*cut short"),
        (lambda d, m: cut(m), r"prob_mask_step_1\.npy: .*cut short"),
        (lambda d, m: d.write_bytes(b""), r"prob_diff_step_1\.npy: .*empty"),
        (lambda d, m: d.write_bytes(b"\x93NUM"), r"prob_diff_step_1\.npy: .*no .npy file"),
        (lambda d, m: d.write_text("no array"), r"prob_diff_step_1\.npy: .*no .npy file"),
        (lambda d, m: np.save(d, np.array([None])), r"prob_diff_step_1\.npy: .*never loaded"),
        (lambda d, m: np.savez(d.open("wb"), a=np.zeros((2, 3))), r"prob_diff_step_1\.npy: .*archive"),
        (lambda d, m: np.save(d, np.zeros((2, 3), dtype=int)), r"prob_diff_step_1\.npy: .*dtype int64, where floats"),
        (lambda d, m: np.save(m, np.full((2, 3), "a")), r"prob_mask_step_1\.npy: .*dtype <U1, where booleans"),
        (lambda d, m: np.save(d, np.zeros(6)), r"prob_diff_step_1\.npy: .*shape \(6,\)"),
        (lambda d, m: np.save(m, np.ones((2, 4), dtype=bool)), r"prob_mask_step_1\.npy: .*\(2, 4\).*\(2, 3\)"),
        (lambda d, m: np.save(d, np.full((2, 3), -0.7)), r"prob_diff_step_1\.npy: .*6 values outside \[0, 1\]"),
        (lambda d, m: np.save(d, np.full((2, 3), np.inf)), r"prob_diff_step_1\.npy: .*6 values outside \[0, 1\]"),
        (lambda d, m: (d.unlink(), os.mkfifo(d)), r"prob_diff_step_1\.npy: .*a pipe"),
        (lambda d, m: (d.unlink(), d.mkdir()), r"prob_diff_step_1\.npy: .*[Dd]irectory"),
    ],
)
def test_a_damaged_file_is_named_and_the_rest_is_read(tmp_path, spoil, said):
    write_dump(tmp_path, 0, GOOD)
    write_dump(tmp_path, 1, GOOD)
    write_dump(tmp_path, 2, GOOD)
    spoil(tmp_path / "prob_diff_step_1.npy", tmp_path / "prob_mask_step_1.npy")
    dumps, problems = read(tmp_path)
    assert [dump.step for dump in dumps] == [0, 2]
    assert len(problems) == 1
    assert re.search(said, problems[0]), problems[0]


def test_a_header_that_promises_the_moon(tmp_path):
    write_dump(tmp_path, 0, GOOD)
    with (tmp_path / "prob_diff_step_1.npy").open("wb") as file:
        np.lib.format.write_array_header_1_0(file, {"descr": "<f4", "fortran_order": False, "shape": (10**9, 10**9)})
    dumps, problems = read(tmp_path)
    assert [dump.step for dump in dumps] == [0]
    assert problems[0].startswith("prob_diff_step_1.npy: step left out: damaged")


class Payload:
    def __reduce__(self):
        return os.mkdir, ("unpickled",)


def test_a_pickle_is_never_loaded(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_dump(tmp_path, 0, GOOD)
    np.save(tmp_path / "prob_diff_step_1.npy", np.array([[Payload()]]), allow_pickle=True)
    (tmp_path / "prob_diff_step_2.npy").write_bytes(pickle.dumps(Payload()))
    dumps, problems = read(tmp_path)
    assert [dump.step for dump in dumps] == [0]
    assert problems == [
        "prob_diff_step_1.npy and 1 more: step left out: no .npy file of numbers, and pickled objects are never loaded"
    ]
    assert not (tmp_path / "unpickled").exists()


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(flips=st.lists(st.tuples(st.integers(0, 151), st.integers(0, 255)), min_size=1, max_size=4), length=st.integers(0, 152))
def test_any_damage_is_read_or_named(tmp_path, flips, length):
    write_dump(tmp_path, 0, GOOD)
    write_dump(tmp_path, 1, GOOD)
    path = tmp_path / "prob_diff_step_1.npy"
    content = bytearray(path.read_bytes())
    assert len(content) == 152
    for at, value in flips:
        content[at] = value
    path.write_bytes(content[:length])
    dumps, problems = read(tmp_path)
    assert [dump.step for dump in dumps] == [0, 1] or (len(dumps) == 1 and problems)


def test_names_that_are_no_dumps(tmp_path):
    write_dump(tmp_path, 7, GOOD)
    for name in ("prob_diff_step_007.npy", "prob_diff_step_last.npy", f"prob_diff_step_{10**15}.npy", "prob_mask_step_8.npy"):
        np.save(tmp_path / name, np.zeros((2, 3)))
    (tmp_path / "prob_tokens_step_9.parquet").touch()
    (tmp_path / ".prob_diff_step_3.npy.123.tmp").touch()
    (tmp_path / "notes.txt").touch()
    dumps, problems = read(tmp_path)
    assert [dump.step for dump in dumps] == [7]
    assert problems == [
        "prob_diff_step_1000000000000000.npy and 1 more: left out: the name has no step number of at most 15 digits, as in "
        "prob_diff_step_12.npy",
        "prob_diff_step_7.npy: left out: the same step as prob_diff_step_007.npy",
        "prob_mask_step_8.npy and 1 more: left out: no prob_diff_step_*.npy of this step is beside it",
    ]


def test_a_file_that_goes_away_meanwhile(tmp_path):
    write_dump(tmp_path, 0, GOOD)
    write_dump(tmp_path, 1, GOOD)
    problems = Problems()
    steps = find_steps(tmp_path, problems)
    (tmp_path / "prob_diff_step_0.npy").unlink()
    assert [dump.step for dump in read_dumps(steps, problems)] == [1]
    assert problems.lines() == ["prob_diff_step_0.npy: step left out: No such file or directory"]


def test_no_directory(tmp_path):
    with pytest.raises(DumpError, match=r"nowhere: No such file.*prob_diff_save_dir"):
        find_steps(tmp_path / "nowhere", Problems())


def test_a_directory_without_dumps_says_what_was_looked_for(tmp_path):
    np.save(tmp_path / "prob_mask_step_8.npy", np.ones((2, 3), dtype=bool))
    with pytest.raises(DumpError, match=r"holds no prob_diff_step_\*\.npy(.|\n)*prob_mask_step_8\.npy: left out"):
        find_steps(tmp_path, Problems())


def test_nothing_but_damaged_files(tmp_path):
    (tmp_path / "prob_diff_step_1.npy").touch()
    with pytest.raises(DumpError, match=r"none of its 1 (.|\n)*prob_diff_step_1\.npy: step left out: the file is empty"):
        read(tmp_path)
