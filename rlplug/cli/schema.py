"""``schema``: write JSON schemas of the configuration files, with which editors complete and check them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from pydantic import TypeAdapter

from rlplug import registry
from rlplug.cli import say, tell, without_json
from rlplug.cli.meant import no_flag
from rlplug.cli.pbt import PBT
from rlplug.cli.study import Optuna
from rlplug.config.schema import SEVERAL, SINGLE, Core, Preprocess
from rlplug.registry import Kind
from rlplug.settings import Nested
from rlplug.types import ConfigError

USAGE = """rlplug schema [folder]   (default: .vscode/schemas)

Writes a JSON schema for the YAML files of each configuration group, with the options of all
installed components, and prints the settings with which VS Code's YAML extension uses them."""

FOLDER = ".vscode/schemas"
GLOBAL = ("algo", "tuned", "experiment", "config")
"""groups whose files set keys of the whole run"""
DEFAULTS = {"type": "array", "description": "Files that this one builds on, in Hydra's defaults list."}
LATER = {"type": "string", "pattern": r"^(.*\$\{.+\}.*|\?\?\?)$"}
"""an interpolation, or the mark of a value that must be given"""

Schema = dict[str, Any]


def main(arguments: Sequence[str]) -> int:
    """Write the schemas.

    Raises:
        ConfigError: the command line is wrong, or the folder cannot be written.
    """
    if {"-h", "--help"} & set(arguments):
        print(USAGE)
        return 0
    arguments, _ = without_json(arguments)  # the result is JSON in any case
    if flags := [argument for argument in arguments if argument.startswith("-")]:
        raise no_flag(flags[0])
    if len(arguments) > 1:
        raise ConfigError("", "schema takes at most a folder; see rlplug schema --help")
    folder, uses = Path(*arguments or [FOLDER]), dict[str, str]()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for group, schema in schemas().items():
            path = folder / f"{group}.schema.json"
            path.write_text(json.dumps(schema) + "\n", encoding="utf-8")
            shown = path if path.is_absolute() else f"./{path}"
            uses[str(shown)] = "**/conf/config.yaml" if group == "config" else f"**/conf/{group}/*.yaml"
    except OSError as error:
        raise ConfigError("", f"{folder}: {error.strerror}") from None
    say(json.dumps({"yaml.schemas": uses}, indent=2))
    tell(f"wrote {len(uses)} schemas to {folder}; put the lines above into .vscode/settings.json")
    return 0


def schemas() -> dict[str, Schema]:
    """Return the schema of each configuration group, by name."""
    nodes = {kind: _node(kind) for kind in get_args(Kind)}
    found = {
        group: _document(_run(nodes) if group in GLOBAL else nodes[group], nodes) for group in (*nodes, *GLOBAL[1:])
    }
    # a file with the key env chooses more than the environment
    either = {"if": {"required": ["env"]}, "then": _run(nodes), "else": nodes["env"]}
    found["env"] = _document(either, nodes)
    preprocess, *sweepers = [
        {"type": "object", "properties": _properties(config), "additionalProperties": False}
        for config in (Preprocess, Optuna, PBT)
    ]
    return found | {"preprocess": _document(preprocess, {}), "sweeper": _document({"anyOf": sweepers}, {})}


def _document(schema: Schema, nodes: Mapping[str, Schema]) -> Schema:
    """Add to a schema the definitions of nested components that it refers to."""
    found, text = dict[str, Schema](), json.dumps(schema)
    while missing := set(re.findall(r'"#/definitions/(\w+)"', text)) - found.keys():
        found |= {kind: nodes[kind] for kind in missing}
        text = json.dumps([schema, found])
    return {"$schema": "http://json-schema.org/draft-07/schema#", **schema, "definitions": found}


def _run(nodes: Mapping[str, Schema]) -> Schema:
    """Return the schema of a file that sets keys of the whole run."""
    one = {kind: nodes[kind] for kind in (*SINGLE, "model")}
    one["curriculum"] = {"anyOf": [nodes["curriculum"], {"type": "null"}]}
    several = {kind: {"type": "object", "additionalProperties": nodes[kind]} for kind in SEVERAL}
    keys = {"defaults": DEFAULTS, **_properties(Core), **one, **several, "hydra": {"type": "object"}}
    slots = {"_model$": {"anyOf": [nodes["model"], {"type": "null"}]}}
    return {"type": "object", "properties": keys, "patternProperties": slots, "additionalProperties": False}


def _node(kind: Kind) -> Schema:
    """Return the schema of a node that selects a component, or changes options of one selected elsewhere."""
    options = dict(_components(kind))
    names = {"name": {"enum": sorted(options), "description": f"The component of kind {kind}."}}
    every: dict[str, list[Schema]] = {}
    for properties in options.values():
        for key, schema in properties.items():
            every.setdefault(key, []).extend([] if schema in every.get(key, []) else [schema])
    union = {key: found[0] if len(found) == 1 else {"anyOf": found} for key, found in every.items()}
    rules = [
        {
            "if": {"properties": {"name": {"const": name}}, "required": ["name"]},
            "then": {"properties": {**names, "defaults": DEFAULTS, **properties}, "additionalProperties": False},
        }
        for name, properties in options.items()
    ]
    unnamed = {"properties": {"defaults": DEFAULTS, **union}, "additionalProperties": False}
    rest = {"if": {"not": {"required": ["name"]}}, "then": unnamed}
    known = {"if": {"required": ["name"]}, "then": {"properties": names}}
    return {"type": "object", "allOf": [*rules, known, rest]}


def _components(kind: Kind) -> Iterator[tuple[str, dict[str, Schema]]]:
    """Yield the components of a kind that can be imported, with the schemas of their options."""
    for name in registry.names(kind):
        try:
            yield name, _properties(registry.load(kind, name).Config)
        except (AttributeError, ConfigError) as error:
            tell(f"{kind} {name!r} is left out: {error}")


def _properties(config: Any) -> dict[str, Schema]:
    """Return the schema of each option of a ``Config``."""
    whole = TypeAdapter(config).json_schema()
    properties = _lenient(whole.get("properties", {}), whole.get("$defs", {}))
    for name, field in config.__pydantic_fields__.items():
        for mark in field.metadata:
            if isinstance(mark, Nested):
                node = {"anyOf": [{"$ref": f"#/definitions/{mark.kind}"}, {"type": "string"}]}
                several = {"anyOf": [{"type": "object", "additionalProperties": {"type": "object"}}, {"type": "null"}]}
                doc = {"description": field.description}
                properties[name] = doc | (several if mark.several else node if mark.kind == "algo" else {})
                properties[name] |= {"$ref": f"#/definitions/{mark.kind}"} if mark.kind == "model" else {}
    return properties


def _lenient(schema: Any, inside: Mapping[str, Schema]) -> Any:
    """Inline references, accept interpolations for values, and write tuples as draft 7 does."""
    if isinstance(schema, list):
        return [_lenient(part, inside) for part in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        schema = inside[schema["$ref"].rpartition("/")[2]] | {k: v for k, v in schema.items() if k != "$ref"}
    schema = {
        k: _lenient(v, inside) for k, v in schema.items() if k not in ("title", "required") or isinstance(v, dict)
    }
    if "prefixItems" in schema:
        schema["items"] = schema.pop("prefixItems")
    if (
        "enum" not in schema
        and "const" not in schema
        and schema.get("type") not in ("array", "integer", "number", "boolean")
    ):
        return schema
    said = {key: schema.pop(key) for key in ("description",) if key in schema}
    return {**said, "anyOf": [schema, LATER]}
