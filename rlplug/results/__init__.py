"""What finished runs are made into: comparisons, curves, reports, and exports that run without rlplug."""
