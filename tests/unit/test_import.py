"""What importing costs: an API as much as any function."""

import ast
import subprocess
import sys
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "grpo_ext"
HEAVY = ("torch", "transformers", "trl", "vllm", "deepspeed", "peft", "accelerate", "datasets", "matplotlib", "pandas")


def loaded_after(statement):
    code = f"import sys; {statement}; print(*(m for m in {HEAVY!r} if m in sys.modules))"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()


def test_import_grpo_ext_is_light():
    assert loaded_after("import grpo_ext; grpo_ext.__version__; dir(grpo_ext)") == []


def test_modules_that_call_themselves_pure_import_torch_and_nothing_heavier():
    documented = {path: ast.get_docstring(ast.parse(path.read_text())) or "" for path in sorted(PACKAGE.rglob("*.py"))}
    pure = [path for path, text in documented.items() if path.name != "__init__.py" and "Pure" in text.partition("\n\n")[0]]
    assert len(pure) > 20
    modules = [".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts) for path in pure]
    assert set(loaded_after(f"import {', '.join(modules)}")) <= {"torch"}


def test_the_public_face():
    import grpo_ext

    for name in grpo_ext.__all__:
        assert getattr(grpo_ext, name) is not None
    assert {"GRPOExtConfig", "GRPOExtMixin", "GRPOExtTrainer"} <= set(grpo_ext.__all__)


def test_an_unknown_name_lists_the_public_ones():
    import pytest

    import grpo_ext

    with pytest.raises(AttributeError, match="GRPOExtTrainer"):
        grpo_ext.GRPOTrainer  # noqa: B018
