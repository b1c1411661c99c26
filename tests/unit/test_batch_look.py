"""The look at a batch: what its table says, and the first row with its loss mask."""

import math

import torch

from grpo_ext.batch.look import Piece, TensorLook, first_row, tensor_looks
from grpo_ext.console import BatchLook, batch_look, step_line

ROWS = {
    "prompt_ids": torch.tensor([[0, 11], [12, 13]]),
    "prompt_mask": torch.tensor([[0, 1], [1, 1]]),
    "completion_ids": torch.tensor([[21, 22, 23, 24], [25, 0, 0, 0]]),
    "completion_mask": torch.tensor([[1, 1, 1, 1], [1, 0, 0, 0]]),
    "tool_mask": torch.tensor([[1, 0, 0, 1], [1, 1, 1, 1]]),
    "advantages": torch.tensor([0.5, -0.5]),
    "sampling_per_token_logps": torch.tensor([[-1.0, math.nan, -1.0, -1.0], [-1.0, 0.0, 0.0, 0.0]]),
    "num_items_in_batch": torch.tensor(3),
}


def decode(ids):
    return " ".join(map(str, ids))


def test_every_tensor_is_described():
    looks = {look.name: look for look in tensor_looks(ROWS)}
    assert list(looks) == list(ROWS)
    assert looks["prompt_ids"] == TensorLook("prompt_ids", (2, 2), "int64", 3, 1, 2, 0)
    scores = looks["sampling_per_token_logps"]
    assert scores == TensorLook("sampling_per_token_logps", (2, 4), "float32", 5, 1, 4, 1)
    assert looks["advantages"] == TensorLook("advantages", (2,), "float32", None, None, None, 0)
    assert looks["num_items_in_batch"].shape == ()


def test_the_first_row_shows_its_loss_mask():
    assert first_row(ROWS, decode) == [
        Piece("11", "prompt"),
        Piece("21", "learned"),
        Piece("22 23", "masked"),
        Piece("24", "learned"),
    ]
    blanked = ROWS | {"completion_mask": torch.zeros(2, 4, dtype=torch.long)}
    assert first_row(blanked, decode) == [Piece("11", "prompt")]


def test_it_is_readable_without_colour():
    text = batch_look(tensor_looks(ROWS), first_row(ROWS, decode))
    line = next(line for line in text.splitlines() if line.startswith("sampling_per_token_logps"))
    assert line.split() == ["sampling_per_token_logps", "2", "x", "4", "float32", "5", "1", "4", "1"]
    assert text.endswith("[-11-]\n21[-22 23-]24") and "\x1b" not in text


def test_it_is_printed_once_where_it_is_wanted(capsys):
    for wanted in (True, False):
        look = BatchLook(wanted, decode)
        assert look(ROWS) is ROWS and look(ROWS) is ROWS
        assert capsys.readouterr().out.count("What the first loss is given") == wanted


def test_markup_and_new_lines_in_a_text_are_shown_as_they_are():
    assert "[bold]x\\n" in batch_look([], [Piece("[bold]x\n", "learned")])


def test_a_step_without_a_usable_reward_has_a_line():
    assert step_line(3, 10, {"reward": None}).startswith("step  3/10 | reward none")
