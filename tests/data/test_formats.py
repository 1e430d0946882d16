"""What is written is read again, bit for bit, and what others wrote is read as they meant it."""

import json
from pathlib import Path

import gymnasium
import h5py
import numpy as np
import pyarrow.parquet as pq
import pytest
from gymnasium import spaces

from rlplug import testing
from rlplug.data import parquet
from rlplug.data.recording import Recording
from rlplug.data.source import Reading
from rlplug.envs.spaces import execute, single_agent
from rlplug.types import ConfigError
from tests.data import episodes
from tests.data.episodes import SPEC, as_npz, as_table, episode, plain, same, write_json, write_parquet

FILES = Path(__file__).parent / "files"
CARTPOLE = gymnasium.make("CartPole-v1")
CARTPOLE_SPEC = single_agent(CARTPOLE.observation_space, CARTPOLE.action_space, 500)
EPISODES = [episode(3, 0), episode(1, 1, terminated=False), episode(7, 2)]
LOW, HIGH = np.array([-2.0, 0.0], np.float32), np.array([2.0, 10.0], np.float32)
ARM = single_agent(spaces.Box(-1, 1, (2,)), spaces.Box(LOW, HIGH), None)


def read(path: Path, **reading) -> Recording:
    return Recording([str(path)], Reading(**reading))


# ---- its own formats ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["parquet", "json", "json, compressed"])
def test_a_round_trip_changes_nothing(form, tmp_path, monkeypatch):
    monkeypatch.setattr(parquet, "GROUP", 1000)  # several row groups
    if form == "parquet":
        path = write_parquet(tmp_path / "a-000000.parquet", EPISODES)
    else:
        path = write_json(tmp_path / "a-000000.json", EPISODES, compress="compressed" in form)
    found = read(path, spec=SPEC)
    assert found.lengths.tolist() == [3, 1, 7]
    np.testing.assert_allclose(found.returns, [one["reward"].sum(dtype=np.float64) for one in EPISODES])
    for number, written in enumerate(EPISODES):
        same(found.episode(number, None, 2), written)
    assert len(found.files[0].chunks) > 1
    assert sorted(file.name for file in tmp_path.glob("*.partial")) == []


def test_only_the_asked_columns_are_read(tmp_path):
    found = read(write_parquet(tmp_path / "a.parquet", EPISODES))
    assert {*found.episode(0, ["obs", "reward"], 1)} == {"obs", "reward"}


@pytest.mark.parametrize(("key", "said"), {"obs": "an observation", "reward": "a reward"}.items())
def test_numbers_that_are_none_are_named(key, said, tmp_path):
    """A run would stop at them: what it records has none."""
    bad, spec = plain(3, 0), testing.spec(2, 2)
    bad[key][1] = -np.inf
    for write, name, where in ((write_parquet, "a.parquet", "row group 0"), (write_json, "a-000000.json", "line 2")):
        path = write(tmp_path / name, [plain(2, 1), bad], spec)
        why = f"{path.name}, {where} cannot be read: has {said} that is not a finite number, in row "
        with pytest.raises(ConfigError, match=why):
            read(path)
    assert read(path, damaged="skip").lengths.tolist() == [2]


# ---- other libraries' ----------------------------------------------------------------------------------------------


def test_lines_that_rllib_wrote():
    """By its own JsonWriter: episodes of 24, 16 and 13 steps, each in two lines, observations compressed."""
    found = read(FILES / "rllib.json", spec=CARTPOLE_SPEC)
    assert found.lengths.tolist() == [24, 16, 13]
    rows = found.episode(1, None, 1)
    first, _ = CARTPOLE.reset(seed=1)
    np.testing.assert_array_equal(rows["obs"][0], first)
    assert (rows["obs"].dtype, rows["action"].dtype) == (np.float32, np.int64)
    assert rows["terminated"].tolist() == [False] * 15 + [True, False]
    np.testing.assert_allclose(rows["logp"][:-1], np.log(0.5), rtol=1e-6)
    replayed, obs = [first], first
    for action in rows["action"][:-1]:
        obs, *_ = CARTPOLE.step(int(action))
        replayed.append(obs)
    np.testing.assert_array_equal(rows["obs"], replayed)


def test_a_set_that_minari_made():
    """By its own DataCollector: three episodes of random actions."""
    found = read(FILES / "minari.hdf5", spec=CARTPOLE_SPEC)
    assert found.lengths.tolist() == [18, 29, 14]
    rows, (first, _) = found.episode(2, None, 1), CARTPOLE.reset(seed=2)
    np.testing.assert_array_equal(rows["obs"][0], first)
    replayed = [first, *(CARTPOLE.step(int(action))[0] for action in rows["action"][:-1])]
    np.testing.assert_array_equal(rows["obs"], replayed)
    assert rows["terminated"].sum() == 1


def transitions(next_obs: bool = True) -> dict[str, np.ndarray]:
    """Two steps that terminate, then three that time out."""
    obs = np.arange(10, dtype=np.float32).reshape(5, 2) / 10
    found = {"observations": obs, "actions": np.array([[2.0, 10.0], [-2.0, 0.0], [0.0, 5.0], [1.0, 5.0], [0.0, 7.5]])}
    found |= {"rewards": np.arange(5.0), "terminals": np.arange(5) == 1, "timeouts": np.arange(5) == 4}
    after = np.where(np.isin(np.arange(5), (1, 4))[:, None], obs + np.float32(0.05), np.roll(obs, -1, 0))
    return found | ({"next_observations": after} if next_obs else {})


def as_hdf5(folder: Path, columns) -> Path:
    more = {"metadata/algorithm": np.zeros(3), "infos/qpos": np.zeros((5, 2))}
    return episodes.as_hdf5(folder, columns | more)


@pytest.mark.parametrize("write", [as_npz, as_hdf5, as_table])
def test_transitions(write, tmp_path):
    """Actions of the environment's space become those inside; the last step's next observation is the final one."""
    found = read(write(tmp_path, transitions()), spec=ARM)
    assert (found.lengths.tolist(), found.returns.tolist()) == ([2, 3], [1.0, 9.0])
    rows = found.episode(1, None, 1)
    np.testing.assert_allclose(rows["obs"], [[0.4, 0.5], [0.6, 0.7], [0.8, 0.9], [0.85, 0.95]], rtol=1e-6)
    np.testing.assert_allclose(rows["action"][:3], [[0.0, 0.0], [0.5, 0.0], [0.0, 0.5]], atol=1e-6)
    assert rows["truncated"].tolist() == [False, False, True, False]
    assert rows["valid"].tolist() == [True, True, True, False]
    assert found.episode(0, None, 1)["terminated"].tolist() == [False, True, False]
    np.testing.assert_allclose(found.episode(0, None, 1)["action"][:2], [[1.0, 1.0], [-1.0, -1.0]])
    own = execute(ARM.native_spaces["agent"].action)(rows["action"][:3])
    np.testing.assert_allclose(own, transitions()["actions"][2:], atol=1e-6)


def test_without_next_observations_an_episode_that_timed_out_ends_a_step_earlier(tmp_path):
    """The observation behind its last step is not there to bootstrap from."""
    found = read(as_hdf5(tmp_path, transitions(next_obs=False)), spec=ARM)
    assert found.lengths.tolist() == [2, 2]
    rows = found.episode(1, None, 1)
    np.testing.assert_allclose(rows["obs"], [[0.4, 0.5], [0.6, 0.7], [0.8, 0.9]], rtol=1e-6)
    assert rows["truncated"].tolist() == [False, True, False]


ENDS = np.array([False, True, False, False, True])
DONE = {
    "beside both": ({"terminals": ENDS & False, "dones": ENDS}, [False, False]),
    "before both": ({"dones": ENDS, "terminals": ENDS & False}, [False, False]),
    "beside a limit of time": ({"terminals": None, "done": ENDS}, [True, False]),
    "alone": ({"terminals": None, "timeouts": None, "dones": ENDS}, [True, True]),
}


@pytest.mark.parametrize("write", [as_npz, as_hdf5, as_table])
@pytest.mark.parametrize(("change", "terminated"), DONE.values(), ids=DONE)
def test_what_is_done_need_not_have_terminated(write, change, terminated, tmp_path):
    """Gym's ``done`` was of both; columns that tell them apart count more, wherever they stand."""
    columns = {"timeouts": ENDS & (np.arange(5) == 4)} if change["terminals"] is None else {"timeouts": ENDS}
    columns |= {key: leaf for key, leaf in transitions().items() if key not in ("terminals", "timeouts")} | change
    found = read(write(tmp_path, {key: leaf for key, leaf in columns.items() if leaf is not None}), spec=ARM)
    assert found.lengths.tolist() == [2, 3]
    assert [bool(found.episode(i, None, 1)["terminated"].any()) for i in range(2)] == terminated


def test_log_probabilities_are_of_the_actions_that_algorithms_see(tmp_path):
    """A density is the greater, the narrower its space: (4, 10) wide outside, (2, 2) inside."""
    columns = transitions() | {"logp": np.full(5, -1.0)}
    rows = read(as_npz(tmp_path, columns), spec=ARM).episode(0, None, 1)
    np.testing.assert_allclose(rows["logp"][:2], -1.0 + np.log(2.0 * 5.0), rtol=1e-6)
    rows = read(as_npz(tmp_path, columns), spec=ARM, normalized_actions=True).episode(0, None, 1)
    np.testing.assert_array_equal(rows["logp"][:2], -1.0)


def test_files_of_other_columns_are_read_together(tmp_path):
    """What all of them have: one policy's log-probabilities are there, another's not."""
    rows = [plain(3, 0) | {"logp": np.zeros(4, np.float32)}, plain(2, 1)]
    spec = testing.spec(2, 2)
    paths = [write_json(tmp_path / f"a-{i:06}.json", [one], spec) for i, one in enumerate(rows)]
    found = Recording([str(path) for path in paths], Reading(spec))
    assert "logp" not in found.keys
    assert {*found.episode(0, sorted(found.keys), 2)} == {*found.episode(1, sorted(found.keys), 2)} == found.keys


def test_columns_that_nobody_reads_may_be_of_any_kind(tmp_path):
    path = as_npz(tmp_path, transitions() | {"infos": np.array([{}] * 5, dtype=object)})
    assert read(path, spec=ARM).lengths.tolist() == [2, 3]


def test_normalized_actions(tmp_path):
    path = as_npz(tmp_path, transitions() | {"actions": np.full((5, 2), 0.5)})
    rows = read(path, spec=ARM, normalized_actions=True).episode(0, None, 1)
    np.testing.assert_array_equal(rows["action"][:2], 0.5)


def test_parts_of_an_observation(tmp_path):
    spec = testing.spec(spaces.Dict({"a": spaces.Box(-9, 9, (2,)), "b": spaces.Discrete(5)}), 2)
    columns = {"observations/a": np.zeros((3, 2), np.float32), "observations/b": np.arange(3)}
    columns |= {"actions": np.ones(3, int), "rewards": np.zeros(3), "terminals": np.arange(3) == 2}
    rows = read(as_npz(tmp_path, columns), spec=spec).episode(0, None, 1)
    assert rows["obs"]["b"].tolist() == [0, 1, 2, 2]
    assert rows["obs"]["a"].shape == (4, 2)


# ---- what is wrong --------------------------------------------------------------------------------------------------


def test_a_damaged_row_group_is_named_or_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr(parquet, "GROUP", 1)
    path = write_parquet(tmp_path / "a.parquet", EPISODES)
    column = pq.ParquetFile(path).metadata.row_group(1).column(0)
    end, data = column.data_page_offset + column.total_compressed_size, bytearray(path.read_bytes())
    data[end - 40] ^= 1
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=r"a.parquet, row group 1 cannot be read: .*data.damaged=skip skips it"):
        read(path)
    notes: list[str] = []
    found = read(path, damaged="skip", notes=notes)
    assert found.lengths.tolist() == [3, 7]
    same(found.episode(1, None, 1), EPISODES[2])
    assert len(notes) == 1
    assert "row group 1 is left out" in notes[0]


def test_a_damaged_line_is_named_or_left_out(tmp_path):
    path = write_json(tmp_path / "a-000000.json", EPISODES)
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], lines[1][:50], lines[2]]) + "\n")
    with pytest.raises(ConfigError, match=r"json, line 2 cannot be read: .* at character \d+; data.damaged=skip"):
        read(path)
    found = read(path, damaged="skip")
    assert found.lengths.tolist() == [3, 7]
    same(found.episode(1, None, 1), EPISODES[2])


@pytest.mark.parametrize(
    ("change", "said"),
    {
        "rows": ({"obs": [[0.0, 0.0]] * 2}, "has 2 rows of 'obs', and 3 of 'reward'"),
        "ends": ({"terminateds": [True]}, "has 1 rows of 'terminated', and 3 of 'reward'"),
        "reward": ({"rewards": [1.0, float("nan"), 1.0]}, "has a reward that is not a finite number"),
    }.values(),
    ids=["rows", "ends", "reward"],
)
def test_a_line_whose_columns_do_not_go_together(change, said, tmp_path):
    path = write_json(tmp_path / "a-000000.json", [plain(2, 0), plain(3, 1)], testing.spec(2, 2))
    first, second = path.read_text().splitlines()
    path.write_text(first + "\n" + json.dumps(json.loads(second) | change) + "\n")
    with pytest.raises(ConfigError, match=f"json, line 2 cannot be read: {said}"):
        read(path)
    assert read(path, damaged="skip").lengths.tolist() == [2]


@pytest.mark.parametrize(
    ("key", "column", "said"),
    [
        ("observations", np.zeros((3, 4), np.float32), "has 3 rows of 'obs', and 3 of 'reward'"),
        ("rewards", np.array([0.0, np.nan, 0.0]), "has a reward that is not a finite number"),
    ],
)
def test_an_episode_of_minari_whose_columns_do_not_go_together(key, column, said, tmp_path):
    path = tmp_path / "main_data.hdf5"
    columns = {"observations": np.zeros((4, 4), np.float32), "actions": np.zeros(3, int), "rewards": np.zeros(3)}
    columns |= {"terminations": np.arange(3) == 2, "truncations": np.zeros(3, bool)}
    with h5py.File(path, "w") as file:
        for number in range(2):
            for name, leaf in (columns | ({key: column} if number else {})).items():
                file[f"episode_{number}/{name}"] = leaf
    with pytest.raises(ConfigError, match=f"episode_1, cannot be read: {said}"):
        read(path, spec=CARTPOLE_SPEC)
    assert read(path, spec=CARTPOLE_SPEC, damaged="skip").lengths.tolist() == [3]


def test_what_says_the_spaces_of_lines_is_damaged(tmp_path):
    path = write_json(tmp_path / "a-000000.json", EPISODES)
    beside = path.with_name(path.name + ".spaces")
    beside.write_bytes(beside.read_bytes()[:-9])
    with pytest.raises(ConfigError, match=r"json.spaces cannot be read: .*; it describes the columns of a-000000.json"):
        read(path)


def test_a_file_that_was_cut_off(tmp_path):
    path = write_parquet(tmp_path / "a.parquet", EPISODES)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ConfigError, match=r"data.path: .*a.parquet cannot be read"):
        read(path)


UNFINISHED = {"refuse": None, "truncate": [2, 3], "skip": [2]}


@pytest.mark.parametrize("choice", UNFINISHED)
@pytest.mark.parametrize("write", [as_npz, as_hdf5])
def test_an_episode_without_an_end(write, choice, tmp_path):
    path = write(tmp_path, transitions() | {"timeouts": np.zeros(5, bool)})
    if choice == "refuse":
        with pytest.raises(ConfigError, match=r"the episode of rows 2 to 4, has no end; data.unfinished=truncate"):
            read(path, spec=ARM)
        return
    found = read(path, spec=ARM, unfinished=choice)
    assert found.lengths.tolist() == UNFINISHED[choice]
    if choice == "truncate":
        assert found.episode(1, None, 1)["truncated"].tolist() == [False, False, True, False]


WRONG = {
    "a column": (lambda c: c.pop("rewards"), "has no key for 'reward' (reward, rewards); it has observations"),
    "the ends": (lambda c: (c.pop("terminals"), c.pop("timeouts")), "does not say where episodes end"),
    "other observations": (lambda c: c.update(observations=np.zeros((5, 3))), "has observations of shape [3]"),
    "other actions": (lambda c: c.update(actions=np.zeros(5)), "has actions of shape [], but env has Box"),
    "reward": (lambda c: c.update(rewards=np.full(5, np.nan)), "has a reward that is not a finite number"),
    "rows": (lambda c: c.update(rewards=np.zeros(4)), "has 5 rows of 'obs', and 4 of 'reward'"),
    "everything": (lambda c: c.update({key: leaf[:0] for key, leaf in c.items()}), "contains no episodes"),
}


@pytest.mark.parametrize(("change", "said"), WRONG.values(), ids=WRONG)
def test_what_is_wrong_is_said(change, said, tmp_path):
    columns = transitions()
    change(columns)
    with pytest.raises(ConfigError) as refused:
        read(as_npz(tmp_path, columns), spec=ARM).episode(0, None, 1)
    assert refused.value.key == "data.path"
    assert said in refused.value.message


def test_choices_that_do_not_begin_at_zero(tmp_path):
    """A final row has no action, whatever the first choice is."""
    spec = single_agent(spaces.Box(-9, 9, (2,)), spaces.Discrete(3, start=5), None)
    columns = transitions() | {"actions": np.array([5, 6, 7, 5, 6])}
    found = read(as_npz(tmp_path, columns), spec=spec)
    assert found.episode(1, None, 1)["action"].tolist() == [2, 0, 1, 0]


@pytest.mark.parametrize("write", [as_npz, as_hdf5, as_table])
def test_other_spaces_are_found_when_a_file_is_opened(write, tmp_path):
    path = write(tmp_path, transitions())
    with pytest.raises(ConfigError, match=r"has actions of shape \[2\], but env has Discrete"):
        read(path, spec=testing.spec(2, 2))


def test_choices_out_of_range(tmp_path):
    columns = {"obs": np.zeros((2, 4), np.float32), "actions": np.array([0, 2]), "rewards": np.zeros(2)}
    path = as_npz(tmp_path, columns | {"dones": np.arange(2) == 1})
    with pytest.raises(ConfigError, match=r"has actions from 0 to 2, but env has Discrete\(2\)"):
        read(path, spec=CARTPOLE_SPEC).episode(0, None, 1)


def test_other_spaces(tmp_path):
    path = write_parquet(tmp_path / "a.parquet", EPISODES)
    with pytest.raises(ConfigError, match=r"a.parquet was recorded in another environment: the obs.* was Dict"):
        read(path, spec=testing.spec(4, 2))


@pytest.mark.parametrize("path", ["nowhere", "nowhere/*.parquet", "."])
def test_no_file(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"data.path: .* (does not exist|contains no file of episodes)"):
        read(Path(path))


def test_of_several_agents(tmp_path):
    path = tmp_path / "a.json"
    path.write_text(json.dumps({"type": "MultiAgentBatch", "count": 1, "policy_batches": {}}) + "\n")
    with pytest.raises(ConfigError, match="MultiAgentBatch"):
        read(path)


def test_actions_that_may_have_been_normalized(tmp_path):
    """They are scaled as if they were of env's own bounds, which a line says, unless the settings say what they are."""
    columns = transitions() | {"actions": np.full((5, 2), 0.5)}
    path, said = as_npz(tmp_path, columns), "has actions in [-1, 1], scaled as if they were within env's own"
    for settings, expected in (({}, True), ({"normalized_actions": True}, False)):
        notes: list[str] = []
        read(path, spec=ARM, notes=notes, **settings)
        assert [said in note for note in notes] == [True] * expected
    notes = []
    read(as_npz(tmp_path, transitions()), spec=ARM, notes=notes)  # up to 2 and 10
    assert notes == []
