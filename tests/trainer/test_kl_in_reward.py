"""KL in the reward inside a trainer: an example by hand, the KL by plain forwards, and stock TRL given the same rewards."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOTrainer

from grpo_ext import GRPOExtTrainer
from tests.trainer.penalised import Watched, against_stock
from tests.trainer.replay import rollouts, series, train

KL = {"kl_in_reward": True, "kl_in_reward_coef": 0.5}
SGD = {"optim": "sgd", "learning_rate": 0.05, "max_grad_norm": 0.0}
HALF = {"gradient_accumulation_steps": 2, "steps_per_generation": 4}


def adapter():
    from peft import LoraConfig

    return LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)


@pytest.mark.parametrize("old_logps", ["window", "rollout"])
def test_by_hand(model, tmp_path, old_logps):
    """Two rows of a group. log pi_old is -1 everywhere, the reference -2 in the first row and -1.5 in the second; the second row's
    last token is a tool's. KL: 2 tokens x 1 = 2 and 2 x .5 = 1. Rewards 1 and 0, coefficient .5: 1 - 1 = 0 and 0 - .5 = -.5. Mean
    -.25, so the advantages are .25 and -.25; without the penalty they would be .5 and -.5."""

    def func(prompts, trainer):
        return {
            "prompt_ids": [[5, 6], [5, 6]],
            "completion_ids": [[7, 1], [8, 9, 1]],
            "logprobs": [[-1.0, -1.0], [-1.0, -1.0, -1.0]],
            "env_mask": [[1, 1], [1, 1, 0]],
        }

    class Scripted(GRPOExtTrainer):
        def _get_per_token_logps_and_entropies(self, model, ids, *args, **kwargs):
            if torch.is_grad_enabled():
                return super()._get_per_token_logps_and_entropies(model, ids, *args, **kwargs)
            reference = torch.tensor([[-2.0, -2.0, -9.0], [-1.5, -1.5, -7.0]])
            return (reference if model is self.ref_model else torch.full((2, 3), -1.0)), None, None

        def _prepare_inputs(self, batch):
            self.given = super()._prepare_inputs(batch)
            return self.given

    trainer = train(
        Scripted, model, tmp_path, func=func, old_logps=old_logps, num_generations=2, per_device_train_batch_size=2, max_steps=1,
        scale_rewards="none", before=lambda made: setattr(made, "reward_funcs", [lambda **kw: [1.0, 0.0], *made.reward_funcs[1:]]),
        **KL, **SGD,
    )  # fmt: skip
    by_row = dict(zip(trainer.given["completion_ids"][:, 0].tolist(), trainer.given["advantages"].tolist(), strict=True))
    assert by_row == {7: 0.25, 8: -0.25}
    entry = trainer.history[0]
    assert (entry["kl_in_reward/kl"], entry["kl_in_reward/coef"]) == (1.5, 0.5)
    assert (entry["reward"], entry["rewards/kl_in_reward/mean"]) == (-0.25, -0.75)
    assert trainer.beta == trainer.args.beta == 0.0 and "ref_per_token_logps" not in trainer.given
    assert "kl" not in entry
    real = trainer.given["completion_mask"].bool()
    assert trainer.given["old_per_token_logps"][real].tolist() == [-1.0] * 5


@pytest.mark.parametrize("peft", [False, True], ids=["full", "adapter"])
def test_the_kl_is_that_of_plain_forwards(model, tmp_path, peft):
    class Plain(GRPOExtTrainer):
        """Compares each generation's advantages with those of rewards and KL computed here, by plain forwards."""

        worst, kls = 0.0, ()

        def _generate_and_score_completions(self, inputs):
            rows = super()._generate_and_score_completions(inputs)
            ids = torch.cat([rows["prompt_ids"], rows["completion_ids"]], 1)
            attention = torch.cat([rows["prompt_mask"], rows["completion_mask"]], 1)
            T = rows["completion_ids"].size(1)
            with torch.no_grad():
                if peft:
                    with self.model.disable_adapter():
                        reference = logps(self.model.get_base_model(), ids, attention, T)
                    actor = logps(self.model, ids, attention, T)
                else:
                    reference, actor = logps(base, ids, attention, T), logps(self.model, ids, attention, T)
            kl = ((actor - reference) * rows["completion_mask"] * rows["tool_mask"]).sum(1)
            rewards = torch.tensor([(sum(c) % 17) / 17 + len(c) % 3 for c in self.tokens(rows)]) - 0.5 * kl
            groups = rewards.view(-1, 4)
            expected = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)
            self.worst = max(self.worst, float((rows["advantages"] - expected.flatten()).abs().max()))
            self.kls = (*self.kls, float(kl.abs().mean()))
            return rows

        def tokens(self, rows):
            pairs = zip(rows["completion_ids"].tolist(), rows["completion_mask"].tolist(), strict=True)
            return [[i for i, m in zip(ids, mask, strict=True) if m] for ids, mask in pairs]

    def logps(scored, ids, attention, T):
        positions = (attention.cumsum(1) - 1).clamp(min=0)
        logits = scored(input_ids=ids, attention_mask=attention, position_ids=positions, labels=None).logits[:, -T - 1 : -1]
        return logits.float().log_softmax(-1).gather(2, ids[:, -T:, None])[:, :, 0]

    base = AutoModelForCausalLM.from_pretrained(model)
    trainer = train(
        Plain,
        model,
        tmp_path,
        func=rollouts(tools=True),
        peft_config=adapter() if peft else None,
        **KL,
        **HALF,
        **SGD,
        max_steps=6,
    )
    assert trainer.kls[-1] > 0.01
    assert trainer.worst < 1e-3  # of advantages around 1, divided by a standard deviation


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"scale_rewards": "batch", "mask_truncated_completions": True},
        {"kl_in_reward_target": 0.05, "kl_in_reward_horizon": 64, "num_iterations": 2},
        {"old_logps": "always", "gradient_accumulation_steps": 3, "steps_per_generation": 2},
        {"logps_micro_batch_size": 3, "ref_logps_max_tokens": None},
    ],
    ids=["plain", "batch, truncated", "adaptive", "always, 3/2", "micro-batches"],
)
@pytest.mark.parametrize("peft", [False, True], ids=["full", "adapter"])
def test_stock_trl_trains_alike_on_the_penalised_reward(model, tmp_path, peft, config):
    config = {k: v for k, v in config.items() if k != "ref_logps_max_tokens"}
    stock, ours = against_stock(
        model, tmp_path, rollouts=dict(truncated=0.3, tools=True), peft_config=adapter() if peft else None,
        **{**KL, **HALF, **SGD, "max_steps": 6, **config},
    )  # fmt: skip
    assert len(stock.history) == len(ours.history) == 6
    for name, tolerance in (("grad_norm", 1e-5), ("loss", 1e-5), ("reward", 1e-6)):
        theirs, mine = ([entry[name] for entry in run.history if name in entry] for run in (stock, ours))
        assert mine == pytest.approx(theirs, rel=tolerance, abs=tolerance)
    pairs = zip(stock.model.parameters(), ours.model.parameters(), strict=True)
    assert max(float((a - b).detach().abs().max()) for a, b in pairs) < 1e-5
    assert max(abs(entry.get("kl_in_reward/kl", 0.0)) for entry in ours.history) > 1e-4


def test_what_it_costs(model, tmp_path):
    window = train(GRPOExtTrainer, model, tmp_path / "w", **HALF, **SGD, **KL)
    rollout = train(GRPOExtTrainer, model, tmp_path / "r", **HALF, **SGD, **KL, old_logps="rollout")
    for run, rows in ((window, 32), (rollout, 0)):
        assert run.forwards.counts["no_grad"]["rows"] == rows  # two generations of 16 rows, each once
        assert run.forwards.counts["reference"]["rows"] == 32
        assert [entry["old_logps/rows_recomputed"] for entry in run.history] == [rows / 2, 0.0, rows / 2, 0.0]
    assert all(entry["timing_s/old_logps"] > 0 for entry in window.history[::2])


def test_the_coefficient_follows_its_target(model, tmp_path):
    adaptive = {"kl_in_reward_target": 1e-6, "kl_in_reward_horizon": 160}
    trainer = train(GRPOExtTrainer, model, tmp_path, **KL, **HALF, **SGD, **adaptive, max_steps=8)
    logged = [(entry["kl_in_reward/kl"], entry["kl_in_reward/coef"]) for entry in trainer.history[::2]]
    expected = 0.5
    for kl, coefficient in logged:
        assert coefficient == pytest.approx(expected)
        expected *= 1 + min(max(kl / 1e-6 - 1, -0.2), 0.2) * 16 / 160
    assert trainer.kl_in_reward.coefficient.value == pytest.approx(expected)


def test_an_evaluation_is_penalised_and_moves_nothing(model, tmp_path):
    adaptive = {"kl_in_reward_target": 1e-6, "kl_in_reward_horizon": 160}
    arguments = dict(**KL, **HALF, **SGD, **adaptive, per_device_eval_batch_size=4, num_generations_eval=4)
    trainer = train(GRPOExtTrainer, model, tmp_path, evaluate=True, eval_strategy="steps", eval_steps=2, **arguments)
    without = train(GRPOExtTrainer, model, tmp_path, **HALF, **SGD, **KL, **adaptive)
    assert [entry["eval_kl_in_reward/coef"] for entry in trainer.evaluations] == pytest.approx([0.49, 0.4802], rel=0.05)
    assert trainer.kl_in_reward.coefficient.value == without.kl_in_reward.coefficient.value


def test_the_reward_functions_that_were_given_stay_as_they_are(model, tmp_path):
    functions = [lambda completions, **kw: [float(len(c)) for c in completions]]
    from grpo_ext import GRPOExtConfig
    from tests.tiny import config_kwargs, sums

    trainer = GRPOExtTrainer(model, functions, GRPOExtConfig(**config_kwargs(tmp_path, **KL)), sums())
    assert len(functions) == 1 and len(trainer.reward_funcs) == 2
    assert trainer.ref_model is not None
    plain = GRPOExtTrainer(model, functions, GRPOExtConfig(**config_kwargs(tmp_path)), sums())
    assert plain.ref_model is None and len(plain.reward_funcs) == 1 and plain.kl_in_reward is None


def test_a_users_own_log_probs_are_those_that_count(model, tmp_path):
    class Halved:
        def _get_per_token_logps_and_entropies(self, *args, **kwargs):
            logps, *rest = super()._get_per_token_logps_and_entropies(*args, **kwargs)
            return (0.5 * logps if logps is not None else None, *rest)

    class Ours(Halved, Watched):
        pass

    class Stock(Halved, GRPOTrainer):
        pass

    stock, ours = against_stock(model, tmp_path, stock=Stock, ours=Ours, **KL, **HALF, **SGD)
    assert series(ours, "grad_norm").tolist() == pytest.approx(series(stock, "grad_norm").tolist(), rel=1e-5)


def test_an_actor_away_from_the_reference_is_drawn_back(model, tmp_path):
    """Real samples, no reward but the penalty: the KL of what the actor samples falls."""
    from grpo_ext import GRPOExtConfig
    from tests.tiny import config_kwargs, sums

    arguments = dict(
        learning_rate=3e-3, max_steps=40, per_device_train_batch_size=64, num_generations=8, max_completion_length=8
    )
    config = GRPOExtConfig(**config_kwargs(tmp_path, kl_in_reward=True, kl_in_reward_coef=1.0, **arguments))
    trainer = GRPOExtTrainer(model, lambda completions, **kwargs: [0.0] * len(completions), config, sums())
    torch.manual_seed(0)
    for parameter in trainer.model.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    trainer.train()
    kls = [entry["kl_in_reward/kl"] for entry in trainer.state.log_history if "loss" in entry]
    first, last = sum(kls[:10]) / 10, sum(kls[-10:]) / 10
    assert first > 2.0 and last < 0.85 * first, kls  # about 3.3 and 2.4


def test_a_ready_adapter_is_its_own_reference(model, tmp_path):
    """TRL copies it under the name "ref", as for `beta > 0`: the KL begins at 0 although the adapter is not."""
    from peft import get_peft_model

    ready = get_peft_model(AutoModelForCausalLM.from_pretrained(model), adapter())
    tokenizer = AutoTokenizer.from_pretrained(model)
    trainer = train(GRPOExtTrainer, ready, tmp_path, **KL, **HALF, **SGD, tokenizer=tokenizer)
    assert set(trainer.model.peft_config) == {"default", "ref"} and trainer.model.active_adapter == "default"
    kls = [entry["kl_in_reward/kl"] for entry in trainer.history[::2]]
    assert kls[0] == pytest.approx(0.0, abs=1e-5) and abs(kls[1]) > 1e-4


def test_a_reference_that_follows(model, tmp_path):
    follow = {"sync_ref_model": True, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 1.0}
    trainer = train(GRPOExtTrainer, model, tmp_path, **KL, **HALF, **SGD, **follow)
    assert [entry["kl_in_reward/kl"] for entry in trainer.history[::2]] == pytest.approx([0.0, 0.0], abs=1e-4)
