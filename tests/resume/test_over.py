"""A run that was over when it was killed is over when it is resumed: no step more, and the same last log."""

import pytest

from tests.resume.runs import train

RUNS = {
    "within an epoch": {"max_steps": 3},
    "at the end of its epochs": {"max_steps": -1, "num_train_epochs": 1, "prompts": 4, "logging_steps": 3},
}


@pytest.mark.parametrize("name", RUNS)
def test_no_step_is_taken(model, tmp_path, name):
    whole = train(model, tmp_path, **RUNS[name])
    part = train(model, tmp_path, resume=True, **RUNS[name])
    assert part == whole


def test_nor_where_less_steps_are_asked_for_now(model, tmp_path):
    train(model, tmp_path, max_steps=3)
    assert train(model, tmp_path, resume=True, max_steps=2)["step"] == 3
