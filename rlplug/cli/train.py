"""``train``: compose with Hydra, with its flags, sweepers, launchers and completion, and train."""

from __future__ import annotations

import argparse
import os
import re
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, NoReturn, TypeAlias

from rlplug.cli import loading, printing, say, say_run, sweep, tell, without_json
from rlplug.cli.meant import no_flag
from rlplug.config import RunConfig, composed, parse, validated
from rlplug.registry import warn_broken
from rlplug.script import name_of
from rlplug.types import ConfigError, RunError

if TYPE_CHECKING:
    from omegaconf import DictConfig


Chosen: TypeAlias = tuple[RunConfig, Path, list[str]]


def main(arguments: Sequence[str]) -> int:
    """Run a command line with Hydra.

    Raises:
        ConfigError: Hydra rejects it, or the run cannot start as configured.
        RunError: the run failed.
    """
    from rlplug.config import origins

    warn_broken()
    origins.register()
    arguments, as_json = without_json(arguments)
    flags = _flags(arguments)
    if as_json and (flags.help or flags.cfg or flags.info or flags.shell_completion):
        raise ConfigError("", "--json prints the result of a run; check --json prints a configuration")
    if flags.help:
        say(_help(flags.overrides))
        return 0
    if flags.experimental_rerun:  # would execute code from a pickle
        raise ConfigError("", "--experimental-rerun is not supported; use resume <run folder>")
    if flags.shell_completion and "COMP_LINE" not in os.environ and any("query=" in word for word in flags.overrides):
        raise ConfigError("", "--shell-completion query= is for the shell only; see install=")
    if flags.package and not flags.cfg:
        raise ConfigError("", "--package selects a part of the output of --cfg: --cfg job --package algo")
    try:
        if any("hydra.run" in word for word in flags.overrides):
            sweep.require_folders(composed([word for word in flags.overrides if word.startswith("hydra.")]).hydra)
        if not flags.multirun:
            with printing(as_json):
                _hydra(arguments)
            if as_json:
                say_run(_trained.pop())
            return 0
        from rlplug.cli import sweeper

        if own := sweeper.module(flags.overrides):  # one of Hydra's is chosen by hydra/sweeper=
            return own.main(flags.overrides, as_json)
        folder, fixed = sweep.check_sweep(flags.overrides)
        try:
            with printing(as_json):
                _hydra([*arguments, *fixed])
        except sweep.JobFailedError:
            tell("the sweeper ended the sweep: more jobs failed than it accepts")
        except KeyboardInterrupt:
            sweep.report(folder, as_json)
            raise
        finally:
            _remove_empty(folder)
        return sweep.report(folder, as_json)
    except SystemExit as end:  # after one of Hydra's flags, or from `job`
        if isinstance(end.code, ConfigError | RunError):
            raise end.code from None
        return int(end.code or 0)


_trained: list[Path] = []
"""folders of runs of this process that are not printed yet"""


def chosen(config: Sequence[str] | RunConfig, folder: str | os.PathLike[str] | None = None) -> Chosen:
    """Return the run of overrides or of a composed configuration, its folder, and its command line.

    Raises:
        ConfigError: the run cannot start as configured.
    """
    warn_broken()
    if isinstance(config, RunConfig):
        run = _unchanged(config)
        return run, _folder(run) if folder is None else Path(folder), []
    whole = composed(config)
    sweep.require_folders(whole.hydra)
    run, _ = validated(whole, whole.hydra, config)
    return run, Path(whole.hydra.run.dir), _command(config)


def _unchanged(config: RunConfig) -> RunConfig:
    """Return the configuration of a run. Raises ``ConfigError`` if it was changed after ``compose``."""
    run = parse(config.raw)
    for name in (field for field in run.__dataclass_fields__ if getattr(run, field) != getattr(config, field)):
        raise ConfigError(name, f"was changed after compose(); pass it to compose(): compose([..., '{name}=<value>'])")
    return run


def _folder(run: RunConfig) -> Path:
    """Return the folder of a run without a command line."""
    from omegaconf import open_dict

    config, env = composed([f"seed={run.seed}"]), re.sub(r"[^\w.-]", "_", name_of(run.raw["env"]))
    with open_dict(config):
        config.hydra.runtime.choices.update(algo=run.algo.name, env=env)
    return Path(config.hydra.run.dir)


def job(config: DictConfig) -> float:
    """Train one Hydra job, possibly one of many and in another process. Return the score for a sweep."""
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    from rlplug.config.composition import command

    hydra = HydraConfig.get()
    folder, words = Path(hydra.runtime.output_dir), command(hydra)
    is_sweep = hydra.mode == RunMode.MULTIRUN

    def train() -> float:
        sweep.require_folders(hydra)
        with loading():
            run, pair = validated(config, hydra, words)

            from rlplug.run import launch  # here, because torch takes seconds to import

        start = partial(launch.train, run, folder, _command(words), tell, [str(pair)] if pair else [])
        return sweep.go_on(folder, run, start) if is_sweep else start()

    if is_sweep:
        return sweep.attempt(hydra, words, train)
    try:
        score = train()
        _trained.append(folder)
        return score
    except (ConfigError, RunError) as error:
        raise SystemExit(error) from None  # not an Exception, which Hydra would report itself
    finally:
        _remove_empty(folder)


def _flags(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse a command line with Hydra's parser.

    Raises:
        ConfigError: a flag does not exist.
    """
    from hydra._internal.utils import get_args_parser  # the only list of Hydra's flags

    def refuse(message: str) -> NoReturn:
        surplus = message.removeprefix("unrecognized arguments: ").split(" ")[0]
        if surplus.startswith("-"):
            raise no_flag(surplus, "see --help")
        raise ConfigError("", f"{message}; flags such as -m come before the settings; see --help")

    parser = get_args_parser()
    parser.error = refuse
    return parser.parse_args(list(arguments))


def _help(overrides: Sequence[str]) -> str:
    """Return the help text of ``conf/config.yaml``, with the options of every group.

    Hydra's own ``--help`` re-reads the search path for each of its folders, which takes a second.
    """
    from rlplug.config.origins import folders_of, session

    folders = folders_of(overrides)
    template = Template(composed(folders).hydra.help.template)
    with session() as loader:
        groups = {name: loader.get_group_options(name, overrides=folders) for name in sorted(loader.list_groups(""))}
    lines = [f"{name}: {', '.join(options)}\n" for name, options in groups.items() if options and name != "hydra"]
    return template.substitute(APP_CONFIG_GROUPS="".join(lines))


def _command(overrides: Sequence[str]) -> list[str]:
    return ["python", "-m", "rlplug", "train", *overrides]


def _hydra(arguments: Sequence[str]) -> None:
    """Compose with Hydra, and run ``job`` once or for every value of a sweep.

    Raises:
        ConfigError: Hydra refuses the command line.
        SystemExit: from the job, or after the output of one of Hydra's flags.
    """
    import hydra

    from rlplug.config.explain import explain
    from rlplug.config.origins import PRIMARY, VERSION_BASE

    with _hydra_program(arguments):
        try:
            hydra.main(config_path=None, config_name=PRIMARY, version_base=VERSION_BASE)(job)()
        except Exception as error:
            if isinstance(error, OSError) and error.filename and _from_hydra(error, ("pathlib", "os")):
                raise _no_access(error, _flags(arguments).multirun) from None
            if _from_hydra(error):
                raise explain(error, _flags(arguments).overrides) from None
            raise


def _no_access(error: OSError, is_sweep: bool) -> ConfigError:
    """Return the error for a run folder that cannot be created, or for a file that cannot be read."""
    called = {frame.f_code.co_name for frame, _ in traceback.walk_tb(error.__traceback__)}
    if not called.isdisjoint(("mkdir", "makedirs")):
        key = f"hydra.{'sweep' if is_sweep else 'run'}.dir"
        return ConfigError(key, f"{error.filename} cannot be made: {error.strerror}")
    return ConfigError("", f"{error.filename} cannot be read: {error.strerror}")


def _remove_empty(folder: Path) -> None:
    """Remove an empty folder created by Hydra, and empty folders above it."""
    folder = folder.absolute()
    with suppress(OSError):
        if [file.name for file in folder.iterdir()] == ["multirun.yaml"]:
            (folder / "multirun.yaml").unlink()
        above = [parent for parent in folder.parents if Path.cwd() in parent.parents]
        for empty in [folder, *above] if folder != Path.cwd() else ():
            empty.rmdir()


def _from_hydra(error: Exception, modules: tuple[str, ...] = ("hydra.", "omegaconf.", "yaml.")) -> bool:
    """Return whether an error is from Hydra's handling of the command line, not from inside a job."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    thrower = frames[-1].f_globals.get("__name__", "")
    return thrower.startswith(modules) and job.__code__ not in [f.f_code for f in frames]


@contextmanager
def _hydra_program(arguments: Sequence[str]) -> Iterator[None]:
    """Set ``sys.argv`` for Hydra, and the variable that makes it raise errors instead of printing them."""
    from rlplug.config.origins import opened

    argv, full_error = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    sys.argv = ["rlplug", *opened(arguments)]
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        yield
    finally:
        sys.argv = argv
        if full_error is None:
            del os.environ["HYDRA_FULL_ERROR"]
        else:
            os.environ["HYDRA_FULL_ERROR"] = full_error
