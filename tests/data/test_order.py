"""Transitions in any order, in every format: no two of them are joined that did not follow each other."""

from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

from rlplug import testing
from rlplug.config import compose
from rlplug.data.recording import Recording
from rlplug.data.source import Reading
from rlplug.run.build import build
from rlplug.types import ConfigError
from tests.data.episodes import Columns, as_hdf5, as_lines, as_npz, as_table

SPEC = testing.spec(spaces.Box(-np.inf, np.inf, (2,)), 3)
LENGTHS = [4, 7, 1, 12, 3, 9]  # of episodes; the odd ones are truncated


def recorded(obs: Any = None) -> Columns:
    """Transitions of several episodes in their order; ``obs``: of all rows, final ones too, ``[n + episodes, 2]``."""
    rng, n = np.random.default_rng(0), sum(LENGTHS)
    every = rng.standard_normal((n + len(LENGTHS), 2), np.float32) if obs is None else obs
    finals = np.cumsum(np.array(LENGTHS) + 1) - 1
    acted = np.delete(np.arange(len(every)), finals)
    over = np.isin(np.arange(n), np.cumsum(LENGTHS) - 1)
    odd = np.repeat(np.arange(len(LENGTHS)) % 2 == 1, LENGTHS)
    return {
        "observations": every[acted],
        "next_observations": every[acted + 1],
        "actions": rng.integers(0, 3, n),
        "rewards": rng.standard_normal(n, np.float32),
        "terminals": over & ~odd,
        "timeouts": over & odd,
    }


FORMATS = [as_npz, as_hdf5, as_table, as_lines]


def order(name: str, n: int) -> np.ndarray:
    rng = np.random.default_rng(1)
    return {
        "random": rng.permutation(n),
        "every tenth": np.arange(0, n, 10),
        "every other": np.arange(0, n, 2),
        "backwards": np.arange(n)[::-1],
        "two parts swapped": np.r_[10:20, 0:10, 20:n],
        "rows missing": np.delete(np.arange(n), [1, 8, 9, 20]),
        "drawn with repetition": rng.integers(0, n, 2 * n),
    }[name]


ORDERS = "random,every tenth,every other,backwards,two parts swapped,rows missing,drawn with repetition"


def transitions_of(columns: Columns) -> list[tuple[Any, ...]]:
    """Return transitions as tuples, in an order of their own."""
    keys = ("observations", "actions", "rewards", "terminals", "next_observations")
    return sorted(zip(*(leaf_of(columns[key]) for key in keys), strict=True))


def leaf_of(leaf: np.ndarray) -> list[Any]:
    return [tuple(np.ravel(row).tolist()) for row in leaf]


def transitions_in(recording: Recording) -> list[tuple[Any, ...]]:
    """Return what a run would learn from, in the same order."""
    found = []
    for number in range(len(recording.lengths)):
        rows = recording.episode(number, None, 1)
        values = [rows[key][:-1] for key in ("obs", "action", "reward", "terminated")] + [rows["obs"][1:]]
        found += zip(*map(leaf_of, values), strict=True)
        over = rows["terminated"] | rows["truncated"]
        assert over.tolist() == [False] * (len(over) - 2) + [True, False]
    return sorted(found)


def read(path: Path, **settings: Any) -> tuple[Recording, list[str]]:
    reading = Reading(SPEC, **settings)
    return Recording([str(path)], reading), reading.notes


@pytest.mark.parametrize("name", ORDERS.split(","))
@pytest.mark.parametrize("write", FORMATS)
def test_transitions_stay_what_they_were(write, name, tmp_path):
    """Each piece has an own final observation, and a line says how many there are."""
    columns = {key: leaf[order(name, sum(LENGTHS))] for key, leaf in recorded().items()}
    recording, notes = read(write(tmp_path, columns), unfinished="truncate")
    assert transitions_in(recording) == transitions_of(columns)
    (note,) = notes
    assert "is not in order" in note
    assert f"cut there into {len(recording.lengths):,} pieces" in note


@pytest.mark.parametrize("numbered", [False, True])
@pytest.mark.parametrize("write", FORMATS)
def test_what_is_in_order_is_not_cut(write, numbered, tmp_path):
    columns = recorded()
    if numbered:
        columns["episode"] = np.repeat(np.arange(len(LENGTHS)), LENGTHS)
    recording, notes = read(write(tmp_path, columns))
    assert (recording.lengths.tolist(), notes) == (LENGTHS, [])
    assert transitions_in(recording) == transitions_of(columns)


@pytest.mark.parametrize("write", FORMATS)
def test_another_precision_is_no_other_observation(write, tmp_path):
    columns = recorded(np.random.default_rng(2).standard_normal((sum(LENGTHS) + len(LENGTHS), 2)))
    columns["observations"] = columns["observations"].astype(np.float32).astype(np.float64)
    assert read(write(tmp_path, columns))[0].lengths.tolist() == LENGTHS


@pytest.mark.parametrize("write", FORMATS)
def test_episodes_whose_rows_alternate(write, tmp_path):
    """With a number each, they are told apart: of lines they are put together, of arrays they are cut."""
    columns = {key: leaf[:11] for key, leaf in recorded().items()}
    columns["episode"] = np.repeat([5, 3], [4, 7])
    mixed = {key: leaf[[4, 0, 5, 1, 6, 2, 7, 3, 8, 9, 10]] for key, leaf in columns.items()}
    recording, notes = read(write(tmp_path, mixed))
    assert transitions_in(recording) == transitions_of(columns)
    assert sorted(recording.lengths.tolist()) == ([4, 7] if write is as_lines else [1] * 8 + [3])
    assert len(notes) == (write is not as_lines)


@pytest.mark.parametrize("write", [as_npz, as_hdf5, as_table])
def test_rows_that_alternate_without_next_observations(write, tmp_path):
    columns = {key: leaf[[4, 0, 5, 1]] for key, leaf in recorded().items() if key != "next_observations"}
    path = write(tmp_path, columns | {"episode": np.array([1, 0, 1, 0])})
    with pytest.raises(ConfigError, match=r"has the rows of episode 1 in several places, .*; sort them by episode"):
        read(path, unfinished="truncate")


@pytest.mark.parametrize("by", [1, -1])
@pytest.mark.parametrize("write", FORMATS)
def test_next_observations_that_are_a_row_off(write, by, tmp_path):
    columns = recorded()
    columns["next_observations"] = np.roll(columns["next_observations"], by, 0)
    with pytest.raises(ConfigError, match=r"data.path: .* (two rows later|of their own rows), throughout"):
        read(write(tmp_path, columns))


@pytest.mark.parametrize("by", [1, -1])
def test_next_observations_of_few_states_that_are_a_row_off(by, tmp_path):
    """A walk over ten places, in episodes that begin at the first."""
    walks = [np.cumsum(np.r_[0, np.random.default_rng(i).integers(1, 3, n)]) % 10 for i, n in enumerate(LENGTHS)]
    columns = recorded(np.concatenate(walks)[:, None].repeat(2, 1).astype(np.float32))
    read(as_npz(tmp_path, columns))
    columns["next_observations"] = np.roll(columns["next_observations"], by, 0)
    with pytest.raises(ConfigError, match=r"data.path: .* (two rows later|of their own rows), throughout"):
        read(as_npz(tmp_path, columns))


def test_observations_of_parts_are_compared_as_a_whole(tmp_path):
    columns, spec = recorded(), testing.spec(spaces.Dict({"a": SPEC.groups["default"].obs, "b": spaces.Discrete(9)}), 3)
    parts = {f"{key}/a": columns.pop(key) for key in ("observations", "next_observations")}
    places = np.arange(sum(LENGTHS)) % 9
    parts |= {"observations/b": places, "next_observations/b": np.roll(places, -1)}
    path = as_npz(tmp_path, columns | parts)
    assert len(Recording([str(path)], Reading(spec)).lengths) == len(LENGTHS)
    parts["observations/b"] = np.where(np.arange(len(places)) == 8, 7, places)
    path = as_npz(tmp_path, columns | parts)
    assert len(Recording([str(path)], Reading(spec)).lengths) == len(LENGTHS) + 1


def test_large_files_are_compared_in_blocks(tmp_path, monkeypatch):
    columns = {key: leaf[order("two parts swapped", sum(LENGTHS))] for key, leaf in recorded().items()}
    path = as_hdf5(tmp_path, columns)
    expected = read(path)[0].lengths.tolist()
    monkeypatch.setattr("rlplug.data.arrays.CHUNK", 200)  # four rows
    recording, _ = read(path)
    assert recording.lengths.tolist() == expected
    assert transitions_in(recording) == transitions_of(columns)


# ---- learned from ---------------------------------------------------------------------------------------------------


class Absorbing(gymnasium.Env[Any, Any]):
    """Two states that nothing leaves; the second pays 1 for each step."""

    observation_space = spaces.Box(0.0, 1.0, (2,))
    action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.state = int(self.np_random.integers(2))
        return np.eye(2, dtype=np.float32)[self.state], {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        return np.eye(2, dtype=np.float32)[self.state], float(self.state), False, False, {}


gymnasium.register("Absorbing-v0", "tests.data.test_order:Absorbing", max_episode_steps=20)
WORDS = (
    *("algo=dqn", "env=gymnasium", "env.id=tests.data.test_order:Absorbing-v0", "loop=offline", "exploration=[]"),
    *(
        "hardware=cpu",
        "logger.only=[]",
        "tuned=none",
        "eval.every=0",
        "eval.episodes=1",
        "model.hidden=[16]",
        "compile=off",
    ),
    *("algo.gamma=0.9", "algo.hiddens=[]", "algo.lr=0.01", "algo.td_error_loss_fn=mse", "train_batch_size=64"),
    *("algo.target_update_period=10", "total_steps=700", "data.unfinished=truncate", "buffer.capacity=2000"),
)


@pytest.mark.parametrize(("write", "name"), [(as_npz, "random"), (as_lines, "every tenth"), (as_table, "alternating")])
def test_two_absorbing_states(write, name, tmp_path):
    """Their values are 0 and 1 / (1 - gamma), whatever the order of the transitions."""
    rng = np.random.default_rng(3)
    states = np.repeat(rng.integers(0, 2, 200), 10)  # episodes of 10 steps, of which the file tells nothing
    kept = {"random": rng.permutation(2000)[:400], "every tenth": np.arange(0, 2000, 10)}
    states = np.arange(400) % 2 if name == "alternating" else states[kept[name]]
    obs, n = np.eye(2, dtype=np.float32)[states], len(states)
    columns = {"observations": obs, "next_observations": obs, "actions": rng.integers(0, 2, n)}
    columns |= {"rewards": states.astype(np.float32), "terminals": np.zeros(n, bool)}
    path = write(tmp_path, columns)
    with pytest.raises(ConfigError, match=r"has no end; data.unfinished=truncate truncates it"):
        read(path)
    trainer = build(compose([*WORDS, f"data.path={path}"]), Path())
    trainer.reports.report = lambda trainer: None
    trainer.loop.run(trainer)
    with torch.no_grad():
        rows = {"obs": torch.eye(2), "is_first": torch.ones(2, dtype=torch.bool)}
        values, _ = trainer.algorithm.online(rows, {}, False)  # type: ignore[attr-defined]
    trainer.close()
    torch.testing.assert_close(values, torch.tensor([[0.0, 0.0], [10.0, 10.0]]), atol=0.3, rtol=0.0)
