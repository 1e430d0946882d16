"""Functions of a batch as machine code on a CPU, and as replayed CUDA graphs."""
