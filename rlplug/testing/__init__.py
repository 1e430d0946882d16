"""The conformance kit: what authors of plugins test their own components with."""

from rlplug.testing.configs import config
from rlplug.testing.context import box, context, spec

__all__ = ["box", "config", "context", "spec"]
