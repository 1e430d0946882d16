"""A page in which an exported policy plays its environment, offline, by onnxruntime-web."""

from __future__ import annotations

import base64
import gzip
import hashlib
import html
import json
import os
import tarfile
import urllib.error
import urllib.request
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from string import Template
from typing import Any

import gymnasium

from rlplug.checkpointing import atomic
from rlplug.script import name_of
from rlplug.types import ConfigError

ASSETS = Path(__file__).with_name("assets")
PACKAGE, VERSION = "onnxruntime-web", "1.30.0"
INTEGRITY = "q0y+JrrtukXSzsBWEMccVfqX25LRmosXHF+CaRJmg8pZClzcV7svNc4rKY3jL02Vb7QmRMDs1SigqR4CXAfKYQ=="  # SHA-512
REGISTRY = "https://registry.npmjs.org"
MEMBERS = ("package/dist/ort.wasm.bundle.min.mjs", "package/dist/ort-wasm-simd-threaded.wasm")
CLASSES = {  # by entry point: the class of environments.js, and the attributes that it takes
    "cartpole:CartPoleEnv": ("CartPole", {"sutton_barto_reward": "_sutton_barto_reward"}),
    "pendulum:PendulumEnv": ("Pendulum", {"g": "g"}),
    "mountain_car:MountainCarEnv": ("MountainCar", {"goal_velocity": "goal_velocity"}),
    "continuous_mountain_car:Continuous_MountainCarEnv": ("MountainCarContinuous", {"goal_velocity": "goal_velocity"}),
    "acrobot:AcrobotEnv": ("Acrobot", {}),
    "frozen_lake:FrozenLakeEnv": ("Grid", {}),
    "cliffwalking:CliffWalkingEnv": ("Grid", {}),
}
PLAIN = {"atari": False, "frame_skip": 1, "sticky_actions": None, "fire": False, "flatten": False, "frame_stack": 1}
PLAIN |= {"wrappers": [], "pixels": None}
"""options of an environment that a page does not have, and their values without effect"""


def environment(node: Mapping[str, Any], inputs: list[str], max_episode_steps: int | None) -> dict[str, Any]:
    """Return what a page has to know of an environment.

    Args:
        node: the run's ``env``.
        inputs: names of the policy's inputs.

    Raises:
        ConfigError: the page cannot play it.
    """
    served = "CartPole, Pendulum, MountainCar, Acrobot, FrozenLake and CliffWalking of Gymnasium"
    other = ConfigError("", f"--format html plays {served}, and not env={name_of(node)}; take onnx")
    if node["name"] != "gymnasium" or node["id"] is None:
        raise other
    if differ := [key for key, plain in PLAIN.items() if node.get(key, plain) != plain]:
        raise ConfigError(f"env.{differ[0]}", "is not played by --format html; take onnx")
    if "action_mask" in inputs:
        raise ConfigError("env.mask_key", "--format html plays environments without masks; take onnx")
    with closing(gymnasium.make(node["id"], **node["kwargs"])) as made:
        env: Any = made.unwrapped
        name = f"{type(env).__module__.rpartition('.')[2]}:{type(env).__name__}"
        if name not in CLASSES or not type(env).__module__.startswith("gymnasium."):
            raise other
        kind, taken = CLASSES[name]
        parameters = {key: getattr(env, attribute) for key, attribute in taken.items()}
        if kind == "Grid":
            parameters = _grid(env)
        fps = made.metadata.get("render_fps", 30)
    about = {"class": kind, "parameters": parameters, "select": node["select"]}
    return about | {"max_episode_steps": max_episode_steps, "fps": fps}


def _grid(env: Any) -> dict[str, Any]:
    """Return the transitions, the distribution of the first state, and the letters of the fields."""
    actions, states = range(env.action_space.n), range(env.observation_space.n)
    transitions = [
        [[[float(p), int(s), float(r), bool(end)] for p, s, r, end in env.P[state][action]] for action in actions]
        for state in states
    ]
    if hasattr(env, "desc"):
        rows, columns = env.desc.shape
        letters = "".join(field.decode() for field in env.desc.ravel())
    else:
        rows, columns = env.shape
        letters = "".join("C" if cliff else " " for cliff in env._cliff.ravel())
        letters = f"{letters[: env.start_state_index]}S{letters[env.start_state_index + 1 : -1]}G"
    start = env.initial_state_distrib.tolist()
    return {"transitions": transitions, "start": start, "rows": rows, "columns": columns, "letters": letters}


def page(about: Mapping[str, Any], model: bytes, runtime: tuple[bytes, bytes]) -> str:
    """Return the page, HTML that loads nothing.

    Args:
        about: the export's manifest, with ``page``, the result of ``environment``.
        model: the ONNX model.
        runtime: the module and the WebAssembly of onnxruntime-web.
    """
    module, wasm = runtime
    facts = {
        "Algorithm": about["algo"],
        "Environment steps": f"{about['env_steps']:,}",
        "Largest difference": f"{about['replay']['largest_difference']:.2g} in {about['replay']['steps']:,} steps",
    }
    text = {
        "title": html.escape(f"{about['algo']} plays {about['env']['id']}"),
        "facts": "\n".join(f"  <dt>{html.escape(k)}</dt><dd>{html.escape(v)}</dd>" for k, v in facts.items()),
        "about": json.dumps(about).replace("<", "\\u003c"),
        "script": "\n".join((ASSETS / name).read_text(encoding="utf-8") for name in ("environments.js", "player.js")),
    }
    packed = {"runtime": module, "wasm": wasm, "model": model}
    text |= {name: base64.b64encode(gzip.compress(data, mtime=0)).decode() for name, data in packed.items()}
    return Template((ASSETS / "page.html").read_text(encoding="utf-8")).substitute(text)


def runtime(given: Path | None = None) -> tuple[bytes, bytes]:
    """Return the module and the WebAssembly of onnxruntime-web.

    Args:
        given: the npm package, a ``.tgz``; None: download it once to ``~/.cache/rlplug``.

    Raises:
        ConfigError: it cannot be downloaded or read.
    """
    path = given or _downloaded()
    try:
        with tarfile.open(path) as archive:
            module, wasm = (archive.extractfile(name) for name in MEMBERS)
            assert module is not None
            assert wasm is not None
            return module.read(), wasm.read()
    except (OSError, KeyError, EOFError, tarfile.TarError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError("", f"--runtime {path} is no npm package {PACKAGE}: {reason}") from None


def _downloaded() -> Path:
    """Return the package in the cache; download it first if it is not there."""
    name = f"{PACKAGE}-{VERSION}.tgz"
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rlplug"
    if (cache / name).exists():
        return cache / name
    url = f"{os.environ.get('NPM_CONFIG_REGISTRY') or REGISTRY}".rstrip("/") + f"/{PACKAGE}/-/{name}"
    otherwise = f"--runtime <file> takes it from `npm pack {PACKAGE}@{VERSION}`"
    try:
        with urllib.request.urlopen(url, timeout=60) as answer:
            data = answer.read()
    except (OSError, ValueError) as error:
        raise ConfigError("", f"{url} cannot be downloaded ({error}); {otherwise}") from None
    if base64.b64encode(hashlib.sha512(data).digest()).decode() != INTEGRITY:
        raise ConfigError("", f"{url} is not the package that was published; {otherwise}")
    cache.mkdir(parents=True, exist_ok=True)
    atomic.replace(cache / name, data)
    return cache / name
