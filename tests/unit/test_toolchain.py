"""On a CPU box without a C++ compiler nothing may ask for one; on one with a compiler nothing changes."""

import os
import shutil
import subprocess
import sys

import pytest

from grpo_ext.toolchain import find_own_ninja, missing_to_compile

SHOW = """
from grpo_ext.toolchain import spare_the_compiler
spare_the_compiler()
import deepspeed, torch._dynamo.config
print(torch._dynamo.config.disable, deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"])
"""


def _run(path: str) -> list[str]:
    environment = {**os.environ, "PATH": path, "DS_ACCELERATOR": "cpu"}
    environment.pop("TORCH_COMPILE_DISABLE", None)
    result = subprocess.run([sys.executable, "-c", SHOW], env=environment, capture_output=True, text=True, check=True)
    return result.stdout.split()[-2:]


def test_without_a_compiler(tmp_path):
    pytest.importorskip("deepspeed")
    assert _run(str(tmp_path)) == ["True", "False"]


@pytest.mark.skipif(bool(missing_to_compile()), reason="needs a C++ compiler")
def test_with_a_compiler():
    pytest.importorskip("deepspeed")
    assert _run(os.environ["PATH"]) == ["False", "True"]


def test_ninja_of_a_virtual_environment_that_is_not_activated(tmp_path, monkeypatch):
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("python", "ninja"):
        (folder / name).write_text("#!/bin/sh\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(folder / "python"))
    assert "ninja" in missing_to_compile()
    find_own_ninja()
    assert shutil.which("ninja") == str(folder / "ninja")


def test_what_is_missing_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert missing_to_compile()[:2] == ["no-such-compiler", "ninja"]
