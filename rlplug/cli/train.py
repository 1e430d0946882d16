"""``train``: composes with Hydra, so that its flags, sweepers, launchers and completion work, and trains."""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from rlplug.config import compose, composed, parse, plain, tuned
from rlplug.registry import warn_broken
from rlplug.types import ConfigError, RunError

if TYPE_CHECKING:
    from omegaconf import DictConfig


def main(arguments: Sequence[str]) -> int:
    """Hand a command line to Hydra.

    Raises:
        ConfigError: Hydra refuses it.
    """
    import hydra
    from hydra.core.plugins import Plugins

    from rlplug.config.composition import PRIMARY, VERSION_BASE, PluginConfigs, explain

    warn_broken()
    Plugins.instance().register(PluginConfigs)
    flags = _flags(arguments)
    if flags.multirun:
        check_sweep(flags.overrides)
    with _hydra_program(arguments):
        try:
            hydra.main(config_path=None, config_name=PRIMARY, version_base=VERSION_BASE)(job)()
        except SystemExit as end:  # after --help, or from `job`
            return int(end.code or 0)
        except Exception as error:
            if isinstance(error, OSError) and error.filename and _from_hydra(error, ("pathlib", "os")):
                raise ConfigError("hydra.run.dir", f"{error.filename} cannot be made: {error.strerror}") from None
            if _from_hydra(error):
                raise explain(error, arguments) from None
            raise
    return 0


def train(overrides: Sequence[str] = ()) -> float:
    """Train from Python as the command line does: ``train(["algo=sac", "env=pendulum"])``.

    Returns:
        The mean return of the final evaluation.

    Raises:
        ConfigError: the run cannot start as configured.
    """
    warn_broken()
    config = composed(overrides)
    run = parse(plain(config, overrides, tuned(config.hydra)))

    from rlplug.run import launch

    return launch.train(run, Path(config.hydra.run.dir), _command(overrides))


def job(config: DictConfig) -> float:
    """Train one job of Hydra, which can be one of many and in another process. Return the score of a sweep."""
    from hydra.core.hydra_config import HydraConfig

    from rlplug.cli import refuse, tell

    hydra = HydraConfig.get()
    folder = Path(hydra.runtime.output_dir)
    try:
        pair = tuned(hydra)
        run = parse(plain(config, hydra.overrides.task, pair))

        from rlplug.run import launch

        return launch.train(run, folder, _command(hydra.overrides.task), tell, [str(pair)] if pair else [])
    except (ConfigError, RunError) as error:
        _remove_empty(folder, sweep=Path(hydra.sweep.dir).absolute())
        raise SystemExit(refuse(error)) from None  # no Exception: Hydra would report it in its own way
    except KeyboardInterrupt:
        _remove_empty(folder, sweep=Path(hydra.sweep.dir).absolute())
        raise


def check_sweep(overrides: Sequence[str]) -> None:
    """Check a sweep before its first job: every value of every swept key, each with the first values of the others.

    Ranges from which a sweeper draws (``interval``) and values that do not fit together are left to the jobs.

    Raises:
        ConfigError: a value is wrong.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser

    from rlplug.config.composition import explained, session

    with session() as loader, explained(overrides):
        parsed = OverridesParser.create(config_loader=loader).parse_overrides(list(overrides))
        discrete = [o for o in parsed if o.is_discrete_sweep()]
        swept = [[f"{o.get_key_element()}={value}" for value in o.sweep_string_iterator()] for o in discrete]
    fixed = [str(o.input_line) for o in parsed if not o.is_sweep_override()]
    firsts = [values[0] for values in swept]
    compose([*fixed, *firsts])
    for i, values in enumerate(swept):
        for value in values[1:]:
            compose([*fixed, *firsts[:i], value, *firsts[i + 1 :]])


def _flags(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the command line as Hydra does.

    Raises:
        ConfigError: a flag does not exist.
    """
    from hydra._internal.utils import get_args_parser  # the only one that knows Hydra's flags

    def refuse(message: str) -> NoReturn:
        raise ConfigError("", f"{message}; see --help")

    parser = get_args_parser()
    parser.error = refuse
    return parser.parse_args(list(arguments))


def _command(overrides: Sequence[str]) -> list[str]:
    return ["python", "-m", "rlplug", "train", *overrides]


def _remove_empty(folder: Path, sweep: Path) -> None:
    """Remove the folder that Hydra makes before the job is checked, and the empty folders above it."""
    above = [parent for parent in folder.parents if Path.cwd() in parent.parents]
    with suppress(OSError):
        for empty in (folder, *above):
            if empty == sweep and [file.name for file in empty.iterdir()] == ["multirun.yaml"]:
                (empty / "multirun.yaml").unlink()
            empty.rmdir()


def _from_hydra(error: Exception, modules: tuple[str, ...] = ("hydra.", "omegaconf.", "yaml.")) -> bool:
    """Return whether Hydra refused the command line; an error from inside a job is not from Hydra."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    thrower = frames[-1].f_globals.get("__name__", "")
    return thrower.startswith(modules) and job.__code__ not in [f.f_code for f in frames]


@contextmanager
def _hydra_program(arguments: Sequence[str]) -> Iterator[None]:
    """Set what Hydra reads: ``sys.argv``, and the variable that makes it raise errors instead of printing them."""
    argv, full_error = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    sys.argv = ["rlplug", *arguments]
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        yield
    finally:
        sys.argv = argv
        if full_error is None:
            del os.environ["HYDRA_FULL_ERROR"]
        else:
            os.environ["HYDRA_FULL_ERROR"] = full_error
