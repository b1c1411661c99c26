"""Facts about transformers 5.17 and TRL 1.16 that an exact resume relies on."""

import inspect

import torch
from transformers import Trainer
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from trl import GRPOTrainer
from trl.trainer.utils import RepeatSampler


def source(function):
    return inspect.getsource(function)


def in_order(text, *parts):
    at = [text.index(part) for part in parts]
    return at == sorted(at)


def test_a_checkpoint_is_written_in_this_order_and_its_last_file_says_that_it_is_complete():
    assert in_order(
        source(Trainer._save_checkpoint),
        "self.save_model(output_dir",
        "self._save_optimizer_and_scheduler(output_dir)",
        "self._save_rng_state(output_dir)",
        "self.state.save_to_json(os.path.join(output_dir, TRAINER_STATE_NAME))",
        "rotate_checkpoints(",
    )
    assert PREFIX_CHECKPOINT_DIR == "checkpoint"
    assert 'f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"' in source(Trainer._save_checkpoint)
    assert "self._get_output_dir(trial=trial)" in source(Trainer._save_checkpoint)
    for name in ('"rng_state.pth"', 'f"rng_state_{self.args.process_index}.pth"'):
        assert name in source(Trainer._save_rng_state)
    assert 'f"rng_state_{process_index}.pth"' in source(Trainer._load_rng_state)


def test_the_rng_state_is_loaded_once_after_the_data_are_skipped_and_before_the_first_micro_step():
    text = source(Trainer._run_epoch)
    assert text.count("self._load_rng_state(resume_from_checkpoint)") == 2
    assert in_order(
        text,
        "rng_to_sync = True",
        "elif steps_trained_in_current_epoch == 0:",
        "epoch_iterator = iter(train_dataloader)",
        "self.get_batch_samples(epoch_iterator",
        "if rng_to_sync:",
        "self.training_step(model, inputs",
    )
    loop = source(Trainer._inner_training_loop)
    assert in_order(
        loop, "self._init_training_state(", "self._tr_loss = ", "on_train_begin(", "on_epoch_begin(", "self._run_epoch("
    )
    for name in ("_tr_loss", "_total_loss_scalar", "_globalstep_last_logged"):
        assert f"self.{name} = " in loop


def test_a_run_that_is_over_trains_on_unless_its_epochs_are_skipped():
    """It can go when `_run_epoch` looks at `global_step` before its first micro-step."""
    text = source(Trainer._run_epoch)
    assert "max_steps" not in text[: text.index("self.training_step(")]
    assert "self._run_epoch(" in source(Trainer._inner_training_loop)


def test_what_train_takes():
    assert list(inspect.signature(Trainer.train).parameters)[:2] == ["self", "resume_from_checkpoint"]
    assert "train" not in vars(GRPOTrainer)
    assert list(inspect.signature(GRPOTrainer._save_checkpoint).parameters) == ["self", "model", "trial"]
    assert list(inspect.signature(Trainer._save_rng_state).parameters) == ["self", "output_dir"]
    assert list(inspect.signature(Trainer._load_rng_state).parameters) == ["self", "checkpoint"]


def test_the_sampler_draws_one_permutation_from_its_own_generator_each_time_it_is_iterated():
    assert "sampler_fn=self._get_train_sampler" in source(GRPOTrainer.get_train_dataloader)
    whole, skipped = (RepeatSampler(list(range(9)), mini_repeat_count=2, seed=3) for _ in range(2))
    epochs = [list(whole) for _ in range(3)]
    for _ in range(2):
        next(iter(skipped))
    assert list(skipped) == epochs[2] != epochs[1]
    before = torch.get_rng_state()
    list(whole)
    assert torch.equal(torch.get_rng_state(), before)


def test_what_is_kept_between_two_logs():
    text = source(GRPOTrainer.__init__)
    assert 'self._metrics = {"train": defaultdict(list), "eval": defaultdict(list)}' in text
    assert "self.entropy_coef = args.entropy_coef" in text and "self._last_world_entropy = " in text
    table = text[text.index("self._logs = {") :]
    for name in ("images", "prompt", "completion", "advantages"):
        assert f'"{name}": deque(' in table
    for name in ("rewards", "extra"):
        assert f'"{name}": defaultdict(lambda: deque(' in table


def test_the_engine_is_called_by_all_ranks_alike_before_tools_are():
    assert in_order(source(GRPOTrainer._generate), "self._generate_single_turn(", "self._tool_call_loop(")
