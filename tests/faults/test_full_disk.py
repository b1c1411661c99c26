"""The disk is full: dumps are given up with one warning, a checkpoint is an error that names it, and the one before it is whole.

For real where a small file system can be mounted (`mount -t tmpfs`, so as root); elsewhere those two skip, and the same is tried with
writes that raise.
"""

import errno
import logging
import shutil
import subprocess

import pytest

from tests.resume.runs import train

DUMPS = {"enable_token_level_prob_diff": True, "max_steps": 9, "save_strategy": "no", "prob_diff_warn": None}


@pytest.fixture
def disk(tmp_path):
    """`disk(size)` mounts a file system of that size (and what other options follow) and returns its directory."""
    mounted = []

    def mount(size):
        folder = tmp_path / "disk"
        folder.mkdir()
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", folder], capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")
        mounted.append(folder)
        return folder

    yield mount
    for folder in mounted:
        subprocess.run(["umount", "--lazy", folder], check=True)


def said(caplog, text):
    return [record.getMessage() for record in caplog.records if text in record.getMessage()]


def test_while_dumping(model, tmp_path, disk, caplog):
    folder = disk("4k")  # a page: a mask and no diff
    with caplog.at_level(logging.WARNING):
        full = train(model, tmp_path / "a", prob_diff_save_dir=str(folder), **DUMPS)
    assert full["step"] == 9
    (warning,) = said(caplog, "could not be written to")
    assert str(folder) in warning and "No space left on device" in warning
    assert [path.name for path in folder.iterdir() if "unfinished" in path.name] == []
    assert full["weights"] == train(model, tmp_path / "b", prob_diff_save_dir=str(tmp_path / "dumps"), **DUMPS)["weights"]


def test_a_read_only_directory_is_refused_before_training(model, tmp_path, disk):
    with pytest.raises(
        ValueError, match=r"prob_diff_save_dir='.*disk': nothing can be written there \(Read-only file system\)"
    ):
        train(model, tmp_path / "out", prob_diff_save_dir=str(disk("64k,ro")), **DUMPS)


SHORT = {"max_steps": 4}


@pytest.fixture(scope="module")
def whole(models, tmp_path_factory):
    out = tmp_path_factory.mktemp("whole")
    return out, train(models("qwen2"), out, **SHORT)


@pytest.mark.parametrize("room", [0.3, 0.6, 0.9])
def test_while_checkpointing(model, tmp_path, disk, whole, room):
    """The third checkpoint ends within the weights, the optimizer, or what comes after."""
    size = sum(path.stat().st_size for path in (whole[0] / "checkpoint-2").iterdir())
    folder = disk(f"{int((2 + room) * size / 1024) + 64}k")
    with pytest.raises(OSError, match=r"checkpoint-3 could not be written .*Earlier ones are as they were") as error:
        train(model, folder, **SHORT)
    assert str(folder / "checkpoint-3") in str(error.value)
    print(f"\n{error.value}")
    shutil.copytree(folder, tmp_path / "roomier")
    part = train(model, tmp_path / "roomier", resume=True, **SHORT)
    assert part["step"] == 4 and (part["weights"], part["logs"]) == (whole[1]["weights"], whole[1]["logs"])


@pytest.mark.parametrize("writer", ["grpo_ext.resume.state.save_file", "transformers.trainer.torch.save"])
def test_while_checkpointing_with_writes_that_raise(model, tmp_path, monkeypatch, whole, writer):
    import importlib

    module, _, name = writer.rpartition(".")
    owner = importlib.import_module("torch") if module.endswith("torch") else importlib.import_module(module)
    save = getattr(owner, name)

    def full(*args, **kwargs):
        if "checkpoint-3" in str(args):
            raise OSError(errno.ENOSPC, "No space left on device")
        return save(*args, **kwargs)

    monkeypatch.setattr(owner, name, full)
    with pytest.raises(OSError, match=r"checkpoint-3 could not be written \(OSError: \[Errno 28\] No space left on device\)"):
        train(model, tmp_path, **SHORT)
    monkeypatch.undo()
    part = train(model, tmp_path, resume=True, **SHORT)
    assert (part["weights"], part["logs"]) == (whole[1]["weights"], whole[1]["logs"])
