"""Parsing of a resolved configuration into typed settings, validated by each component's ``Config``."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial, reduce
from typing import Annotated, Any, Literal, TypeAlias, TypeVar, get_args

from pydantic import BeforeValidator, Field, PlainValidator, ValidationError
from pydantic_core import PydanticCustomError

from rlplug import registry
from rlplug.config.errors import dotted, joined, mistakes, show, single, unknown_key
from rlplug.registry import KINDS, Kind
from rlplug.settings import Nested, NonNegativeInt, PositiveFloat, PositiveInt, UnitFloat, is_schedule, option, settings
from rlplug.types import Compile, ConfigError

T = TypeVar("T")
Path: TypeAlias = tuple[str, ...]
SINGLE: tuple[Kind, ...] = ("algo", "env", "buffer", "loop", "hardware")  # exactly one per run
SEVERAL: tuple[Kind, ...] = ("exploration", "logger", "estimator")  # any number per run, by name


@dataclass(frozen=True)
class Chosen:
    """A component that the configuration selects, with its validated settings."""

    kind: Kind
    key: str  # key of its node: algo, exploration.gaussian, critic_model
    name: str
    cls: type[Any]
    cfg: Any  # an instance of cls.Config

    def build(self, ctx: Any) -> Any:
        return self._asked("make", self.cls, self.cfg, ctx)

    def needs(self, *args: Any, member: str = "needs") -> Any:
        """Return the ``Needs`` of an algorithm."""
        return self._asked("ask", self.kind, self.cls, member, self.cfg, *args)

    def recurrent(self, needs: Any) -> Any:
        """Return the ``Needs`` of an algorithm with a recurrent model."""
        return self.needs(needs, member="recurrent")

    def reads(self, spec: Any) -> tuple[str, ...]:
        """Return the keys of rows that a buffer, an exploration module or a curriculum reads."""
        return ("task",) if self.kind == "curriculum" else self.needs(spec, member="reads")

    def plan(self) -> Any:
        """Return the ``Plan`` of hardware."""
        return self._asked("ask", self.kind, self.build(None), "plan")

    def _asked(self, function: str, *args: Any) -> Any:
        """Call a function of ``contract.members``; prefix the keys of its errors, as in ``algo.algo.gamma``."""
        from rlplug.contract import members  # here: it imports torch

        try:
            return getattr(members, function)(*args)
        except ConfigError as error:
            if error.key.startswith(f"{self.key}.") or error.key.split(".")[0] != self.kind or self.kind not in SINGLE:
                raise
            raise ConfigError(self.key + error.key.removeprefix(self.kind), error.message) from None


@settings
class Eval:
    every: NonNegativeInt = option("Steps between evaluations; 0: only at the end.")
    episodes: PositiveInt = option("Episodes of one evaluation.")
    steps: PositiveInt | None = option("Further episodes until they have this many steps together; null: no more.")
    timeout_s: PositiveFloat | None = option("Seconds after which complete episodes are the result; null: no limit.")
    max_episode_steps: PositiveInt = option("Cut evaluation episodes after this many steps; the run reports it.")
    record: NonNegativeInt = option("Episodes per evaluation to record as a video (MP4); 0: none.")
    mode: Literal["greedy", "explore"] = option("explore: sample from the policy, without exploration modules.")
    env: dict[str, Any] = option("Settings of the environment that differ in evaluations.")
    function: str | None = option("Your own evaluation, module:function; null: the algorithm's.")


def _interval(value: Any) -> Any:
    minutes = isinstance(value, str) and re.fullmatch(r"\d+(\.\d+)?min", value) and float(value[:-3]) > 0
    if minutes or (type(value) is int and value >= 0):
        return value
    raise PydanticCustomError("interval_type", "steps, or minutes such as 5min")


Interval = Annotated[int | str, PlainValidator(_interval, json_schema_input_type=int | str)]


@settings
class Checkpoint:
    every: Interval = option("Steps between checkpoints, or minutes such as 5min; 0: only at the end.")
    keep_last: PositiveInt = option("Newest checkpoints to keep.")
    keep_best: NonNegativeInt = option("Checkpoints with the best eval/return_mean to keep in addition.")
    buffer: bool = option("Save the buffer's rows; false: a resumed run collects new ones before it learns.")


def _paths(value: Any) -> Any:
    """Return a list of paths, also for a single path."""
    return [value] if isinstance(value, str) else value


Paths = Annotated[list[str], Field(min_length=1), BeforeValidator(_paths, json_schema_input_type=str | list[str])]


@settings
class Data:
    """Dataset of recorded episodes to train on instead of the environment (offline RL)."""

    path: Paths | None = option("Files, folders or patterns, one or several; null: collect from the environment.")
    weights: Annotated[list[PositiveFloat], Field(min_length=1)] | None = option(
        "Sampling weight of every path, in steps; null: all episodes of all paths."
    )
    envs: PositiveInt | None = option("How many of num_envs read the dataset while the others are real; null: all.")
    shuffle: bool = option("Shuffle episodes by the seed; false: recorded order.")
    damaged: Literal["refuse", "skip"] = option("Unreadable parts of a file: refuse or skip.")
    unfinished: Literal["refuse", "truncate", "skip"] = option("Episodes without an end: refuse, truncate or skip.")
    normalized_actions: bool = option("Bounded actions in other libraries' files are in [-1, 1], not in the space.")


@settings
class Record:
    """Recording of the episodes that a run collects."""

    path: str | None = option("Folder for completed episodes; null: do not record.")
    format: Literal["parquet", "json"] = option("parquet, or json: lines in RLlib's format.")
    compress: bool = option("json: compress observations with LZ4.")
    max_file_size: PositiveInt = option("Bytes in memory after which a file is written.")


@settings
class Estimate:
    """Off-policy evaluation (OPE): estimates of the policy's return from recorded episodes."""

    with_eval: bool | None = option("Estimate at every evaluation; null: only without an environment to evaluate in.")
    path: Paths | None = option("Files, folders or patterns of episodes to estimate from; null: those of data.path.")
    gamma: UnitFloat = option("Discount of the estimated return.")
    confidence: Annotated[float, Field(gt=0, lt=1)] = option("Level of the confidence intervals.")
    model: Literal["fqe", "q_regression"] = option("Action values: fitted Q evaluation, or weighted regression.")
    folds: PositiveInt = option("Models of action values, each evaluated on held-out episodes; 1: none held out.")
    iterations: PositiveInt = option("Model fits: the first quarter to returns, the rest to one-step backups.")
    updates: PositiveInt = option("Gradient steps per fit.")
    batch_size: PositiveInt = option("Steps of episodes per gradient step.")
    lr: PositiveFloat = option("Adam's initial step size, which decays to zero.")
    action_samples: PositiveInt = option("Actions sampled per state, unless the space is Discrete.")


@settings
class Log:
    every: PositiveInt = option("Steps between rows of metrics.")
    window: PositiveInt | None = option("Average episode/* over this many last episodes; null: those of the row.")
    level: Literal["warning", "info", "debug"] = option("What a run prints; debug: also every row of metrics.")
    system: bool = option("Also log the load of CPU, memory and GPU, as system/<name>.")


@settings
class Preprocess:
    normalize_obs: bool = option("Normalize vector observations by their running mean and standard deviation.")
    clip_obs: PositiveFloat = option("Clip normalized observations to +- this.")
    scale_reward: PositiveFloat = option("Factor for the environment's rewards.")
    normalize_reward: bool = option("Divide rewards by the running standard deviation of the discounted return.")
    reward_gamma: UnitFloat = option("Discount of that return.")
    clip_reward: Literal["sign"] | PositiveFloat | tuple[float, float] | None = option("sign; to +- this; [low, high].")


def _compile(value: Any) -> Any:
    return {False: "off", True: "max"}[value] if isinstance(value, bool) else value  # YAML parses off as false


@settings
class Beginning:
    """What a run begins with."""

    seed: NonNegativeInt = option("Seed of all random numbers.")
    init_from: str | dict[str, Any] | None = option("Run, run@step, checkpoint or .pt file with the initial weights.")


@settings
class Core(Beginning):
    """Settings of a run that belong to no component."""

    total_steps: PositiveInt = option("Environment steps of the whole run, or updates if the loop counts these.")
    stop: dict[str, float | str] | None = option("End early when a metric reaches a limit: {eval/return_mean: 475}.")
    num_envs: Annotated[PositiveInt, Field(le=1_000_000)] = option("Environments of the whole run.")
    rollout_fragment_length: PositiveInt = option("Steps per environment in one round of collection.")
    train_batch_size: PositiveInt = option("Samples per update from a replay buffer; a rollout is used whole.")
    replay_ratio: PositiveFloat | None = option("Updates per environment step; null: one update per round.")
    num_steps_sampled_before_learning_starts: NonNegativeInt = option(
        "Environment steps before the first update; off-policy: random actions."
    )
    optimizer: Literal["adam", "adamw", "rmsprop", "sgd", "muon"] = option("Optimizer in the place of Adam.")
    optimizer_options: dict[str, Any] | None = option("Its options: {momentum: 0.9}; others keep their defaults.")
    eval: Eval = option("Evaluation during and after training.")
    checkpoint: Checkpoint = option("Checkpoints, from which a run can be resumed.")
    preprocess: Preprocess = option("Inputs of policy and learner; buffers and reported returns keep raw values.")
    data: Data = option("Dataset of recorded episodes to train on instead of the environment (offline RL).")
    record: Record = option("Recording of the episodes that the run collects.")
    estimate: Estimate = option("Off-policy evaluation (OPE) from recorded episodes.")
    log: Log = option("Logging of metrics.")
    callbacks: Annotated[list[str | dict[str, Any]], BeforeValidator(_paths)] = option(
        "Callbacks, one or several: module:Class or {entry_point: module:Class, kwargs: {...}}."
    )
    on_nan: Literal["stop", "skip"] = option("At a NaN or infinite loss or gradient: stop, or skip that gradient step.")
    compile: Annotated[Compile, BeforeValidator(_compile, json_schema_input_type=Compile | bool)] = option(
        "Compile gradient steps and acting: off, auto (on CPU, on long runs) or max; true: max."
    )
    deterministic: bool = option("Use deterministic kernels only.")


@settings
class RunConfig(Core):
    """The complete configuration of a run."""

    algo: Chosen = option("Algorithm.")
    env: Chosen = option("Environment.")
    eval_env: Chosen = option("Environment of evaluations.")
    buffer: Chosen = option("Storage of collected data.")
    loop: Chosen = option("When to collect and when to update.")
    hardware: Chosen = option("Devices and processes.")
    curriculum: Chosen | None = option("Tasks of training episodes; null: the environment's own.")
    models: dict[str, Chosen] = option("Networks by slot, 'model' or '<part>_model'; empty slots use 'model'.")
    exploration: dict[str, Chosen] = option("Exploration modules by name.")
    logger: dict[str, Chosen] = option("Loggers by name.")
    estimator: dict[str, Chosen] = option("Estimators of off-policy evaluation by name.")
    raw: dict[str, Any] = option("The resolved configuration; parse(raw) returns the same RunConfig.")


CORE = list(Core.__pydantic_fields__)  # type: ignore[attr-defined]
RESUMABLE = ("total_steps", "stop", "eval", "estimate", "log", "checkpoint", "logger", "hardware", "callbacks")
RESUMABLE += ("compile", "deterministic", "on_nan", "estimator")
"""settings that may change when a run is resumed"""
WHY = "it changes what is learned; a resumed run keeps its settings"


def parse(raw: dict[str, Any]) -> RunConfig:
    """Validate and type a resolved configuration. Imports the selected components.

    Raises:
        ConfigError: with one line for each mistake.
    """
    errors: list[ConfigError] = []
    chosen = partial(_collect, errors, choose)
    core = {key: raw[key] for key in CORE if key in raw}
    _collect(errors, typed, Core, core)
    slots = ["model", *(key for key in raw if key.endswith("_model"))]
    known = [*CORE, *SINGLE, *SEVERAL, "curriculum", *slots]
    errors += [unknown_key(str(key), known) for key in raw if key not in known]
    components: dict[str, Any] = {kind: chosen(kind, kind, raw.get(kind)) for kind in SINGLE}
    own = not errors and raw["eval"]["env"]
    components["eval_env"] = chosen("env", "eval.env", eval_env(raw)) if own else components["env"]
    components["curriculum"] = None if (x := raw.get("curriculum")) is None else chosen("curriculum", "curriculum", x)
    for kind in SEVERAL:
        nodes = raw.get(kind) or {}
        if isinstance(nodes, dict):
            components[kind] = {name: chosen(kind, f"{kind}.{name}", node) for name, node in nodes.items()}
        else:
            errors.append(ConfigError(kind, f"{show(nodes)} has the wrong type: should map names to settings"))
    models = {slot: chosen("model", slot, raw.get(slot)) for slot in slots if slot == "model" or raw[slot] is not None}
    if errors:
        raise joined(errors)
    components["models"] = {slot: models.get(slot, models["model"]) for slot in slots}
    return RunConfig(**core, **components, raw=raw)


def eval_env(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the node of the environment of evaluations: ``env`` with the changes of ``eval.env``."""

    def merged(node: Any, changes: Mapping[str, Any]) -> Any:
        inner = {key: merged(node.get(key), x) if isinstance(x, dict) else x for key, x in changes.items()}
        return {**node, **inner} if isinstance(node, dict) else inner

    return merged(raw["env"], raw["eval"]["env"])


def choose(kind: Kind, key: str, node: Any) -> Chosen:
    """Return the component that a node selects by ``name``; the other keys are its settings.

    Raises:
        ConfigError: there is no such component, it cannot be imported, or its settings are wrong.
    """
    if node is None:
        names = [option for group, option in registry.presets() if group == kind]
        raise ConfigError(key, f"is missing; choose one with {kind}=<name>: {', '.join(names)}")
    if not isinstance(node, dict):
        named = kind == "model" and str(node).isidentifier()
        hint = f"; a file of conf/model is chosen by model@{key}={node}" if named else ""
        raise ConfigError(key, f"{show(node)} has the wrong type: should be a mapping with 'name' and settings{hint}")
    if not isinstance(name := node.get("name"), str):
        raise ConfigError(f"{key}.name", f"should name one of kind {kind}: {', '.join(registry.names(kind))}")
    cls = registry.load(kind, name, f"{key}.name")
    from rlplug.contract.members import check_class

    check_class(kind, cls)
    return Chosen(kind, key, name, cls, typed(cls.Config, {k: v for k, v in node.items() if k != "name"}, key))


def typed(config: type[T], node: dict[str, Any], key: str = "") -> T:
    """Validate the node at ``key`` against a class made by ``rlplug.settings.settings``.

    Raises:
        ConfigError: with one line for each mistake.
    """
    if odd := [name for name in node if not isinstance(name, str)]:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(key, f"{show(odd[0])} is not the name of a setting; names are text")
    errors: list[ConfigError] = []
    inside = {
        path: _collect(errors, choose, kind, dotted(key, *path), _at(node, path))
        if kind in ("algo", "model")
        else errors.append(unknown_key(dotted(key, *path), ("algo", "model", "critic_model")))
        for path, kind in _nested(config, node)
    }
    try:
        cfg = config(**replaced(node, inside))
    except ValidationError as error:
        raise joined([*mistakes(error, node, config, key), *errors]) from None
    errors += [
        ConfigError(dotted(key, name), f"{show(value)} has the wrong type: should be a number")
        for name, value in node.items()
        if isinstance(value, bool) and not isinstance(getattr(cfg, name), bool | str)  # pydantic takes true for 1
    ]
    if errors:
        raise joined(errors)
    return cfg


def _collect(errors: list[ConfigError], function: Callable[..., T], *args: Any) -> T | None:
    """Return ``function(*args)``; append a ``ConfigError`` to ``errors`` instead of raising it."""
    try:
        return function(*args)
    except ConfigError as error:
        errors.extend(single(error))


def migrate(raw: Mapping[str, Any], kinds: Collection[str] = KINDS) -> dict[str, Any]:
    """Update a stored configuration: migrate the settings of components of these kinds to their current form.

    A node's settings are passed to the classmethod ``Config.migrate(old) -> dict`` of its component, if any, before
    those of nested nodes. A node whose component cannot be imported is unchanged.

    Raises:
        ConfigError: a component's ``migrate`` failed.
    """
    return {key: _migrate(kind, key, node) if (kind := kind_of(key)) in kinds else node for key, node in raw.items()}


def _migrate(kind: Any, key: str, node: Any) -> Any:
    if hasattr(config := inside(kind, node)[0], "migrate"):
        name = node["name"]
        try:
            node = {"name": name} | config.migrate({k: v for k, v in node.items() if k != "name"})
        except Exception as error:
            who = f"{kind} {name!r} of {registry.owner(kind, name)}"
            raise ConfigError(key, f"{who} cannot migrate its settings: {type(error).__name__}: {error}") from error
    return replaced(node, {path: _migrate(k, dotted(key, *path), x) for path, x, k in inside(kind, node)[1]})


def scheduled(kind: Any, key: str, node: Any) -> Iterator[tuple[str, Any]]:
    """Yield key and value of every ``Scheduled`` option of the components at ``key``, nested ones included.

    Components that cannot be imported are skipped.
    """
    config, parts = inside(kind, node)
    for name, field in getattr(config, "__pydantic_fields__", {}).items():
        if name in node and any(map(is_schedule, get_args(field.annotation))):
            yield f"{key}.{name}", node[name]
    for path, one, inner in parts:
        yield from scheduled(inner, dotted(key, *path), one)


def inside(kind: Any, node: Any) -> tuple[Any, list[tuple[Path, Any, Any]]]:
    """Return the ``Config`` of a node's component, and path, node and kind of the components in its options.

    The ``Config`` is None for a mapping of components, for one that cannot be imported, and for other nodes.
    """
    if kind not in KINDS or not isinstance(node, dict):
        return None, []
    if not isinstance(name := node.get("name"), str):
        return None, [((name,), part, kind) for name, part in node.items()]
    with suppress(ConfigError, AttributeError):
        config = registry.load(kind, name).Config
        return config, [(path, _at(node, path), part) for path, part in _nested(config, node)]
    return None, []


def nested(chosen: Chosen) -> Iterator[Chosen]:
    """Yield a component and, recursively, its nested components."""
    yield chosen
    for path, _ in _nested(type(chosen.cfg), vars(chosen.cfg)):
        yield from nested(_at(vars(chosen.cfg), path))


def _nested(config: Any, node: Mapping[str, Any]) -> list[tuple[Path, Any]]:
    """Return the paths in a node that hold a component, with its kind."""
    fields = config.__pydantic_fields__.items()
    marks = [(name, mark) for name, field in fields for mark in field.metadata if isinstance(mark, Nested)]
    found: list[tuple[Path, Any]] = [((name,), mark.kind) for name, mark in marks if not mark.several and name in node]
    nodes = {name: node.get(name) for name, mark in marks if mark.several}
    several = ((name, each, parts) for name, of in nodes.items() if isinstance(of, dict) for each, parts in of.items())
    return found + [((*at, part), kind_of(part)) for *at, parts in several if isinstance(parts, dict) for part in parts]


def _at(node: Mapping[str, Any], path: Path) -> Any:
    return reduce(lambda part, key: part[key], path, node)


def replaced(node: dict[str, Any], values: Mapping[Path, Any]) -> dict[str, Any]:
    """Return a node with other values at some paths."""
    for (head, *rest), value in values.items():
        node = node | {head: replaced(node[head], {(*rest,): value}) if rest else value}
    return node


def kind_of(key: str) -> str:
    """Return the kind of a config key: ``model`` for ``critic_model.torso``, ``logger`` for ``logger.csv``."""
    return "model" if (root := str(key).partition(".")[0]).endswith("_model") else root
