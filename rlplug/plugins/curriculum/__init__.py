"""Built-in curricula, which choose the tasks of training episodes."""
