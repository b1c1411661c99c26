"""A recipe's YAML as settings: defaults filled in, unknown keys and values of a wrong kind named. Imports no TRL.

What `GRPOExtConfig` has, with which defaults, is recorded in fields.json (see `record`). A recipe's script parses arguments of
its own from the same file, so a key that `GRPOExtConfig` lacks is no mistake by itself: it is fine where TRL's usual
script arguments or a dataclass of a script beside the file (or one folder up) has it, a mistake where it looks like a known
key, and else only remarked upon.
"""

import ast
import difflib
import json
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import yaml

from grpo_ext.rollout.sampling import as_mapping
from grpo_ext.rules.problem import Problem

FIELDS = Path(__file__).with_name("fields.json")
NEAR = 0.8  # difflib's similarity from which an unknown key is taken for a slip of the pen
_TRUTH = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}


class RecipeError(ValueError):
    """A file that cannot be read as a recipe at all."""


@dataclass(frozen=True)
class Recipe:
    """settings: every field of GRPOExtConfig as an attribute, given or default. own: what the script reads. problems, remarks:
    what is wrong with the file, what may be."""

    settings: SimpleNamespace
    own: dict[str, Any]
    problems: list[Problem]
    remarks: list[str]


def read_recipe(path: Path) -> Recipe:
    """The recipe at `path`. Raises RecipeError for what is no YAML mapping of plain values."""
    recorded = json.loads(FIELDS.read_text())
    kinds = {name: kind for name, (kind, _) in recorded["config"].items()}
    values = {name: default for name, (_, default) in recorded["config"].items()}
    given = read_yaml(path)
    given.pop("env", None)  # TrlParser sets these environment variables
    problems, remarks, own = [], [], {}
    for key, value in given.items():
        if key not in values:
            own[key] = value
            continue
        try:
            values[key] = coerced(key, value, kinds[key])
        except ValueError as error:
            problems.append(Problem(str(error)))
    unknown = [key for key in own if key not in recorded["script"]]
    declared = declared_beside(path) if unknown else set()
    known = [*values, *recorded["script"], *declared, "env"]
    for key in unknown:
        if key not in declared:
            text, sure = unknown_key(str(key), known, path)
            problems += [Problem(text)] if sure else []
            remarks += [] if sure else [text]
    return Recipe(SimpleNamespace(**values), own, problems, remarks)


def read_yaml(path: Path) -> dict[Any, Any]:
    """The mapping in a YAML file. Raises RecipeError, saying where and what to do."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}. Give a YAML file.") from None
    try:
        loaded = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark, said = getattr(error, "problem_mark", None), getattr(error, "problem", None) or str(error)
        where = f"{path}, line {mark.line + 1}, column {mark.column + 1}" if mark else str(path)
        advice = ""
        if "\\t" in said:
            advice = " YAML takes no tabs for indentation: use spaces."
        elif "tag" in said:
            advice = " Only plain values are read, never Python objects: take the tag out."
        raise RecipeError(f"{where}: {said}.{advice}") from None
    except RecursionError:
        raise RecipeError(f"{path} nests deeper than can be read. Write one `setting: value` a line.") from None
    if not isinstance(loaded, dict):
        raise RecipeError(f"{path} holds {type(loaded).__name__}, no mapping. Write one `setting: value` a line.")
    return loaded


def coerced(name: str, value: Any, kind: str) -> Any:
    """`value` as a field of `kind` takes it; text is converted as on a command line. Raises ValueError."""
    base = kind.rstrip("?")
    if base == "any" or (value is None and kind.endswith("?")):
        return value
    if base == "dict":
        try:
            value = as_mapping(value)
        except ValueError as error:
            raise ValueError(f"{name}={value!r} is no JSON object ({error}). Write a YAML mapping.") from None
        if not isinstance(value, dict | str):  # text may be the path of a file
            raise ValueError(f"{name}={value!r} is no mapping. Write one `key: value` a line below {name}:.")
        return value
    if isinstance(value, str) and base == "bool":
        value = _TRUTH.get(value.lower(), value)
    elif isinstance(value, str) and base in ("int", "float"):
        with suppress(ValueError):
            value = int(value) if base == "int" else float(value)  # PyYAML reads 1e-6 as text
    elif isinstance(value, int) and not isinstance(value, bool) and base == "float":
        value = float(value)
    if type(value).__name__ == base:
        return value
    wanted = {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "text"}[base]
    advice = f"Write {name}: {wanted}."
    if base == "str":
        word = {False: "no", True: "yes"}.get(value, value) if isinstance(value, bool) else value
        advice = f'Put it in quotes, as in {name}: "{word}"' + (
            "; YAML reads a bare yes, no, on or off as true or false." if isinstance(value, bool) else "."
        )
    raise ValueError(f"{name}={value!r} is {type(value).__name__}, and {wanted} is needed. {advice}")


def unknown_key(key: str, known: Collection[str], path: Path) -> tuple[str, bool]:
    """(what to say of an unknown key, whether it is surely a mistake)."""
    nearest = difflib.get_close_matches(key, known, n=1, cutoff=0)
    likeness = difflib.SequenceMatcher(None, nearest[0], key).ratio()
    text = f"{key!r} in {path} is no setting of GRPOExtConfig, and no script beside the file declares it"
    if likeness >= NEAR:
        return f"{text}. Did you mean {nearest[0]!r}?", True
    hint = f"; the nearest known one is {nearest[0]!r}" if likeness >= 0.5 else ""
    return f"{text}{hint}. Leave it if your script reads it.", False


def declared_beside(path: Path) -> set[str]:
    """Fields of the dataclasses in the Python files of the recipe's folder and the one above. Nothing is imported or run."""
    folder = Path(path).resolve().parent
    names: set[str] = set()
    for script in sorted([*folder.glob("*.py"), *folder.parent.glob("*.py")]):
        try:
            text = script.read_text(encoding="utf-8")
            tree = ast.parse(text) if "@dataclass" in text else ast.Module([], [])
        except (OSError, UnicodeDecodeError, SyntaxError, ValueError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and any("dataclass" in ast.unparse(each) for each in node.decorator_list):
                names |= {
                    each.target.id
                    for each in node.body
                    if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
                }
    return names
