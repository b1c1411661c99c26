"""The benchmark of the train side, on a model of a size at which its times mean nothing: what it counts must be right."""

import pytest

from benchmarks import train_side


@pytest.fixture
def folder(tmp_path, monkeypatch):
    small = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
    }
    monkeypatch.setattr(train_side, "SHAPE", train_side.SHAPE | small)
    train_side.build_model(tmp_path / "model")
    return tmp_path


def test_the_old_pass_and_the_padding_are_gone(folder):
    found = train_side.measure("tail-2/2/1-c128", folder, rounds=1)
    assert found["no_grad_rows"] == [48, 0] and found["grad_norm_apart"] < 1e-5
    trl, ours = found["real_token_share"]
    assert trl < ours <= 1


def test_a_case_with_a_prompt_length_sets_auto_against_trees_and_rows(folder):
    found = train_side.measure("tail-2/2/1-p12-g4-c16-lora", folder, rounds=1)
    assert found["grad_norm_apart"] < 1e-5 and 0 < found["predicted"] < 1
    assert {"trees_cpu_ratio", "rows_cpu_ratio", "auto_against_better", "distinct_token_share"} <= found.keys()
    assert train_side.line(found)
