"""The pages that list settings are held against the code, so that they cannot rot."""

import json
import re
from dataclasses import asdict, fields
from pathlib import Path

import pytest

from grpo_ext.plan import run_plan
from grpo_ext.plan.answer import answer_for
from grpo_ext.plan.memory import Memory
from grpo_ext.plan.recipe import FIELDS

DOCS = Path(__file__).parents[2] / "docs"
KNOWN = json.loads(FIELDS.read_text())["config"]


def rows(page, width=None):
    """Cells of the table rows of a page, those of `width` cells only."""
    lines = [line for line in (DOCS / page).read_text().splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in lines]
    return [each for each in cells if width in (None, len(each))]


def block(page, language):
    """The first fenced block of a page in `language`."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", (DOCS / page).read_text(), re.M | re.S)
    return next(text for found, text in blocks if found == language)


def written(default):
    return "unset" if default is None else f"`{json.dumps(default) if isinstance(default, str) else default}`"


def test_configuration_lists_every_setting_of_ours_with_its_default():
    from trl import GRPOConfig

    from grpo_ext import GRPOExtConfig

    theirs = {f.name for f in fields(GRPOConfig)}
    ours = {f.name: written(f.default) for f in fields(GRPOExtConfig) if f.name not in theirs}
    listed = [row for row in rows("configuration.md", 5) if row[0].startswith("`")]
    assert {row[0].strip("`"): row[1] for row in listed} == ours
    assert len(listed) == len(ours), "a setting is listed twice"
    assert all(row[3] and row[4] for row in listed), "when to touch it, and what it costs"


@pytest.mark.parametrize("page, column", [("from_verl.md", 1), ("from_verl.md", 2), ("configuration.md", 3)])
def test_settings_that_are_named_exist(page, column):
    """A name in backticks that is no value, in a column that speaks of ours."""
    named = {name for row in rows(page) if len(row) > column for name in re.findall(r"`([a-z0-9]+_[a-z0-9_]+)`", row[column])}
    theirs = {"low_var_kl", "bypass_mode", "max_num_seqs"}
    assert named and named - theirs <= set(KNOWN)


def test_the_recipe_in_from_verl_is_what_the_page_says(tmp_path, monkeypatch, capsys):
    recipe = tmp_path / "from_verl.yaml"
    recipe.write_text(block("from_verl.md", "yaml"))
    plan = answer_for(recipe, 6, tensor_parallel=2).plan
    generation, engine = plan.generation, plan.engine
    assert (generation.prompts, generation.rollouts, generation.rollouts_per_rank, generation.slices) == (60, 720, 120, 15)
    assert (plan.training.optimizer_steps, plan.training.rollouts_per_optimizer_step) == (3, 20 * 12)
    assert (engine.engines, engine.sequences, plan.run.generations) == (3, 240, 100)
    monkeypatch.setenv("COLUMNS", "80")
    assert run_plan(recipe, 6, tensor_parallel=2) == 0
    printed = "\n".join(line.rstrip() for line in capsys.readouterr().out.splitlines())
    assert block("from_verl.md", "").strip() == printed.strip()


def test_the_cycle_in_plan_is_what_it_prints(tmp_path, monkeypatch, capsys):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("use_vllm: true\ngradient_accumulation_steps: 3\nsteps_per_generation: 2\n")
    monkeypatch.setenv("COLUMNS", "80")
    assert run_plan(recipe, 1) == 0
    printed = "\n".join(line.rstrip() for line in capsys.readouterr().out.splitlines())
    assert block("plan.md", "") in printed


def test_every_json_key_is_documented(tmp_path):
    def keys(value, name=""):
        if isinstance(value, dict):
            return {path for key, inner in value.items() for path in keys(inner, f"{name}.{key}" if name else key)}
        return {name}

    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("use_vllm: true\nbeta: 0.1\nmax_steps: 10\neval_strategy: steps\n")
    answer = answer_for(recipe, 2)
    assert answer.problems == []
    found = keys(answer.as_json()) | {f"memory.{f.name}" for f in fields(Memory)}
    documented, stem = set(), ""
    for cell, *_ in rows("plan.md", 2):
        for name in re.findall(r"`([a-z_.*]+)`", cell):
            stem = stem if name.startswith(".") else name.rpartition(".")[0]
            documented.add(stem + name if name.startswith(".") else name)
    passes = ("plan.old_logps_pass", "plan.reference_pass")
    shortened = {f"{key.rpartition('.')[0]}.*" if key.startswith(passes) else key for key in found}
    assert documented == shortened - {"problems", "remarks", "memory"}
    assert all(f"`{name}`" in (DOCS / "plan.md").read_text() for name in asdict(answer.plan.reference_pass))


def test_links_between_pages_lead_somewhere():
    for page in ("configuration.md", "from_verl.md", "plan.md"):
        for target in re.findall(r"\]\(([^)#:]+)", (DOCS / page).read_text()):
            assert (DOCS / target).exists(), f"{page}: {target}"
