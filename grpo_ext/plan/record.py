"""Writes fields.json, what `plan` knows of the configuration without importing it: `python -m grpo_ext.plan.record`.

{"config": {field of GRPOExtConfig: [kind, default]}, "script": [fields of TRL's script and model arguments]}; the kinds are
those of `recipe.Kind`. A test holds the file against the dataclasses.
"""

import dataclasses
import enum
import json
import types
import typing
from typing import Any

from grpo_ext.plan.recipe import FIELDS

TAKEN_AS_WELL = {"scale_rewards", "shared_prompt"}  # annotated as text, but true and false are taken too


def kind(hint: Any) -> str:
    """ "int", "float", "bool", "str" or "dict", with a "?" where None is allowed as well; "any" for all else."""
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union else (hint,)
    optional = "?" if type(None) in options else ""
    plain = {
        typing.get_origin(o) or o
        for o in options
        if o is not type(None) and not (isinstance(o, type) and issubclass(o, enum.Enum))
    }
    for types_, name in (({int}, "int"), ({float}, "float"), ({bool}, "bool"), ({str}, "str"), ({dict, str}, "dict")):
        if plain == types_:
            return name + optional
    return "any"


def default(field: dataclasses.Field) -> Any:
    value = None if field.default is dataclasses.MISSING else field.default
    return getattr(value, "value", value)


def fields() -> dict[str, Any]:
    from trl import ModelConfig, ScriptArguments
    from trl.scripts.utils import DatasetMixtureConfig

    from grpo_ext import GRPOExtConfig

    hints = typing.get_type_hints(GRPOExtConfig)
    config = {
        f.name: ["any" if f.name in TAKEN_AS_WELL else kind(hints[f.name]), default(f)]
        for f in dataclasses.fields(GRPOExtConfig)
    }
    others = (ModelConfig, ScriptArguments, DatasetMixtureConfig)
    return {"config": config, "script": sorted({f.name for each in others for f in dataclasses.fields(each)} - set(config))}


def main() -> None:
    recorded = fields()
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(entry)}" for name, entry in recorded["config"].items())
    FIELDS.write_text(f'{{"config": {{\n{lines}\n}},\n"script": {json.dumps(recorded["script"])}}}\n')
    print(f"Wrote {len(recorded['config'])} fields to {FIELDS}")


if __name__ == "__main__":
    main()
