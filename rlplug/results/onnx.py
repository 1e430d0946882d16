"""Translation of an exported program to ONNX."""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rlplug.types import ConfigError

NEEDS = ("onnx", "onnxscript", "onnxruntime")
OPERATOR = re.compile(r"OpOverload\(op='([\w.:]+)'")


def require_onnx() -> None:
    """Raise ``ConfigError`` if a package is missing."""
    missing = [name for name in NEEDS if find_spec(name) is None]
    if missing:
        raise ConfigError("", f"export to ONNX needs {', '.join(missing)}: pip install 'rlplug[export]'")


def write_onnx(program: Any, inputs: Sequence[str], outputs: Sequence[str], path: Path) -> None:
    """Write a program of ``torch.export`` as an ONNX model.

    Raises:
        ConfigError: ONNX lacks an operator.
    """
    import torch

    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)  # it says which packages it would know more operators with
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = torch.onnx.export(program, input_names=inputs, output_names=outputs, dynamo=True, verbose=False)
    except torch.onnx.errors.OnnxExporterError as error:
        found = OPERATOR.search(_chain(error))
        operator = f"ONNX has no operator for {found[1]}" if found else str(error).strip().splitlines()[0]
        raise ConfigError(
            "", f"the policy cannot be exported to ONNX: {operator}; take --format torch, or another operation"
        ) from None
    finally:
        logger.setLevel(level)
    assert model is not None
    model.save(path)


def _chain(error: BaseException) -> str:
    """Return the messages of an error and its causes, the first cause first."""
    cause = error.__cause__ or error.__context__
    return (f"{_chain(cause)}\n" if cause else "") + str(error)
