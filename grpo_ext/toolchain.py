"""A CPU box without a C++ compiler: what would compile at run time is told to do without.

DeepSpeed builds its shared-memory all-reduce when the ranks meet, and vLLM's sampler compiles a few functions at its first
`generate`. Both have a plain way that needs no compiler: gloo, and eager torch.
"""

import os
import shutil
import sys
import sysconfig
from pathlib import Path

from grpo_ext import _trl


def missing_to_compile() -> list[str]:
    """What is missing to compile C++ at run time; [] where nothing is."""
    missing = []
    compiler = os.environ.get("CXX", "g++")
    if not shutil.which(compiler):
        missing.append(compiler)
    if not shutil.which("ninja"):
        missing.append("ninja")
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        missing.append("Python.h")
    return missing


def find_own_ninja() -> None:
    """Put the folder of this interpreter on PATH where `ninja` lies in it and is not found: a virtual environment not activated."""
    folder = Path(sys.executable).parent
    if not shutil.which("ninja") and (folder / "ninja").exists():
        os.environ["PATH"] = f"{folder}{os.pathsep}{os.environ.get('PATH', os.defpath)}"


def spare_the_compiler() -> None:
    """Before ranks meet and vLLM is imported: let neither ask for a compiler that is not there."""
    find_own_ninja()
    if not missing_to_compile():
        return
    import torch._dynamo.config

    os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")
    torch._dynamo.config.disable = True
    _trl.skip_deepspeed_shared_memory_op()
