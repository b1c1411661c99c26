"""Sampling seeds: one per rollout, the same whoever shares its batch and however many ranks there are."""

from hypothesis import given
from hypothesis import strategies as st

from grpo_ext.rollout.seeds import EngineCall, GenerationCount, prompt_key, rollout_seeds

A, B, C = prompt_key([1, 2, 3]), prompt_key([1, 2]), prompt_key([12, 3])


def test_a_seed_is_what_it_was():
    assert A == "e2353910701f1c2a"
    assert rollout_seeds(7, "train/0", [A, A]) == [7452450208445137791, 414094470442528009]


def test_seeds_follow_run_batch_prompt_and_sample():
    seeds = [rollout_seeds(base, place, [A, A, B, B]) for base in (7, 8) for place in ("train/0", "train/1", "eval/0")]
    flat = [seed for each in seeds for seed in each]
    assert len(set(flat)) == len(flat) and all(0 <= seed < 2**63 for seed in flat)
    assert len({A, B, C}) == 3


def test_two_groups_with_the_same_prompt_share_no_seed():
    assert len(set(rollout_seeds(7, "train/0", [A, A, B, B, A, A]))) == 6


@given(st.lists(st.sampled_from([A, B, C]), min_size=1), st.data())
def test_neither_ranks_nor_the_rest_of_the_batch_matter(prompts, data):
    whole = rollout_seeds(7, "train/0", prompts)
    cut = data.draw(st.integers(0, len(prompts)))
    here, there = prompts[:cut], prompts[cut:]
    assert rollout_seeds(7, "train/0", here) + rollout_seeds(7, "train/0", there, earlier=here) == whole
    mine = [seed for prompt, seed in zip(prompts, whole, strict=True) if prompt == A]
    assert rollout_seeds(7, "train/0", [prompt for prompt in prompts if prompt == A]) == mine


def test_evaluation_does_not_move_the_numbers_of_training():
    count = GenerationCount()
    count.begins("train")
    assert count.call() == EngineCall("train", 0, 0) and count.call() == EngineCall("train", 0, 1)
    count.begins("eval")
    assert count.call() == EngineCall("eval", 0, 0)
    count.begins("train")
    assert count.call() == EngineCall("train", 1, 0)


def test_numbers_go_on_after_a_resume():
    count, resumed = GenerationCount(), GenerationCount()
    for mode in ("train", "eval", "train"):
        count.begins(mode)
    resumed.load_state_dict(count.state_dict())
    resumed.begins("train")
    assert resumed.call() == EngineCall("train", 2, 0) and count.number("train") == 1
