"""Export of a run's deterministic policy to a file that runs without rlplug, checked by recorded steps."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.export import Dim, ExportedProgram
from torch.fx import GraphModule

from rlplug.agent import load
from rlplug.api import VecEnv
from rlplug.checkpointing import atomic
from rlplug.checkpointing.format import FOLDER, Checkpoint, find
from rlplug.checkpointing.installed import check_installed
from rlplug.config import choose, migrate
from rlplug.context import EnvShard, RunContext
from rlplug.envs.spec_json import mismatch
from rlplug.results import export_replay
from rlplug.results.export_policy import NEXT, Policy
from rlplug.results.export_record import Record, record
from rlplug.results.onnx import require_onnx, write_onnx
from rlplug.results.page import environment, page
from rlplug.results.page import runtime as load_runtime
from rlplug.types import ConfigError, RunError

FILES = {"onnx": "policy.onnx", "torch": "policy.pt2", "html": "policy.onnx"}
"""the formats, and the file of the policy"""
MANIFEST = "manifest.json"
LIMIT = 1e-5
"""largest difference of an export from the policy in PyTorch"""
PACKAGES = ("rlplug", "torch", "onnx", "onnxscript", "onnxruntime", "numpy", "gymnasium")
NOT_OF_POLICIES = (str(Path(torch.__file__).parent), str(Path(__file__).parent), "<")
"""where the code in a traceback is not that of a policy: in torch, here, and in generated code"""


def export(
    path: str | Path,
    format: str = "onnx",
    to: str | Path | None = None,
    steps: int = 1000,
    overrides: Sequence[str] = (),
    tell: Callable[[str], None] = warnings.warn,
    runtime: Path | None = None,
) -> dict[str, Any]:
    """Export the policy of a run's newest good checkpoint, or of a given checkpoint, to a folder.

    The folder holds the policy and ``manifest.json``. It appears when everything is written and checked; an export that
    is there is replaced.

    Args:
        format: ``onnx``, ``torch`` (a program of ``torch.export``) or ``html`` (a page in which the policy plays).
        to: the folder; None: ``exports/<format>-<environment steps>`` in the run folder.
        steps: recorded steps of the environment that the export has to reproduce.
        overrides: of the environment to record in, such as ``env.max_episode_steps=50``.
        tell: called with each line for the user.
        runtime: for ``html``, the npm package onnxruntime-web (``.tgz``); None: it is downloaded once.

    Returns:
        The manifest, with the ``folder``.

    Raises:
        ConfigError: there is no checkpoint; the policy or its environment cannot be exported; a package is missing.
        RunError: the export computes something else than the policy.
    """
    if format not in FILES:
        raise ConfigError("", f"--format {format}: one of {', '.join(FILES)}")
    if format != "torch":
        require_onnx()
    if steps < 1:
        raise ConfigError("", f"--steps {steps}: at least 1")
    checkpoint = find(Path(path), ("weights",), tell)
    folder = _folder(checkpoint, format, to)
    agent = load(checkpoint.path)
    if agent.spec.has_agents:
        raise ConfigError("env", "has several agents, but a file holds the policy of one; use rlplug.load(run)")
    if agent.ctx.needs.simulates:
        said = "the policy plans with a simulator of the environment, which no export holds"
        raise ConfigError("algo", f"{said}; act in Python with rlplug.load(run).act")
    make = _environments(checkpoint, agent.ctx, overrides)
    policy = Policy(agent.algorithm, agent.ctx, agent.normalize)
    program = exported(policy)
    about, loaded = _about(checkpoint, policy, format), None
    if format == "html":
        limit = agent.spec.max_episode_steps
        about["page"] = environment(about["env"], [x.name for x in policy.inputs], limit)
        loaded = load_runtime(runtime)
    played = record(policy, agent.ctx, make, steps)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with atomic.renamed(folder) as partial:
            partial.mkdir()
            write(program, policy, partial / FILES[format])
            (about["replay"],) = replayed({partial / FILES[format]: played})
            if loaded is not None:
                text = page(about, (partial / FILES[format]).read_bytes(), loaded)
                atomic.write(partial / "index.html", text.encode())
            about["files"] = {file.name: file.stat().st_size for file in sorted(partial.iterdir())}
            atomic.write(partial / MANIFEST, json.dumps(about, indent=1).encode())
            if folder.exists():
                atomic.delete(folder)
    except OSError as error:
        raise ConfigError("", f"--to {folder} cannot be written: {error.strerror}") from None
    return about | {"folder": str(folder)}


def exported(policy: Policy) -> ExportedProgram:
    """Return ``traced`` with only what acting reads, and without paths of code.

    Weights and recurrent states of critics are left out: ``policy`` gets fewer inputs and outputs.
    """
    with warnings.catch_warnings(action="ignore"):  # of torch about itself
        program = _functional(policy)
        if unread := _unread(policy, program):
            policy.leave_out(unread)
            program = _functional(policy)
        program = traced(policy, _pruned(program.module()))
    for module in program.graph_module.modules():
        for node in module.graph.nodes if isinstance(module, GraphModule) else ():
            node.meta.pop("stack_trace", None)
    return program


def traced(policy: Policy, module: nn.Module | None = None) -> ExportedProgram:
    """Return the policy, or a module that computes the same, as a program for any size of the batch.

    Raises:
        ConfigError: it reads values of tensors, calls another library or fixes the size of the batch.
    """
    example = policy.example(2)
    shapes = ({name: {0: Dim("batch")} for name in example},)
    try:
        with torch.no_grad(), warnings.catch_warnings(action="ignore"):
            return torch.export.export(module or policy, (example,), dynamic_shapes=shapes)
    except Exception as error:
        if policy.plans:
            said = "the policy plans through the environment's simulator, and its code cannot be exported"
            raise ConfigError("algo", f"{said}: {reason_of(error)}; act in Python with rlplug.load(run).act") from None
        raise ConfigError("", f"the policy cannot be exported: {reason_of(error)}") from None


def write(program: ExportedProgram, policy: Policy, path: Path) -> None:
    """Write a program as ONNX model or as ``.pt2``, by the file's suffix.

    Raises:
        ConfigError: see ``write_onnx``.
    """
    if path.suffix == ".onnx":
        write_onnx(program, [x.name for x in policy.inputs], [x.name for x in policy.outputs], path)
    else:
        with warnings.catch_warnings(action="ignore"):
            torch.export.save(program, path)
    atomic.flush(path)


def replayed(played: Mapping[Path, Record], limit: float = LIMIT) -> list[dict[str, Any]]:
    """Replay the recorded steps of each file in a process without rlplug, and return the differences for manifests.

    Raises:
        RunError: it fails there, or differs by more than ``limit``.
    """
    command = [sys.executable, "-P", str(export_replay.__file__)]
    with tempfile.TemporaryDirectory() as folder:
        for i, (path, recorded) in enumerate(played.items()):
            steps = Path(folder) / f"{i}.npz"
            recorded.save(steps)
            command += [str(path), str(steps)]
        done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        reason = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        raise RunError(f"the export does not run without rlplug: {reason[0]}; nothing was written")
    each = [json.loads(line) for line in done.stdout.splitlines()]
    for found, (path, recorded) in zip(each, played.items(), strict=True):
        if not found["largest_difference"] <= limit:
            worst = max(found["by_output"], key=found["by_output"].get)
            differs = f"{path.name} differs from the policy by {found['largest_difference']:.2g} in {worst!r}"
            raise RunError(f"{differs}, in {recorded.steps:,} steps; at most {limit:g} is right; nothing was written")
        found |= {"steps": recorded.steps, "episodes": recorded.episodes, "limit": limit}
    return each


def _folder(checkpoint: Checkpoint, format: str, to: str | Path | None) -> Path:
    if to is None:
        run = checkpoint.path.parent.parent if checkpoint.path.parent.name == FOLDER else checkpoint.path.parent
        folder = run / "exports" / f"{format}-{checkpoint.manifest['env_steps']}"
    else:
        folder = Path(to)
    if folder.exists() and not (folder / MANIFEST).exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError("", f"--to {folder}: it is there, and holds no export; choose another folder")
    above = next(path for path in folder.absolute().parents if path.exists())
    if not above.is_dir() or not os.access(above, os.W_OK):
        raise ConfigError("", f"--to {folder} cannot be written")
    return folder


def _environments(checkpoint: Checkpoint, ctx: RunContext, overrides: Sequence[str]) -> Callable[[EnvShard], VecEnv]:
    """Return what makes the environments to record in.

    Raises:
        ConfigError: the run has only recorded episodes, or the overrides change the spaces.
    """
    from rlplug.config.changes import change  # here, because it imports Hydra

    raw = change(migrate(checkpoint.manifest["config"], ("env",)), overrides, ("env",), "an export may change env only")
    if raw["env"]["name"] == checkpoint.manifest["config"]["env"]["name"]:
        check_installed({"env": checkpoint.manifest["plugins"]["env"]})
    env = choose("env", "env", raw["env"])

    def make(shard: EnvShard) -> VecEnv:
        made = env.build(ctx.derive(shard=shard))
        difference = mismatch(ctx.spec, replace(made.spec, max_episode_steps=ctx.spec.max_episode_steps))
        if difference or not made.traits.playable:
            made.close()
            why = difference or "has only recorded episodes: env=<one to play> for the steps that check the export"
            raise ConfigError("env", f"{'is not what the policy was trained on: ' if difference else ''}{why}")
        return made

    return make


def _about(checkpoint: Checkpoint, policy: Policy, format: str) -> dict[str, Any]:
    manifest = checkpoint.manifest
    return {
        "format": format,
        "file": FILES[format],
        "run": manifest["run"],
        "checkpoint": checkpoint.path.name,
        "env_steps": manifest["env_steps"],
        "updates": manifest["updates"],
        "algo": manifest["config"]["algo"]["name"],
        "env": manifest["config"]["env"],
        "inputs": [x.json() for x in policy.inputs],
        "outputs": [x.json() for x in policy.outputs],
        "versions": {name: metadata.version(name) for name in PACKAGES if find_spec(name)},
    }


def _functional(policy: Policy) -> ExportedProgram:
    """Return ``traced`` without operations in place: what no result depends on does nothing."""
    return traced(policy).run_decompositions({})


def _unread(policy: Policy, program: ExportedProgram) -> set[str]:
    """Return the inputs of earlier steps that actions and scores do not depend on, now or later."""
    names = dict(zip(program.graph_signature.user_inputs, (x.name for x in policy.inputs), strict=True))
    reads: dict[Any, set[str]] = {}
    for node in program.graph.nodes:
        reads[node] = set[str]().union(*(reads[x] for x in node.all_input_nodes)) | ({names.get(node.name, "")} - {""})
    of = {node.name: read for node, read in reads.items()}
    results = zip((x.name for x in policy.outputs), program.graph_signature.user_outputs, strict=True)
    by_output = {name: of[str(node)] for name, node in results}
    read, found = set[str](), by_output["action"] | by_output.get("scores", set())
    while found - read:
        read |= found
        found = set[str]().union(*(by_output.get(f"{NEXT}{name}", set()) for name in read))
    before = {x.name for x in policy.inputs if x.name.startswith("carry.") or x.name in ("is_first", "reward")}
    return before - read


def _pruned(module: Any) -> Any:
    """Remove what the results do not depend on, such as critics, and its weights."""
    used = set[Any]()
    for node in reversed(module.graph.nodes):
        if node.op in ("placeholder", "output") or node in used:
            used.update(node.all_input_nodes)
        else:
            module.graph.erase_node(node)
    module.recompile()
    read = {node.target for node in module.graph.nodes if node.op == "get_attr"}
    for path, inner in list(module.named_modules()):
        for name in [*inner._parameters, *inner._buffers]:
            if f"{path}.{name}".lstrip(".") not in read:
                delattr(inner, name)
    return module


def reason_of(error: Exception) -> str:
    """Return why torch.export failed: the operation, and what to do."""
    text = str(error).strip()
    if "specialized it to be a constant" in text:
        return "its code fixes the size of the batch, as len(x) does; take x.shape[0] in act(), and in the model"
    frames = traceback.extract_tb(error.__traceback__)
    at = ([frame for frame in frames if not frame.filename.startswith(NOT_OF_POLICIES)] or frames)[-1]
    where = f"{Path(at.filename).name}, line {at.lineno}, `{at.line}`"
    operator = getattr(error, "func", None)
    what = f"{operator} in {where}" if operator is not None else where
    first = text.splitlines()[0] if text else type(error).__name__
    return f"{what} ({first}); act() may only use operations of torch that do not read the values of tensors"
