"""Model cards: folders with the policy of a run and its description, in the form of the Hugging Face hub."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from rlplug.checkpointing import atomic
from rlplug.checkpointing.format import FOLDER, MANIFEST, Checkpoint, find, steps_of
from rlplug.results import curves, plot
from rlplug.results.record import EVALUATION, TRAINING, read
from rlplug.script import name_of
from rlplug.types import CheckpointError, ConfigError, RunError

CURVE, CARD, HUB = "curve.png", "README.md", "hf://"
COPIED = ("config.yaml", "manifest.json", "summary.json", "metrics.csv")
WEIGHTS = ("weights.pt", MANIFEST)
"""files of a checkpoint that inference reads"""
METRICS = (EVALUATION, TRAINING)
"""the curve shows the first that the run has"""


def push(path: Path, to: str | None, tell: Callable[[str], None]) -> dict[str, Any]:
    """Write the model card of a run, with what it takes to use its policy, to a folder or to the Hugging Face hub.

    Args:
        path: a run folder.
        to: a folder, or ``hf://user/name``; None: ``card`` in the run folder.
        tell: called with each line for the user.

    Returns:
        ``to``: the folder or the address of the model; ``files`` and their sizes in bytes.

    Raises:
        ConfigError: the run has no checkpoint; ``huggingface_hub`` or a token is missing; a folder cannot be written.
        RunError: the hub refuses.
    """
    repository = None
    if to is not None and to.startswith(HUB):
        repository = _repository(to.removeprefix(HUB))
    folder = path / "card" if to is None or repository else Path(to)
    if not (path / "config.yaml").exists():
        raise CheckpointError(f"{path} holds no run; push takes a run folder")
    if folder.exists() and not (folder / CARD).exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError("", f"--to {folder}: it is there, and holds no model card; choose another folder")
    checkpoint = find(path, ("weights",), tell)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with atomic.renamed(folder) as partial:
            partial.mkdir()
            _fill(partial, path, checkpoint)
            files = {
                str(file.relative_to(partial)): file.stat().st_size
                for file in sorted(partial.rglob("*"))
                if file.is_file()
            }
            if folder.exists():
                atomic.delete(folder)
    except OSError as error:
        raise ConfigError("", f"--to {folder} cannot be written: {error.strerror}") from None
    address = _upload(folder, repository) if repository else str(folder)
    return {"to": address, "files": files}


def card(
    run: Mapping[str, Any], summary: Mapping[str, Any], checkpoint: Mapping[str, Any], exports: Mapping[str, Any]
) -> str:
    """Return a model card, Markdown with metadata.

    Args:
        run: the run's configuration.
        summary: its ``summary.json``; empty: it has not ended.
        checkpoint: the manifest of its checkpoint.
        exports: manifests of its exports, by folder.
    """
    algo, env = run["algo"]["name"], name_of(run["env"])
    name, mean = f"{algo}-{env}", summary.get("eval/return_mean")
    metadata: dict[str, Any] = {"library_name": "rlplug"}
    metadata["tags"] = ["reinforcement-learning", "deep-reinforcement-learning", "rlplug", algo, env]
    if mean is not None:
        value = f"{mean:.2f}" + (f" +/- {summary['eval/return_std']:.2f}" if "eval/return_std" in summary else "")
        task = {"type": "reinforcement-learning", "name": "reinforcement-learning"}
        metric = {"type": "mean_reward", "value": value, "name": "mean_reward", "verified": False}
        result = {"task": task, "dataset": {"name": env, "type": env}, "metrics": [metric]}
        metadata["model-index"] = [{"name": name, "results": [result]}]
    weights = f"{FOLDER}/step_{steps_of(checkpoint):012}"
    rows = {"Environment steps": f"{checkpoint['env_steps']:,}", "Updates": f"{checkpoint['updates']:,}"}
    evaluated = {key: x for key, x in summary.items() if key.startswith("eval/") and isinstance(x, int | float)}
    rows |= {f"`{key}`": f"{x:,}" if isinstance(x, int) else f"{x:,.2f}" for key, x in evaluated.items()}
    lines = [
        f"---\n{yaml.safe_dump(metadata, sort_keys=False)}---\n",
        f"# {algo} on {env}\n",
        f"A policy that `{algo}` of [rlplug](https://pypi.org/project/rlplug/) {checkpoint['rlplug']} learned.\n",
        "## Final evaluation\n" if evaluated else "## Training\n",
        "| | |\n|---|---|\n" + "".join(f"| {key} | {x} |\n" for key, x in rows.items()),
    ]
    if not evaluated:
        lines.append("The run has not been evaluated at its end.\n")
    lines.append(f"<!-- curve -->\n## How to use it\n\n```python\nimport rlplug\n\nagent = rlplug.load({weights!r})")
    lines.append("action = agent.act(obs)  # of one environment, or [n, ...]\n```\n")
    lines.append("`rlplug evaluate .` plays it in its environment, from this folder.\n")
    for where, about in exports.items():
        difference = about["replay"]["largest_difference"]
        lines.append(f"`{where}/{about['file']}` runs without rlplug, and differs by at most {difference:.1g}.\n")
    if exports:
        about = next(iter(exports.values()))
        lines.append("Inputs and outputs of the exports:\n\n" + "".join(f"- {line}\n" for line in _fields(about)))
    lines.append(f"## Configuration\n\n```yaml\n{yaml.safe_dump(dict(run), sort_keys=False)}```\n")
    return "\n".join(lines)


def _fields(about: Mapping[str, Any]) -> list[str]:
    kinds = (("input", about["inputs"]), ("output", about["outputs"]))
    return [
        f"{kind} `{x['name']}` [{', '.join(map(str, x['shape']))}] {x['dtype']}: {x['meaning']}"
        for kind, fields in kinds
        for x in fields
    ]


def _fill(folder: Path, run: Path, checkpoint: Checkpoint) -> None:
    """Copy what it takes to use the policy, and write the card and the curve."""
    for name in COPIED:
        if (run / name).exists():
            shutil.copyfile(run / name, folder / name)
    place = folder / FOLDER / checkpoint.path.name
    place.mkdir(parents=True)
    for name in WEIGHTS:
        shutil.copyfile(checkpoint.path / name, place / name)
    exports: dict[str, Any] = {}
    for export in sorted((run / "exports").glob("*/manifest.json")):
        about = json.loads(export.read_text(encoding="utf-8"))
        if about["env_steps"] == checkpoint.manifest["env_steps"]:
            shutil.copytree(export.parent, folder / "exports" / export.parent.name)
            exports[f"exports/{export.parent.name}"] = about
    summary = json.loads((run / "summary.json").read_text(encoding="utf-8")) if (run / "summary.json").exists() else {}
    text = card(checkpoint.manifest["config"], summary, checkpoint.manifest, exports)
    picture = f"![The return over the run]({CURVE})\n\n" if _draw(run, folder / CURVE) else ""
    atomic.write(folder / CARD, text.replace("<!-- curve -->\n", picture).encode())


def _draw(run: Path, path: Path) -> bool:
    """Draw the curve of a run, if it has one and matplotlib is installed, and return whether."""
    record = read(run)
    found = [metric for metric in METRICS if metric in record.metrics and record.metrics[metric].shape[1] > 1]
    if find_spec("matplotlib") is None or not found:
        return False
    drawn = curves.curve(record.algo, [record], found[0], 1, lambda line: None)
    labels = curves.axis([record]), curves.values_axis(found[:1])
    plot.save(plot.draw([drawn], *labels, title=record.env), [path])
    return True


def _repository(name: str) -> str:
    """Check that a model of this name can be pushed from here.

    Raises:
        ConfigError: the name is wrong; ``huggingface_hub`` or a token is missing.
    """
    if find_spec("huggingface_hub") is None:
        raise ConfigError("", "push to hf:// needs huggingface_hub: pip install 'rlplug[export]'")
    import huggingface_hub
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        if name.count("/") != 1:
            raise HFValidationError("user/name is right")
        validate_repo_id(name)
    except HFValidationError as error:
        raise ConfigError("", f"--to {HUB}{name}: {str(error).splitlines()[0]}") from None
    if huggingface_hub.get_token() is None:
        raise ConfigError("", "push to hf:// needs a token: run `hf auth login`, or set HF_TOKEN")
    return name


def _upload(folder: Path, repository: str) -> str:
    """Create the model on the hub if it is not there, upload a folder in one commit, and return its address."""
    from huggingface_hub import HfApi

    try:
        api = HfApi()
        address = api.create_repo(repository, exist_ok=True)
        api.upload_folder(repo_id=repository, folder_path=folder, commit_message="Push a policy of rlplug")
    except Exception as error:  # of HTTP, of the network or of the token
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise RunError(f"{HUB}{repository}: {reason}; {folder} holds what was to be pushed") from None
    return str(address)
