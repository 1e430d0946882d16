"""Replays recorded steps in an exported policy, in a process that cannot import rlplug.

    python -P export_replay.py <policy.onnx or policy.pt2> <steps.npz> [<policy> <steps> ...]

It runs each policy twice: step by step, with the carry that it returned itself, and on all steps at once, with the
recorded carry. It prints a line of JSON for each, with the largest difference of every output from the recorded one.
"""

import json
import sys
from importlib.abc import MetaPathFinder

import numpy as np


class Blocked(MetaPathFinder):
    """Lets no import find rlplug, so that an export that needs it fails."""

    def find_spec(self, fullname, path=None, target=None):
        if fullname.split(".")[0] == "rlplug":
            raise ImportError("an export runs without rlplug")


def onnx_policy(file):
    """Return a function from arrays by name to arrays by name, and the runtime's name and version."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    takes = [x.name for x in session.get_inputs()]
    gives = [x.name for x in session.get_outputs()]

    def run(inputs):
        return dict(zip(gives, session.run(gives, {name: inputs[name] for name in takes}), strict=True))

    return run, f"onnxruntime {onnxruntime.__version__}"


def torch_policy(file):
    """Return the same for a program of ``torch.export``."""
    import torch

    torch.set_num_threads(1)
    module = torch.export.load(file).module()

    def run(inputs):
        with torch.inference_mode():
            found = module({name: torch.from_numpy(np.ascontiguousarray(x)) for name, x in inputs.items()})
        return {name: x.numpy() for name, x in found.items()}

    return run, f"torch.export of torch {torch.__version__}"


def step_by_step(run, inputs, steps):
    """Return the outputs ``[steps, ...]`` of single steps, each with the carry of the step before."""
    rows = []
    carry = {name: x[:1] for name, x in inputs.items() if name.startswith("carry.")}
    for t in range(steps):
        out = run({name: x[t : t + 1] for name, x in inputs.items()} | carry)
        carry = {name: out["next_" + name] for name in carry}
        rows.append(out)
    return {name: np.concatenate([row[name] for row in rows]) for name in rows[0]}


def differences(found, recorded, start):
    """Return the largest difference of every output, relative to numbers beyond 1.

    Where a discrete action, which counts from ``start``, differs, its difference is by how much the scores prefer it to
    the recorded one, or 1 without scores; that of other whole numbers is 1.
    """
    largest = {}
    for name, expected in recorded.items():
        got = found[name]
        if (got.shape, got.dtype) != (expected.shape, expected.dtype):
            sys.exit(f"{name} is {got.dtype} {got.shape}, and was recorded as {expected.dtype} {expected.shape}")
        if np.issubdtype(expected.dtype, np.floating):
            same, wide = got == expected, expected.astype(np.float64)  # also infinite numbers
            wrong = np.where(same, 0.0, np.abs(got - wide) / np.maximum(1.0, np.abs(wide)))
        else:
            chosen = {"action": start, "next_carry.prev_action": 0}
            scored = "scores" in found and name in chosen
            preferred = preference(found["scores"], expected - chosen[name]) if scored else 1.0
            wrong = preferred * (got != expected)
        largest[name] = float(np.max(np.nan_to_num(wrong, nan=np.inf), initial=0.0))
    return largest


def preference(scores, action):
    """Return by how much the scores prefer their own action to ``action [steps, ...]``."""
    if scores.size == action.size:  # bits, which are 1 where a score is positive
        return np.abs(scores.astype(np.float64)).reshape(action.shape)
    rows = scores.reshape(action.size, -1).astype(np.float64)
    gap = rows.max(-1) - rows[np.arange(len(rows)), action.reshape(-1)]
    return (gap / np.maximum(1.0, np.abs(rows.max(-1)))).reshape(action.shape)


def main(*arguments):
    sys.meta_path.insert(0, Blocked())
    for policy, recorded in zip(arguments[::2], arguments[1::2], strict=True):
        data = np.load(recorded)
        inputs, outputs = ({key[3:]: data[key] for key in data if key.startswith(of)} for of in ("in.", "to."))
        run, runtime = (onnx_policy if policy.endswith(".onnx") else torch_policy)(policy)
        tried = step_by_step(run, inputs, len(outputs["action"])), run(inputs)
        largest = [differences(found, outputs, data["start"]) for found in tried]
        by_output = {name: max(each[name] for each in largest) for name in outputs}
        assert "rlplug" not in sys.modules
        print(json.dumps({"runtime": runtime, "largest_difference": max(by_output.values()), "by_output": by_output}))


if __name__ == "__main__":
    main(*sys.argv[1:])
