"""Compilation of functions of a batch: to machine code on a CPU, to CUDA graphs on a GPU."""
