"""Worker processes: the same rows as in process, and nothing is left of them."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import psutil
import pytest

from rlplug import tree
from rlplug.envs import EnvList, Subprocess
from rlplug.envs.spaces import equal
from rlplug.types import ConfigError, RunError
from tests.envs.making import gym
from tests.envs.walking import Bare, Everything, Walk, rows

SEEDS = [3, 1, 4, 1, 5]
PONG = {"id": "ALE/Pong-v5", "atari": True, "frame_skip": 4, "frame_stack": 4}
WORLDS = {
    "cartpole": {"id": "CartPole-v1"},
    "pendulum": {"id": "Pendulum-v1", "max_episode_steps": 23},
    "taxi": {"id": "Taxi-v4", "max_episode_steps": 23},
    "wrapped": {"id": "CartPole-v1", "frame_skip": 2, "sticky_actions": 0.3, "select": [0, 2], "max_episode_steps": 9},
    "blackjack": {"id": "Blackjack-v1", "flatten": True},
    "pong": PONG | {"sticky_actions": 0.25, "max_episode_steps": 29},
}
pytestmark = pytest.mark.skipif(os.name != "posix", reason="workers share memory by descriptors")


def make(vectorization, workers=2, columns=5, id="CartPole-v1", **options):
    options |= {"workers": workers} if vectorization == "subprocess" else {}
    return gym(id, columns, vectorization=vectorization, **options)


@pytest.fixture(params=[pytest.param(name, marks=[pytest.mark.slow] * (name == "pong")) for name in WORLDS])
def options(request):
    if request.param == "pong" and not (find_spec("ale_py") and find_spec("cv2")):
        pytest.skip("needs ale_py and cv2")
    return WORLDS[request.param]


def test_rows_are_those_of_the_list(options):
    """Bit for bit, whatever the number of workers; and after ``load`` of each other's ``state``."""
    one, two = make("list", **options), make("subprocess", **options)
    assert one.spec == two.spec
    assert all(equal(a, b) for a, b in zip(rows(one, 70, SEEDS), rows(two, 70, SEEDS), strict=True))
    states = [copy_of(env.state()) for env in (one, two)]
    assert equal_trees(*states)
    back, forth = make("list", **options), make("subprocess", workers=3, **options)
    forth.load(states[0])
    back.load(states[1])
    space = one.spec.single_agent.action
    for _ in range(40):
        action = np.stack([space.sample() for _ in SEEDS])
        row = tree.map(np.array, one.step(action))
        assert all(equal(row, env.step(action.copy())) for env in (two, back, forth))
    for env in (one, two, back, forth):
        env.close()


def copy_of(state):
    return {key: tree.map(np.array, value) if key == "obs" else list(value) for key, value in state.items()}


def equal_trees(a, b):
    rest = ("seeds", "episodes")
    same = all(np.array_equal(x, y) and x.dtype == y.dtype for x, y in zip(a["actions"], b["actions"], strict=True))
    return same and equal(a["obs"], b["obs"]) and all(a[key] == b[key] for key in rest)


@pytest.mark.parametrize("maker", [Walk, Everything])
def test_awkward_spaces(maker):
    one, two = EnvList([maker() for _ in SEEDS]), Subprocess(maker, range(len(SEEDS)), workers=2)
    assert all(equal(a, b) for a, b in zip(rows(one, 60, SEEDS), rows(two, 60, SEEDS), strict=True))
    two.close()


def test_a_column_keeps_its_seed_whatever_worker_it_is_in():
    alone = make("subprocess", workers=1, columns=1, id="CartPole-v1")
    many = make("subprocess", workers=4, id="CartPole-v1")
    assert len(many._workers) == 4
    for i, seed in enumerate(SEEDS):
        assert equal(alone.reset([seed])["obs"][0], many.reset(SEEDS)["obs"][i])
    with pytest.raises(ValueError, match="1 seeds for 5"):
        many.reset([0])
    alone.close()
    many.close()


def processes(env):
    return [psutil.Process(worker.process.pid) for worker in env._workers]


def descriptors():
    return {name: os.readlink(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd") if alive(name)}


def alive(name):
    return os.path.lexists(f"/proc/self/fd/{name}")


@pytest.mark.parametrize("closed", [True, False])
def test_nothing_is_left(closed):
    env = make("subprocess", id="CartPole-v1")
    workers = processes(env)
    env.reset(SEEDS)
    assert all(worker.is_running() for worker in workers)
    for _ in range(2 * closed):
        env.close()
    del env
    assert not any(worker.is_running() for worker in workers)
    if os.path.isdir("/proc/self/fd"):
        assert not [link for link in map(os.path.realpath, descriptors().values()) if "memfd:rlplug" in link]


MAIN = """
    import os, signal, sys, time
    from rlplug.envs import Maker, Subprocess, find
    env = Subprocess(Maker(find("CartPole-v1")), range(4), workers=2)  # no guard around the main module
    env.reset([0, 1, 2, 3])
    print(*(worker.process.pid for worker in env._workers), flush=True)
    {end}
"""


@pytest.mark.parametrize("end", ["time.sleep(100)", "raise SystemError", "os._exit(1)"])
def test_nothing_is_left_however_the_main_process_ends(tmp_path, end):
    script = tmp_path / "main.py"
    script.write_text(textwrap.dedent(MAIN.format(end=end)))
    main = subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    pids = list(map(int, main.stdout.readline().split()))
    assert len(pids) == 2
    workers = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
    if "sleep" in end:
        assert len(workers) == 2
        main.kill()
    main.communicate(timeout=60)
    assert not psutil.wait_procs(workers, timeout=60)[1]


@pytest.mark.parametrize("call", ["step", "reset", "state"])
def test_a_killed_worker_is_one_error(call):
    env = make("subprocess", id="CartPole-v1")
    env.reset(SEEDS)
    os.kill(env._workers[1].process.pid, signal.SIGKILL)
    calls = {"step": lambda: env.step(np.zeros(5, np.int64)), "reset": lambda: env.reset(SEEDS), "state": env.state}
    for _ in range(2):
        with pytest.raises(RunError, match=r"^the worker process of environments 3, 4 was killed by SIGKILL; usually"):
            calls[call]()
    env.close()
    assert not any(worker.is_running() for worker in processes_of([env._workers[0].process.pid]))


def processes_of(pids):
    return [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]


def test_a_worker_in_the_middle_of_a_step_ends_with_the_main_process(tmp_path):
    script = tmp_path / "main.py"
    made = MAIN.replace('Maker(find("CartPole-v1"))', "Stuck").replace(
        "import os,", "from tests.envs.walking import Stuck; import os,"
    )
    script.write_text(textwrap.dedent(made.format(end="import numpy; env.step(numpy.zeros(4, int))")))
    path = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    main = subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True, env=path)
    workers = [psutil.Process(int(pid)) for pid in main.stdout.readline().split()]
    assert len(workers) == 2
    time.sleep(0.5)
    main.kill()
    main.communicate(timeout=60)
    assert not psutil.wait_procs(workers, timeout=60)[1]


class Leaving(Walk):
    """Ends its process, but not a child that keeps the channel to the main process open."""

    def reset(self, *, seed=None, options=None):
        obs, info = super().reset(seed=seed)
        child = os.fork()
        if not child:
            time.sleep(60)
            os._exit(0)
        return obs | {"position": np.full(2, child)}, info

    def step(self, action):
        os._exit(7)


def test_a_dead_worker_whose_channel_is_open_is_noticed():
    env = Subprocess(Leaving, range(1))
    child = psutil.Process(int(env.reset([0])["obs"]["position"][0, 0]))
    with pytest.raises(RunError, match="ended with exit status 7"):
        env.step(np.zeros(1, np.int64))
    assert child.status() == psutil.STATUS_SLEEPING  # and so the channel did not end
    child.kill()
    env.close()


def test_workers_import_no_torch_and_are_deaf_to_signals_for_the_main_process():
    env = Subprocess(Bare, range(2), workers=2)
    assert "torch" in sys.modules
    assert env.reset([0, 1])["obs"]["position"][:, 0].tolist() == [0, 0]
    for worker in env._workers:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            os.kill(worker.process.pid, number)
    time.sleep(0.2)
    env.step(np.zeros(2, np.int64))
    env.close()


def test_what_cannot_be_made_or_sent_is_explained():
    with pytest.raises(ConfigError, match="takes no 'gravity'"):
        make("subprocess", id="Pendulum-v1", kwargs={"gravity": 3})
    with pytest.raises(ConfigError, match=r"cannot be sent to a process .*; use list"):
        Subprocess(lambda: Walk(), range(2))
    with pytest.raises(ConfigError, match="only images are stacked"):
        make("subprocess", id="Pendulum-v1", frame_stack=2)


HERE = """
    import gymnasium, numpy
    from rlplug.envs import Maker, Subprocess, find
    from rlplug.types import ConfigError

    class Here(gymnasium.Env):
        observation_space = action_space = gymnasium.spaces.Discrete(2)

    gymnasium.register("Here-v0", Here)
    try:
        Subprocess({make}, range(4), workers=2)
    except ConfigError as error:
        print(error)
"""


@pytest.mark.parametrize("make", ["Here", 'Maker(find("Here-v0"))'])
def test_what_the_main_module_defines_is_one_error(tmp_path, make):
    script = tmp_path / "main.py"
    script.write_text(textwrap.dedent(HERE.format(make=make)))
    done = subprocess.run([sys.executable, script], capture_output=True, text=True)
    assert done.stdout.startswith("env.vectorization: the environment cannot be sent to a process (AttributeError: ")
    assert done.stdout.endswith("use list, or register it in a module: env.id=module:Name-v0\n")
    assert not done.stderr


def broken():
    raise KeyError("socket")


def test_a_constructor_that_raises_is_one_error():
    with pytest.raises(
        ConfigError, match=r"^env: .* cannot be created in a process \(KeyError: 'socket'\); .*=list shows"
    ):
        Subprocess(broken, range(2))
