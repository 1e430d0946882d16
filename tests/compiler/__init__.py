WORLD = (
    "env=cartpole",
    "env.id=rlplug.testing.worlds:World-v0",
    "env.vectorization=list",
    "logger.only=[]",
    "num_envs=4",
)
"""a run on tiny episodes"""
