"""Files that are whole or not there, and what none may take the place of."""

import os

import pytest

from grpo_ext.files import replacing


def test_a_failed_write_leaves_what_was_there(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")
    with pytest.raises(OSError, match="no space"), replacing(path) as unfinished:
        unfinished.write_text("ne")
        raise OSError("no space")
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]
    with replacing(path) as unfinished:
        unfinished.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new" and list(tmp_path.iterdir()) == [path]


def test_what_a_link_points_to_is_replaced(tmp_path):
    target, link = tmp_path / "target", tmp_path / "link"
    link.symlink_to(target)
    with replacing(link) as unfinished:
        unfinished.write_text("new")
    assert (link.is_symlink(), target.read_text()) == (True, "new")


def test_a_directory_or_a_device_stays(tmp_path):
    os.mkfifo(tmp_path / "device")
    for path in (tmp_path / "device", tmp_path, ""):
        with pytest.raises(OSError, match="no regular file"), replacing(path) as unfinished:
            unfinished.write_text("new")
    assert (tmp_path / "device").is_fifo()
