"""The conformance kit: tests for the components of plugins."""

from rlplug.testing.configs import config
from rlplug.testing.context import box, context, spec

__all__ = ["box", "config", "context", "spec"]
