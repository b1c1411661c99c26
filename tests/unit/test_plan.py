"""`grpo-ext plan`: the arithmetic of a step on cases counted by hand, what it says of bad files, and what it does not import."""

import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from grpo_ext.logprobs.window import Loop
from grpo_ext.plan import run_plan
from grpo_ext.plan.answer import answer_for
from grpo_ext.plan.arithmetic import no_grad_pass
from grpo_ext.plan.cycle import play, sorted_together
from grpo_ext.plan.recipe import FIELDS, RecipeError, read_recipe
from grpo_ext.plan.zero import Zero, zero_of

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "recipes"
CASE_10 = {
    "use_vllm": True, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 15, "num_generations": 12,
    "max_completion_length": 1024, "vllm_max_model_length": 2048, "beta": 0.001, "max_steps": 100,
}  # fmt: skip


@pytest.fixture
def recipe(tmp_path):
    """Writes a recipe, a mapping or text, into a folder of its own and returns its path."""
    folder = tmp_path / "configs" / "mine"
    folder.mkdir(parents=True)

    def write(content):
        path = folder / "recipe.yaml"
        path.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
        return path

    return write


def planned(path, processes=6, **options):
    answer = answer_for(path, processes, **options)
    assert answer.problems == []
    return answer.plan


# ---- numbers ---------------------------------------------------------------------------------------------------------
def test_case_10(recipe):
    plan = planned(recipe(CASE_10), tensor_parallel=2)
    generation, engine = plan.generation, plan.engine
    assert (generation.prompts, generation.rollouts, generation.rollouts_per_rank) == (60, 720, 120)
    assert (generation.slices, generation.rows_per_slice, plan.training.micro_steps) == (15, 8, 15)
    assert (engine.engines, engine.ranks, engine.sequences) == (3, 2, 240)
    assert (generation.completion_tokens_at_most, generation.tokens_at_most) == (720 * 1024, 720 * 2048)
    assert (plan.training.optimizer_steps, plan.training.rollouts_per_optimizer_step) == (1, 720)
    assert plan.training.rows_sorted_together == (120,)
    assert (plan.old_logps.rows_free, plan.old_logps.rows_computed, plan.old_logps.rows_computed_by_trl) == (720, 0, 720)
    assert plan.old_logps.patterns == ("f" * 15 + "|",)
    assert (plan.run.generations, plan.run.rollouts) == (100, 72_000)


@pytest.mark.parametrize("old_logps, computed", [("window", 720), ("rollout", 0)])
def test_the_kl_in_the_reward_takes_both_passes_over_every_rollout(recipe, old_logps, computed, capsys):
    path = recipe({**CASE_10, "beta": 0.0, "kl_in_reward": True, "old_logps": old_logps})
    plan = planned(path)
    assert (plan.old_logps.rows_computed, plan.old_logps_pass.rows) == (computed, computed / 6)
    assert plan.reference_pass.rows == 120
    run_plan(path, 6)
    assert "all of the rank's: kl_in_reward" in capsys.readouterr().out


@pytest.mark.parametrize("size", [{"steps_per_generation": 15}, {"generation_batch_size": 720}])
def test_a_generation_may_be_sized_in_three_ways(recipe, size):
    settings = {**CASE_10, "gradient_accumulation_steps": 5}
    plan = planned(recipe({**settings, **size}))
    assert (plan.generation.slices, plan.generation.rollouts, plan.training.optimizer_steps) == (15, 720, 3)
    assert plan.training.rollouts_per_optimizer_step == 8 * 5 * 6
    assert plan.old_logps.rows_computed == 10 * 8 * 6  # slices 5 to 14


@pytest.mark.parametrize(
    "accumulation, slices, iterations, patterns, computed",
    [
        (8, 8, 1, ["ffffffff|"], 0),
        (4, 8, 1, ["ffff|cccc|"], 4),
        (4, 4, 2, ["ffff|kkkk|"], 0),
        (2, 1, 2, ["fk|"], 0),
        (1, 1, 1, ["f|"], 0),
        (3, 2, 1, ["ff", "f|c", "ff|"], 1),
        (4, 3, 2, ["fffk|kk", "ff|ckkk|"], 1),
    ],
)
def test_patterns(accumulation, slices, iterations, patterns, computed):
    cycle = play(Loop(accumulation, slices, iterations), rows=8)
    assert cycle.patterns == patterns and cycle.batches == len(patterns)
    assert cycle.computed == 8 * computed
    assert cycle.free + cycle.computed == 8 * slices * len(patterns)


def test_patterns_of_the_other_modes():
    assert play(Loop(4, 8), 2, "always").patterns == ["cccc|cccc|"]
    assert play(Loop(4, 8), 2, "always").portions == [16]
    assert play(Loop(4, 8), 2, "rollout").patterns == ["eeee|eeee|"]
    assert play(Loop(4, 8), 2, "rollout").computed == 0
    aged = play(Loop(1, 4), 2, max_age=1)  # slices 1, 2, 3 are used 1, 2, 3 steps after generation
    assert aged.patterns == ["f|c|a|a|"] and (aged.free, aged.computed, aged.reanchored) == (2, 2, 4)


def test_patterns_of_rollouts_that_grow_old():
    """An anchor older than two steps is taken anew: slice 0 of version 0 at version 4, slice 1 of version 0 at 3."""
    aged = play(Loop(1, 2, 3), 2, max_age=2)
    assert aged.patterns == ["f|c|k|a|a|k|"] and (aged.free, aged.computed, aged.reanchored) == (2, 2, 4)
    engines = play(Loop(1, 2, 3), 2, "rollout", max_age=2)
    assert engines.patterns == ["e|e|k|a|a|k|"] and (engines.free, engines.reanchored) == (4, 4)


def test_a_budget_spreads_the_same_rows():
    at_once, spread = play(Loop(4, 8), 5), play(Loop(4, 8), 5, budget=3)
    assert at_once.portions == [20]
    assert spread.portions == [3, 3, 3, 11]
    assert play(Loop(4, 8), 5, budget=8).portions == [8, 8, 4]


def test_rows_are_sorted_within_windows_that_stay_together():
    assert sorted_together(Loop(8, 8), 4) == (32,)
    assert sorted_together(Loop(4, 8), 4) == (16, 16)
    assert sorted_together(Loop(2, 3, 2), 4) == (4, 4, 4)  # 0 1 | 2 0 | 1 2: no two slices share both windows


@pytest.mark.parametrize(
    "off",
    [
        {"group_rollouts_by_length": False},
        {"loss_type": "bnpo"},
        {"top_entropy_quantile": 0.5},
        {"entropy_coef": 0.1},
        {"use_adaptive_entropy": True},
        {"steps_per_generation": 1, "num_generations": 8},
    ],
    ids=lambda off: next(iter(off)),
)
def test_no_rows_are_sorted_where_the_loss_would_notice(recipe, off):
    assert planned(recipe({**CASE_10, **off})).training.rows_sorted_together == ()


@pytest.mark.parametrize(
    "settings, rows, tokens, forwards",
    [
        ({}, 8, 8 * (2047 + 1024), 15),  # one row's prompt, another one's completion
        ({"pad_to_multiple_of": 100}, 8, 8 * (2100 + 1100), 15),
        ({"max_completion_length": None}, 8, 8 * (2047 + 2047), 15),
        ({"ref_logps_micro_batch_size": 50}, 50, 50 * (2047 + 1024), 3),
        ({"ref_logps_micro_batch_size": 1}, 1, 2048, 120),
        ({"logps_max_tokens": 8192}, None, 8192, 60),  # two of the widest rows
        ({"logps_max_tokens": 8192, "ref_logps_micro_batch_size": 2}, 2, 2 * (2047 + 1024), 60),
        ({"logps_max_tokens": 1000}, None, 2048, 120),  # a row above the budget runs alone
        ({"logps_max_tokens": 8192, "vllm_max_model_length": None}, None, 8192, 120),  # a row of unknown length
        ({"vllm_max_model_length": None}, 8, None, 15),
    ],
)
def test_reference_forwards(recipe, settings, rows, tokens, forwards):
    found = planned(recipe({**CASE_10, "shared_prompt": False, **settings})).reference_pass
    assert (found.rows_per_forward, found.tokens_per_forward_at_most, found.forwards_at_most) == (rows, tokens, forwards)
    assert found.forwards_as_rows_at_most == forwards


def test_trees_keep_groups_together_and_may_take_more_forwards(recipe):
    """120 rows in lines of 16: two groups of 12 do not fit into one, so there are 10 lines. 15 is what any groups could take."""
    settings = {**CASE_10, "ref_logps_micro_batch_size": 16}
    shared = planned(recipe(settings)).reference_pass
    assert (shared.forwards_at_most, shared.forwards_as_rows_at_most) == (15, 8)
    rows = planned(recipe({**settings, "shared_prompt": False})).reference_pass
    assert shared.tokens_per_forward_at_most == rows.tokens_per_forward_at_most


@pytest.mark.parametrize(
    "off", [{"shared_prompt": False}, {"torch_compile": True}, {"sampling_mismatch": "correct", "top_k": 4}], ids=str
)
def test_where_no_slice_goes_as_a_tree(recipe, off, capsys):
    path = recipe({**CASE_10, **off})
    assert planned(path).reference_pass.forwards_at_most == 15
    assert run_plan(path, 6) == 0 and re.search(r"slices go as +rows +shared_prompt", capsys.readouterr().out)


PASSES = st.fixed_dictionaries(
    {
        "vllm_max_model_length": st.integers(2, 40),
        "max_completion_length": st.none() | st.integers(1, 30),
        "logps_max_tokens": st.none() | st.integers(1, 200),
        "ref_logps_micro_batch_size": st.none() | st.integers(1, 12),
        "pad_to_multiple_of": st.none() | st.integers(1, 8),
    }
)


@settings(max_examples=400, deadline=None)
@given(PASSES, st.lists(st.integers(1, 9), min_size=1, max_size=12), st.data())
def test_forwards_and_their_tokens_are_never_more_than_foretold(given, groups, data):
    """Whatever the lengths, as rows and as trees; groups: how many rows share each prompt."""
    import torch

    from grpo_ext.batch.groups import cut_groups, line_tokens
    from grpo_ext.batch.micro_batches import cut, padded_tokens
    from grpo_ext.batch.padding import Lengths, rounded

    defaults = {name: default for name, (_, default) in json.loads(FIELDS.read_text())["config"].items()}
    s = SimpleNamespace(**{**defaults, "use_vllm": True, **given})
    window, longest = s.vllm_max_model_length, s.max_completion_length or s.vllm_max_model_length
    prompt, completion, members = [], [], []
    for size in groups:
        tokens = data.draw(st.integers(1, window - 1))
        members.append(list(range(len(prompt), len(prompt) + size)))
        prompt += [tokens] * size
        completion += data.draw(st.lists(st.integers(1, min(window - tokens, longest)), min_size=size, max_size=size))
    lengths = Lengths(torch.tensor(prompt), torch.tensor(completion))
    found = no_grad_pass(s, s.ref_logps_micro_batch_size, [len(prompt)])
    limits = found.rows_per_forward, s.logps_max_tokens
    padded = rounded(lengths, s.pad_to_multiple_of)
    rows, lines = cut(padded, *limits), cut_groups(members, lengths, *limits)
    assert len(rows) <= found.forwards_as_rows_at_most <= found.forwards_at_most
    assert len(lines) <= found.forwards_at_most
    assert max(padded_tokens(padded, chunk) for chunk in rows.rows) <= found.tokens_per_forward_at_most
    for chunk in lines.rows:
        there = [[i for i in group if i in chunk] for group in members]
        assert line_tokens([group for group in there if group], lengths)[1] <= found.tokens_per_forward_at_most


def test_forwards_of_the_old_pass(recipe):
    settings = {**CASE_10, "gradient_accumulation_steps": 5, "steps_per_generation": 15, "logps_micro_batch_size": 16}
    settings |= {"shared_prompt": False}
    assert planned(recipe(settings)).old_logps_pass.forwards_at_most == 5  # 80 rows a rank, at one step
    spread = planned(recipe({**settings, "old_logps_budget": 20})).old_logps_pass
    assert (spread.rows, spread.forwards_at_most) == (80, 8)  # 20, 20, 20, 20 rows: two forwards each


def test_evaluation(recipe):
    settings = {**CASE_10, "eval_strategy": "steps", "per_device_eval_batch_size": 4, "num_generations_eval": 3}
    assert planned(recipe(settings)).evaluation.prompts_per_step == 8


def test_stock_trl_computes_nothing_only_without_the_correction(recipe):
    settings = {**CASE_10, "vllm_importance_sampling_correction": False}
    assert planned(recipe(settings)).old_logps.rows_computed_by_trl == 0
    assert (
        planned(
            recipe({**settings, "gradient_accumulation_steps": 4, "steps_per_generation": 3})
        ).old_logps.rows_computed_by_trl
        > 0
    )


def test_a_server_is_no_engine_of_the_run(recipe):
    answer = answer_for(recipe({**CASE_10, "vllm_mode": "server"}), 6, tensor_parallel=4)
    assert answer.problems == [] and answer.plan.engine is None
    assert "--tensor-parallel has no effect" in answer.remarks[0]


# ---- what fails ------------------------------------------------------------------------------------------------------
def test_every_rule_that_fails_is_named_at_once_with_a_value_that_works(recipe, capsys):
    settings = {
        "use_vllm": True, "per_device_train_batch_size": 5, "gradient_accumulation_steps": 1, "num_generations": 12,
        "vllm_tensor_parallel_size": 4, "eval_strategy": "steps", "per_device_eval_batch_size": 5, "temperature": 0,
    }  # fmt: skip
    assert run_plan(recipe(settings), 6, as_json=True) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["plan"] is None and len(found["problems"]) == 4
    fixes = {key: value for problem in found["problems"] for key, value in problem["fixes"].items()}
    assert fixes == {
        "steps_per_generation": 2,  # 5 x 6 x 2 = 60 = 5 groups
        "per_device_eval_batch_size": 6,  # 6 x 6 = 36 = 3 groups
        "vllm_tensor_parallel_size": 3,
        "temperature": 1.0,
    }
    assert run_plan(recipe({**settings, **fixes}), 6) == 0
    assert "every rule holds" in capsys.readouterr().out


def test_no_engine_spans_no_rank(recipe):
    (problem,) = answer_for(recipe(CASE_10), 6, tensor_parallel=0).problems
    assert problem.text.endswith("Set it to one of [1, 2, 3, 6].")


def test_steps_per_generation_0_is_not_taken_for_unset(recipe):
    problem = answer_for(recipe({"num_generations": 8, "steps_per_generation": 0}), 1).problems
    assert [each.fixes for each in problem] == [{"steps_per_generation": 1}]


def test_no_processes(recipe):
    assert "--num-processes 0" in answer_for(recipe(CASE_10), 0).problems[0].text


def test_a_window_without_room_for_a_prompt_is_remarked_upon(recipe):
    answer = answer_for(recipe({**CASE_10, "vllm_max_model_length": 1024}), 6)
    assert answer.problems == [] and "no room for a prompt" in answer.remarks[0]


# ---- the file --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "content, said",
    [
        ("use_vllm: true\n\tbeta: 0.1\n", r"line 2, column 1: .*no tabs"),
        ("a: !!python/object/apply:os.system ['touch pwned']\n", r"line 1.*python/object.*never Python objects"),
        ("a: [1, 2\nb: 3\n", r"line 2"),
        ("- a\n- b\n", r"holds list, no mapping"),
        ("", r"holds NoneType, no mapping"),
        ("a: " + "[" * 5000, r"nests deeper than can be read"),
    ],
)
def test_files_that_are_no_recipe(recipe, content, said, capsys):
    path = recipe(content)
    with pytest.raises(RecipeError, match=said) as error:
        read_recipe(path)
    assert str(path) in str(error.value)
    assert run_plan(path, 2) == 1
    assert "fails" in capsys.readouterr().out


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(RecipeError, match=r"nowhere\.yaml cannot be read: No such file"):
        read_recipe(tmp_path / "nowhere.yaml")


def test_an_unknown_key_is_named_with_the_nearest_known_one(recipe):
    found = read_recipe(recipe({"num_generation": 8, "vllm_gpu_memory_utilisation": 0.3}))
    assert [re.findall(r"'(\w+)'", p.text) for p in found.problems] == [
        ["num_generation", "num_generations"],
        ["vllm_gpu_memory_utilisation", "vllm_gpu_memory_utilization"],
    ]


def test_a_key_unlike_any_other_is_remarked_upon(recipe):
    found = read_recipe(recipe({"frobnicate": 1}))
    assert found.problems == [] and "'frobnicate'" in found.remarks[0]


def test_what_a_script_reads_is_known(recipe):
    path = recipe({"warm_up_steps": 100, "model_name_or_path": "x", "dataset_name": "y", "env": {"A": 1}})
    assert "'warmup_steps'" in read_recipe(path).problems[0].text  # no script declares it ...
    script = "import dataclasses\nraise SystemExit\n@dataclasses.dataclass\nclass Task:\n    warm_up_steps: int = 220\n"
    (path.parent.parent / "train.py").write_text(script)  # ... now one does, and it is read, not run
    found = read_recipe(path)
    assert found.problems == found.remarks == []
    assert found.own == {"warm_up_steps": 100, "model_name_or_path": "x", "dataset_name": "y"}


@pytest.mark.parametrize(
    "given, name, value",
    [
        ("learning_rate: 1e-6", "learning_rate", 1e-6),  # text to PyYAML
        ("beta: 0", "beta", 0.0),
        ("num_generations: '8'", "num_generations", 8),
        ("use_vllm: 'True'", "use_vllm", True),
        ("generation_kwargs: '{\"seed\": 1}'", "generation_kwargs", {"seed": 1}),
        ("scale_rewards: false", "scale_rewards", False),
        ("vllm_max_model_length: null", "vllm_max_model_length", None),
    ],
)
def test_values_are_taken_as_on_a_command_line(recipe, given, name, value):
    found = read_recipe(recipe(given))
    assert found.problems == [] and getattr(found.settings, name) == value


@pytest.mark.parametrize(
    "given, said",
    [
        ("save_strategy: no", r'^save_strategy=False is bool.*save_strategy: "no"; YAML reads'),
        ("num_generations: 8.5", r"^num_generations=8\.5 is float, and a whole number is needed"),
        ("num_generations: many", r"^num_generations='many' is str"),
        ("use_vllm: 3", r"^use_vllm=3 is int, and true or false is needed"),
        ("num_iterations: null", r"^num_iterations=None"),
        ("output_dir: 2024", r'output_dir: "2024"'),
        ("generation_kwargs: '{'", r"^generation_kwargs='\{' is no JSON object"),
    ],
)
def test_values_of_a_wrong_kind(recipe, given, said):
    assert re.search(said, read_recipe(recipe(given)).problems[0].text)


ANYTHING = st.sampled_from([None, True, 0, -1, 1.5, float("nan"), 8, "8", "x", "{", "{}", [], [1], {}, {"temperature": "hot"}])
FUZZED = [*(name for name in json.loads(FIELDS.read_text())["config"]), "model_name_or_path", "lora_r", "other", 3]


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(st.sampled_from(FUZZED), ANYTHING, max_size=6), st.integers(1, 8))
def test_no_recipe_makes_it_stumble(recipe, content, processes):
    answer = answer_for(recipe(content), processes)
    assert (answer.plan is None) == bool(answer.problems)
    json.dumps(answer.as_json())


# ---- ZeRO ------------------------------------------------------------------------------------------------------------
def test_the_zero_stage_of_every_accelerate_file(monkeypatch):
    monkeypatch.chdir(ROOT)
    found = {path.stem: zero_of(None, path) for path in (RECIPES / "accelerate").glob("*.yaml")}
    assert found["zero3"] == Zero(3, processes=1)
    assert found["zero3_offload"] == Zero(3, True, True, processes=1)
    assert found["multi_node_zero3"] == Zero(3, machines=2, processes=16)
    assert found["cpu_zero3"] == Zero(3, processes=2)  # from the JSON it names


def test_the_zero_stage_of_a_recipe(tmp_path):
    assert zero_of(None, None) == Zero()
    settings = {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}}
    (tmp_path / "ds.json").write_text(json.dumps(settings))
    assert zero_of(settings, None) == zero_of(str(tmp_path / "ds.json"), None) == Zero(3, offload_optimizer=True)
    with pytest.raises(RecipeError, match=r"missing\.json: No such file"):
        zero_of("missing.json", None)


@pytest.mark.parametrize(
    "settings, said",
    [
        ({"zero_optimization": 3}, r"zero_optimization is 3, and a mapping is needed\. Write .* below it\.$"),
        ({"zero_optimization": {"offload_param": "cpu"}}, r"offload_param is 'cpu', and a mapping"),
        ({"zero_optimization": {"stage": "three"}}, r"zero_stage='three' is str, .*: a whole number\.$"),
    ],
)
def test_deepspeed_settings_of_another_shape(settings, said):
    with pytest.raises(RecipeError, match=said):
        zero_of(settings, None)


def test_the_launchers_number_of_processes(recipe):
    answer = answer_for(recipe(CASE_10), 6, accelerate=RECIPES / "accelerate" / "zero3.yaml")
    assert any("--num_processes 6" in remark for remark in answer.remarks)
    assert any("--model" in remark for remark in answer.remarks)


# ---- what is printed -------------------------------------------------------------------------------------------------
def test_the_tables_fit_80_columns_and_name_their_numbers(recipe, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert run_plan(recipe(CASE_10), 6, tensor_parallel=2) == 0
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 80
    for name, value in {
        "prompts": "60",
        "rollouts": "720",
        "rollouts a rank": "120",
        "engines": "3",
        "sequences an engine": "240",
    }.items():
        assert re.search(rf"^{name} +{value}  \S", printed, re.M), name


@pytest.mark.parametrize("path", [p for p in RECIPES.rglob("*.yaml") if p.parent.name != "accelerate"], ids=lambda p: p.stem)
def test_every_recipe_plans(path):
    answer = answer_for(path, 2)
    assert answer.problems == answer.remarks == [] and answer.plan.run is not None


def test_plan_imports_nothing_heavy(recipe):
    heavy = ("torch", "vllm", "deepspeed", "trl", "transformers", "accelerate", "datasets", "numpy")
    code = f"""
import sys
from grpo_ext.cli import app
try:
    app(["plan", "--config", {str(recipe(CASE_10))!r}, "--num-processes", "6", "--tensor-parallel", "2", "--json"])
except SystemExit as end:
    print(end.code, *(m for m in {heavy!r} if m in sys.modules), file=sys.stderr)
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stderr.split() == ["0"]
    assert json.loads(ran.stdout)["plan"]["engine"]["sequences"] == 240
