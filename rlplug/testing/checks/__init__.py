"""The checks, one module per kind of component; see ``rlplug.testing.conformance``."""
