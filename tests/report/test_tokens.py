"""Token text from the Parquet twin, and what is said where it is lacking."""

import math

import pytest

from grpo_ext.consistency.report.read import Problems
from grpo_ext.consistency.report.summary import WorstToken
from grpo_ext.consistency.report.tokens import TokenFacts, read_tokens, visible
from tests.report.dumps import write_tokens

WORST = [WorstToken(1, 0, 1, 0.5), WorstToken(1, 2, 0, 0.25)]
TEXTS = {(0, 0): "a", (0, 1): " the", (2, 0): "\n", (2, 1): "b"}


def test_facts_of_the_worst_tokens(tmp_path):
    problems = Problems()
    facts = read_tokens(write_tokens(tmp_path, 1, TEXTS), WORST, 4, problems)
    assert problems.lines() == []
    assert facts[0, 1] == TokenFacts(101, "␣the", pytest.approx(0.5), pytest.approx(0.25), 1, "prompt 0")
    assert facts[2, 0].text == "↵"


def test_nulls_and_nan_are_unknown(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = tmp_path / "prob_tokens_step_1.parquet"
    columns = {"sample": [0, 2], "position": [1, 0], "token_text": ["x", None], "rollout_log_prob": [None, math.nan]}
    columns |= {"old_log_prob": [-math.inf, 0.0], "token_id": [None, 7], "policy_version": [None, 0], "prompt_id": [None, "p"]}
    pq.write_table(pa.table(columns), path)
    facts = read_tokens(path, WORST, 2, Problems())
    assert facts == {(0, 1): TokenFacts(text="x", actor=0.0), (2, 0): TokenFacts(7, None, None, 1.0, 0, "p")}


def test_a_lacking_column_is_named_and_the_rest_is_read(tmp_path):
    problems = Problems()
    path = write_tokens(tmp_path, 1, TEXTS, drop=("token_text", "prompt_id"))
    assert read_tokens(path, WORST, 4, problems)[0, 1].token_id == 101
    assert problems.lines() == ["prob_tokens_step_1.parquet: no column token_text, prompt_id: left blank in the tables"]


def test_without_positions_nothing_can_be_found(tmp_path):
    problems = Problems()
    assert read_tokens(write_tokens(tmp_path, 1, TEXTS, drop=("position",)), WORST, 4, problems) is None
    assert problems.lines()[0].startswith("prob_tokens_step_1.parquet: not used: it has no column position")


@pytest.mark.parametrize("spoil", [lambda content: content[:-20], lambda content: b"", lambda content: b"PAR1" * 9])
def test_a_damaged_file_is_named(tmp_path, spoil):
    path = write_tokens(tmp_path, 1, TEXTS)
    path.write_bytes(spoil(path.read_bytes()))
    problems = Problems()
    assert read_tokens(path, WORST, 4, problems) is None
    assert problems.lines()[0].startswith("prob_tokens_step_1.parquet: not used: no readable Parquet file (")


def test_damage_inside_is_named(tmp_path):
    path = write_tokens(tmp_path, 1, TEXTS)
    content = bytearray(path.read_bytes())
    content[4:400] = b"\xff" * 396
    path.write_bytes(content)
    problems = Problems()
    assert read_tokens(path, WORST, 4, problems) is None
    assert problems.lines()


def test_a_column_of_the_wrong_type_is_named(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = tmp_path / "prob_tokens_step_1.parquet"
    pq.write_table(pa.table({"sample": ["zero"], "position": ["one"]}), path)
    problems = Problems()
    assert read_tokens(path, WORST, 1, problems) is None
    assert problems.lines()[0].startswith("prob_tokens_step_1.parquet: not used")


def test_other_rows_than_the_mask_counts(tmp_path):
    problems = Problems()
    assert read_tokens(write_tokens(tmp_path, 1, TEXTS), WORST, 5, problems)
    assert problems.lines() == [
        "prob_tokens_step_1.parquet: 4 rows, where the mask counts 5 tokens: the text may be of other tokens"
    ]


@pytest.mark.parametrize(
    "text, shown",
    [
        (" a\tb\r\n", "␣a⇥b␍↵"),
        ("\x00\x1b", "\\u0000\\u001b"),
        ("\u202eevil", "\\u202eevil"),  # would turn the text around
        ("\u00a0\u200b", "\\u00a0\\u200b"),
        ("é漢🙂", "é漢🙂"),
        ("x" * 61, "x" * 60 + "…"),
    ],
)
def test_visible(text, shown):
    assert visible(text) == shown
