"""Composition of overrides to a resolved configuration, by Hydra, with all plugins' YAML groups."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf, open_dict

from rlplug.config.errors import UnknownKeyError, elsewhere, joined, single
from rlplug.config.explain import chosen_as, explained, not_chosen, unknown_option
from rlplug.config.origins import blamed, check_packages, files_of, folders_of, loaded, option_names
from rlplug.config.schema import SEVERAL, SINGLE, RunConfig, inside, kind_of, parse, replaced
from rlplug.registry import Kind, preset, warn_broken
from rlplug.types import ConfigError


def compose(overrides: Sequence[str] = ()) -> RunConfig:
    """Compose and validate the run that a command line describes.

    >>> compose(["algo=sac", "env=pendulum"]).algo.cfg.gamma
    0.99

    Raises:
        ConfigError: with one line for each mistake.
    """
    warn_broken()
    config = composed(overrides)
    return validated(config, config.hydra, overrides)[0]


def validated(config: DictConfig, hydra: Any, overrides: Sequence[str]) -> tuple[RunConfig, Tuned | None]:
    """Return a run composed by Hydra, and the tuned settings that it includes.

    Args:
        config: the composed configuration, with or without Hydra's node.
        hydra: Hydra's node.
        overrides: the command line.

    Raises:
        ConfigError: with one line for each mistake.
    """
    choices = hydra.runtime.choices
    check_packages([*choices.items(), *((kind, config[kind].get("name")) for kind in SEVERAL)])
    check_choices(choices, overrides)
    pair = tuned(hydra)
    raw = {key: _completed(kind_of(key), node) for key, node in plain(config, overrides, pair).items()}
    try:
        run = parse(raw)
        typed = [word.lstrip("+").partition("=")[0] for word in overrides]
        whole = "rollout" in run.buffer.cls.gives and run.loop.cls.gives_rows  # else it is that of a generation
        if whole and "train_batch_size" in typed and "buffer" not in typed:
            raise ConfigError("train_batch_size", "nothing is sampled; set rollout_fragment_length or loop.episodes")
        return run, pair
    except ConfigError as error:
        words = command(hydra)
        raise blamed(joined([_meant(one, raw) for one in single(error)]), files_of(words), words) from None


def _meant(error: ConfigError, raw: Mapping[str, Any]) -> ConfigError:
    """Return the error; for an unknown key, suggest keys by the terms of other libraries or in other places."""
    if isinstance(error, UnknownKeyError) and (others := elsewhere(raw, error.key) or chosen_as(error.key, raw)):
        return ConfigError(error.key, f"unknown key; did you mean {' or '.join(others)}?")
    return error


def composed(overrides: Sequence[str] = ()) -> DictConfig:
    """Compose the overrides with Hydra. The result includes Hydra's node ``hydra``.

    Raises:
        ConfigError: Hydra rejects the overrides.
    """
    if isinstance(overrides, str):
        raise ConfigError("", f"one string, {overrides!r}, should be a list: {overrides.split()}")
    with explained(overrides):
        return loaded(overrides)


def command(hydra: Any) -> list[str]:
    """Return the original overrides of a configuration, with interpolations; ``hydra`` is Hydra's node."""
    return OmegaConf.to_container(hydra.overrides.task, resolve=False)  # type: ignore[return-value]


class Tuned(NamedTuple):
    """Tuned settings of an algorithm and environment, from ``conf/tuned/<algo>_<env>.yaml``."""

    choices: Mapping[str, str]  # by group
    replaced: Mapping[str, Any]  # nodes, without tuned settings, of components that the settings were not tuned for
    exploration: Sequence[str] | None  # modules chosen on the command line, if any

    def __str__(self) -> str:
        algo, env, name = (self.choices[group] for group in ("algo", "env", "tuned"))
        what = f"tuned for {algo} on {env}" if name == f"{algo}_{env}" else f"settings of tuned/{name}.yaml"
        but = "".join(f", except {group}={self.choices[group]}" for group in self.replaced)
        return f"{what}{but}; tuned=none for the algorithm's own defaults"


def tuned(hydra: Any) -> Tuned | None:
    """Return the tuned settings of a configuration composed by Hydra; ``hydra`` is Hydra's node.

    They set for example ``model.hidden`` for the algorithm's default model. Other models do not receive it.

    Raises:
        ConfigError: the command line chooses tuned settings that do not exist.
    """
    choices = hydra.runtime.choices
    name, algo, env = (choices.get(group) for group in ("tuned", "algo", "env"))
    folders = folders_of(hydra.overrides.hydra)
    if name in (None, "none"):
        return None
    if preset("tuned", name) is None and name not in option_names("tuned", folders):
        if name != f"{algo}_{env}":
            raise unknown_option(f"tuned/{name}", folders)
        return None
    words = [override for override in command(hydra) if not override.startswith("tuned=")]
    changed = any(re.match("[+~]*(model|buffer|loop|experiment)([=@]|$)", word) for word in words)
    own = composed([*folders, f"algo={algo}", f"env={env}"]).hydra.runtime.choices if changed else choices
    others = [group for group in ("model", "buffer", "loop") if choices.get(group) != own.get(group)]
    chooses = any(word.startswith("exploration=") for word in words)
    if not others and not chooses:
        return Tuned(choices, {}, None)
    without = composed([*folders, *words, "tuned=none"])
    replaced = {group: without[group] for group in others if group in without}
    return Tuned(choices, replaced, [*without.exploration] if chooses else None)


def plain(config: DictConfig, overrides: Sequence[str] = (), tuned: Tuned | None = None) -> dict[str, Any]:
    """Return a composed configuration as dicts and lists, with resolved interpolations and without Hydra's node.

    An experiment's settings for an exploration module or logger that is not chosen are dropped, unless ``overrides``
    set them, too, which ``parse`` reports as an error.

    Raises:
        ConfigError: a required value (``???``) is missing, or an interpolation cannot be resolved.
    """
    job = OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])
    if tuned:
        with open_dict(job):
            for group, node in tuned.replaced.items():
                job[group] = node
            if tuned.exploration is not None:
                job.exploration = OmegaConf.masked_copy(job.exploration, [*tuned.exploration])
    with explained():
        raw: Any = OmegaConf.to_container(job, resolve=True, throw_on_missing=True)
    for kind in SEVERAL:
        nodes = raw.get(kind) if isinstance(raw.get(kind), dict) else {}
        for name in [name for name, node in nodes.items() if isinstance(node, dict) and "name" not in node]:
            if not any(word.lstrip("+~").startswith((f"{kind}.{name}", f"{kind}={{")) for word in overrides):
                del nodes[name]
            elif name in option_names(kind):
                raise not_chosen(kind, name, [other for other in nodes if "name" in (nodes[other] or ())])
    return raw


def _completed(kind: Any, node: Any) -> Any:
    return replaced(node, {path: _completed(inner, _filled(inner, one)) for path, one, inner in inside(kind, node)[1]})


def _filled(kind: Kind, node: Any) -> Any:
    """Return a nested node with the settings that its YAML file has and it lacks."""
    node = {"name": node} if isinstance(node, str) else node
    config, _ = inside(kind, node)
    whole = config is not None and config.__pydantic_fields__.keys() <= node.keys()
    if whole or not isinstance(node, dict) or preset(kind, str(node.get("name"))) is None:
        return node
    own = default_node(kind, node["name"])
    return own | node | {"name": own["name"]}


def check_choices(choices: Mapping[str, Any], overrides: Sequence[str]) -> None:
    """Check that the ``choices`` of a command line are consistent with its settings.

    Raises:
        ConfigError: two options of one group, an experiment for another algorithm, or a name without its settings.
    """
    for override in OverridesParser.create().parse_overrides(list(overrides)):
        group, value = override.key_or_group, None if override.is_delete() else override.value()
        if group in (*SINGLE, "model", "experiment") and isinstance(value, list):
            raise ConfigError(group, f"should be exactly one option of {', '.join(option_names(group))}")
        if group == "algo" and isinstance(tuned := choices.get("experiment"), str):
            own = composed([*folders_of(overrides), f"experiment={tuned}"]).hydra.runtime.choices.algo
            if own != value:
                said = f"{value} cannot replace {own}, whose settings experiment={tuned} sets"
                raise ConfigError("algo", f"{said}; leave one of the two out")
        node, _, last = group.rpartition(".")
        kind, slot = kind_of(node), node if node in SINGLE else f"model@{node}".replace("model@model", "model")
        if last == "name" and kind in (*SINGLE, "model") and value in option_names(kind) and slot in choices:
            chosen = choices[slot] and default_node(kind, choices[slot])["name"]  # type: ignore[arg-type]
            if chosen != value:
                raise ConfigError(group, f"is chosen together with its settings: {slot}={value}")


def default_node(kind: Kind, option: str, changes: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the node of ``conf/<kind>/<option>.yaml``, without changes of an algorithm or a command line.

    ``changes`` are keys to set. Other required values remain ``"???"``.

    Raises:
        ConfigError: there is no such option, or it lacks the package line.
    """
    check_packages([(kind, option)])
    choice = f"{kind}=[{option}]" if kind in SEVERAL else f"{kind}={option}"
    config = composed([choice, "tuned=none", *(() if kind == "algo" else ("~algo",))])
    with explained():
        node = config[kind][option] if kind in SEVERAL else config[kind]
        with open_dict(node):
            node.update(changes or {})
        OmegaConf.resolve(node)
        return _completed(kind, OmegaConf.to_container(node))
