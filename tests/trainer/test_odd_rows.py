"""Rows with nothing in them train on: weights and logs stay finite, each kind is counted, and advantages are what docs/rows.md says."""

import math

import pytest
import torch
from trl import GRPOTrainer

from benchmarks.replay import RecordedEngine, recorded
from grpo_ext import GRPOExtConfig, GRPOExtTrainer
from tests.tiny import config_kwargs, sums
from tests.trainer.replay import rollouts, train

NAN, INF = math.nan, math.inf
HALF = {"gradient_accumulation_steps": 2, "steps_per_generation": 2, "max_steps": 3}
KINDS = ("rows/empty", "rows/masked", "groups/equal_rewards", "rewards/missing", "rewards/infinite", "rewards/none")


class Kept(GRPOExtTrainer):
    """Keeps the first generation as it came."""

    first = None

    def _generate_and_score_completions(self, inputs):
        rows = super()._generate_and_score_completions(inputs)
        self.first = self.first or dict(rows)
        return rows


def spoiled(spoil, **kwargs):
    """Recorded rollouts that `spoil` has changed."""
    recorded_rollouts = rollouts(**kwargs)

    def func(prompts, trainer):
        output = recorded_rollouts(prompts, trainer)
        spoil(output)
        return output

    return func


def rewarded(rewards):
    """The first generation's eight rewards, then ones that differ."""
    calls = []

    def judge(completions, **kwargs):
        calls.append(1)
        return list(rewards) if len(calls) == 1 else [float(i) for i in range(len(completions))]

    return lambda made: setattr(made, "reward_funcs", [judge, *made.reward_funcs[1:]])


def trained(model, out, **kwargs):
    """A finished run whose weights moved and are finite, as are all numbers of its log."""
    trainer = train(Kept, model, out, **{**HALF, **kwargs})
    assert all(torch.isfinite(p).all() for p in trainer.model.parameters())
    for entry in trainer.history:
        assert all(math.isfinite(value) for value in entry.values() if value is not None), entry
    assert trainer.history[-1]["grad_norm"] > 0
    return trainer


def counted(trainer, entry=0):
    return {name: trainer.history[entry][name] for name in KINDS if trainer.history[entry][name]}


def test_an_ordinary_run_counts_nothing(model, tmp_path):
    assert counted(trained(model, tmp_path)) == {}


@pytest.mark.parametrize("tools", [False, True])
@pytest.mark.parametrize(
    "setting", [{}, {"mask_truncated_completions": True}, {"kl_in_reward": True}, {"old_logps": "rollout"}]
)
def test_empty_completions(model, tmp_path, setting, tools):
    def spoil(output):
        for row in (0, 5):
            for name in ("completion_ids", "logprobs", *(["env_mask"] if tools else [])):
                output[name][row] = []
        if tools:
            output["env_mask"] = [[1] * len(ids) for ids in output["completion_ids"]]

    trainer = trained(model, tmp_path, func=spoiled(spoil, tools=tools), **setting)
    assert counted(trainer) == {"rows/empty": 2.0}
    assert trainer.rollout_func is trainer.rollouts  # the user's own again
    rows = trainer.first
    learned = (rows["completion_mask"] * rows["tool_mask"]).sum(dim=1)
    assert [i for i, n in enumerate(learned.tolist()) if n == 0] == [0, 5]
    assert rows["completion_ids"][[0, 5], 0].tolist() == [1, 1] and rows["num_items_in_batch"] == learned.sum()
    assert trainer.history[0]["completions/min_length"] == 0.0
    assert trainer.history[0]["sampling/unscored_tokens"] == 0.0
    assert trainer.history[0]["training/rollout_tokens"] == learned.sum()


def test_nothing_but_empty_completions(model, tmp_path):
    def spoil(output):
        output["completion_ids"] = [[] for _ in output["completion_ids"]]
        output["logprobs"] = [[] for _ in output["logprobs"]]

    trainer = train(Kept, model, tmp_path, func=spoiled(spoil), **HALF)
    assert counted(trainer) == {"rows/empty": 8.0, "groups/equal_rewards": 2.0}
    assert [entry["grad_norm"] for entry in trainer.history] == [0.0] * 3


def test_stock_trl_stops_at_an_empty_completion(model, tmp_path):
    def spoil(output):
        output["completion_ids"][0], output["logprobs"][0] = [], []

    with pytest.raises(IndexError):
        train(GRPOTrainer, model, tmp_path, func=spoiled(spoil), **HALF)


def test_an_engine_that_returns_an_empty_completion(model, tmp_path):
    """A fake engine, since the real one always samples a token; what follows it is the real path."""

    class Engine(RecordedEngine):
        def generate(self, prompts, images, num_generations, profiler):
            ids = [[7 + i, 1] if i % 4 else [] for i in range(len(prompts))]
            return prompts, ids, [[[-4.0]] * len(each) for each in ids], None

    class Trainer(recorded(GRPOExtTrainer)):
        def _build_engine(self, **kwargs):
            return Engine()

    config = GRPOExtConfig(**config_kwargs(tmp_path, use_vllm=True, **HALF))
    trainer = Trainer(model, lambda completions, **kw: [float(len(c)) for c in completions], config, sums(32))
    trainer.train()
    entries = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [entry["rows/empty"] for entry in entries] == [4.0] * 3 and entries[0]["training/rollout_tokens"] == 24.0
    assert all(torch.isfinite(p).all() for p in trainer.model.parameters())


def test_a_row_that_is_a_tools_or_cut_short(model, tmp_path):
    def tool(output):
        output["env_mask"] = [[int(row != 2)] * len(ids) for row, ids in enumerate(output["completion_ids"])]

    assert counted(trained(model, tmp_path / "tool", func=spoiled(tool))) == {"rows/masked": 1.0}

    def cut(output):
        output["completion_ids"][3][-1] = 50

    blanked = {"mask_truncated_completions": True, "kl_in_reward": True}
    assert counted(trained(model, tmp_path / "cut", func=spoiled(cut), **blanked)) == {"rows/masked": 1.0}


@pytest.mark.parametrize(
    "rewards, advantages, counts",
    [
        ([2, 2, 2, 2, 0, 1, 2, 3], [0, 0, 0, 0, -1.5, -0.5, 0.5, 1.5], {"groups/equal_rewards": 1}),
        # The row without a reward is left out of its group's mean: (1 + 2 + 3) / 3 = 2.
        ([1, 2, None, 3, 0, 1, 2, 3], [-1, 0, 0, 1, -1.5, -0.5, 0.5, 1.5], {"rewards/missing": 1, "rewards/none": 1}),
        ([1, 2, NAN, 3, 0, 1, 2, 3], [-1, 0, 0, 1, -1.5, -0.5, 0.5, 1.5], {"rewards/missing": 1, "rewards/none": 1}),
        ([1, 2, INF, 3, 0, 1, 2, 3], [-1, 0, 0, 1, -1.5, -0.5, 0.5, 1.5], {"rewards/infinite": 1, "rewards/none": 1}),
        ([1, 2, -3e38, 3, 0, 1, 2, 3], [-1, 0, 0, 1, -1.5, -0.5, 0.5, 1.5], {"rewards/infinite": 1, "rewards/none": 1}),
        (
            [-INF, 2, INF, None, 0, 1, 2, 3],
            [0, 0, 0, 0, -1.5, -0.5, 0.5, 1.5],
            {"rewards/infinite": 2, "rewards/missing": 1, "rewards/none": 3, "groups/equal_rewards": 1},
        ),
        ([None] * 8, [0] * 8, {"rewards/missing": 8, "rewards/none": 8, "groups/equal_rewards": 2}),
    ],
    ids=["equal", "none", "nan", "infinite", "huge", "one left", "nothing"],
)
@pytest.mark.parametrize("scale", ["none", "group"])
def test_rewards(model, tmp_path, rewards, advantages, counts, scale, caplog):
    trainer = trained(model, tmp_path, before=rewarded(rewards), scale_rewards=scale)
    assert counted(trainer) == counts
    found = trainer.first["advantages"]
    if scale == "none":
        assert found.tolist() == pytest.approx(advantages, abs=1e-6)
    else:
        assert found.sign().tolist() == [float((a > 0) - (a < 0)) for a in advantages]
        assert float(found.abs().max()) < 2
    warned = [r.message for r in caplog.records if "returned an infinite reward" in r.getMessage()]
    assert len(warned) == ("rewards/infinite" in counts)


@pytest.mark.parametrize("aggregation", ["sum_then_normalize", "normalize_then_sum"])
def test_one_function_without_a_say_leaves_it_to_the_others(model, tmp_path, aggregation):
    def doubtful(completions, **kwargs):
        return [INF if i % 4 == 0 else None if i % 4 == 1 else 1.0 for i in range(len(completions))]

    from tests.trainer.replay import token_reward

    config = GRPOExtConfig(
        **config_kwargs(tmp_path, use_vllm=True, multi_objective_aggregation=aggregation, per_device_train_batch_size=8)
    )
    trainer = recorded(GRPOExtTrainer)(model, [token_reward, doubtful], config, sums(32), rollout_func=rollouts())
    trainer.train()
    entry = trainer.state.log_history[0]
    assert (entry["rewards/infinite"], entry["rewards/missing"], entry["rewards/none"]) == (2.0, 2.0, 0.0)
    assert entry["rewards/doubtful/mean"] == 1.0 and math.isfinite(entry["reward"])
    assert all(torch.isfinite(p).all() for p in trainer.model.parameters())


def test_the_penalty_is_no_judge(model, tmp_path):
    penalised = {"kl_in_reward": True, "kl_in_reward_coef": 1.0, "scale_rewards": "none"}
    trainer = trained(model, tmp_path, before=rewarded([1, 2, None, 3, 0, 1, 2, 3]), **penalised)
    assert counted(trainer) == {"rewards/missing": 1.0, "rewards/none": 1.0}
    assert trainer.first["advantages"].tolist() == pytest.approx([-1, 0, 0, 1, -1.5, -0.5, 0.5, 1.5], abs=1e-4)


@pytest.mark.parametrize("scale", ["none", "group"])
def test_what_an_infinite_reward_does_in_stock_trl(model, tmp_path, scale):
    """Why rewards are cleaned before the group's statistics."""

    class Stock(GRPOTrainer):
        advantages = ()

        def _compute_loss(self, model, inputs):
            self.advantages = (*self.advantages, *inputs["advantages"].tolist())
            return 0 * super()._compute_loss(model, inputs)

    before = rewarded([1, 2, INF, 3, 0, 1, 2, 3])
    found = train(Stock, model, tmp_path, before=before, scale_rewards=scale, **{**HALF, "max_steps": 1}).advantages
    sizes = sorted(abs(a) for a in found)
    if scale == "none":
        assert len([a for a in sizes if a > 1e38]) == 3  # all of its group but the row itself
    else:
        assert sizes[:4] == [0.0] * 4 and sizes[4] > 0.1
