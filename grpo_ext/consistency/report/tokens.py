"""Text and log-probs of a few tokens, from a step's Parquet file."""

import math
import unicodedata
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_ext.consistency.report.read import Problems
from grpo_ext.consistency.report.summary import WorstToken

_OPTIONAL = ("token_id", "token_text", "rollout_log_prob", "old_log_prob", "policy_version", "prompt_id")
_LONGEST = 60
_SPACES = {" ": "␣", "\n": "↵", "\t": "⇥", "\r": "␍"}


@dataclass(frozen=True)
class TokenFacts:
    """What the Parquet file says of a token; None where it does not. Probabilities, not log-probs."""

    token_id: int | None = None
    text: str | None = None
    rollout: float | None = None
    actor: float | None = None
    policy_version: int | None = None
    prompt: str | None = None


def read_tokens(
    path: Path, worst: list[WorstToken], expected: int, problems: Problems
) -> dict[tuple[int, int], TokenFacts] | None:
    """Facts of the `worst` tokens by (sample, position), of a file that should have `expected` rows; None if it cannot be read."""
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    try:
        about = pq.read_metadata(path)
        names = about.schema.to_arrow_schema().names
        lacking = [name for name in ("sample", "position", *_OPTIONAL) if name not in names]
        if {"sample", "position"} & set(lacking):
            problems.add(path.name, f"not used: it has no column {lacking[0]}; its columns are {', '.join(names)}")
            return None
        wanted = pc.field("sample").isin([token.sample for token in worst])
        wanted &= pc.field("position").isin([token.position for token in worst])
        columns = ["sample", "position", *(name for name in _OPTIONAL if name in names)]
        rows = pq.read_table(path, columns=columns, filters=wanted, partitioning=None).to_pylist() if worst else []
        facts = {(int(row["sample"]), int(row["position"])): _facts(row) for row in rows}
    except (pa.ArrowException, OSError, ValueError, TypeError) as error:
        problems.add(path.name, f"not used: no readable Parquet file ({str(error).splitlines()[0].rstrip('.')})")
        return None
    if lacking:
        problems.add(path.name, f"no column {', '.join(lacking)}: left blank in the tables")
    if about.num_rows != expected:
        problems.add(
            path.name, f"{about.num_rows} rows, where the mask counts {expected} tokens: the text may be of other tokens"
        )
    return facts


def visible(text: str) -> str:
    """Text in which white space, control and direction characters show, cut to 60 characters."""
    shown = (_SPACES.get(c) or (f"\\u{ord(c):04x}" if unicodedata.category(c)[0] in "CZ" else c) for c in text[:_LONGEST])
    return "".join(shown) + ("…" if len(text) > _LONGEST else "")


def _facts(row: dict[str, Any]) -> TokenFacts:
    return TokenFacts(
        token_id=row.get("token_id"),
        text=None if row.get("token_text") is None else visible(str(row["token_text"])),
        rollout=_probability(row.get("rollout_log_prob")),
        actor=_probability(row.get("old_log_prob")),
        policy_version=row.get("policy_version"),
        prompt=None if row.get("prompt_id") is None else str(row["prompt_id"])[:_LONGEST],
    )


def _probability(log_prob: float | None) -> float | None:
    return None if log_prob is None or math.isnan(log_prob) else math.exp(min(log_prob, 0.0))
