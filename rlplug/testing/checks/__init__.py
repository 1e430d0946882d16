"""What conformance means, a module for each kind of component; see ``rlplug.testing.conformance``."""
