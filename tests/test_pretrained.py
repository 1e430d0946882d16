"""``init_from``, evaluation in another mode and environment, and the load of the machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import rlplug
from rlplug.types import ConfigError
from tests.test_session import SMALL, columns


def weights(run: Path, which: int = -1) -> dict[str, Any]:
    return torch.load(sorted(run.glob("checkpoints/step_*"))[which] / "weights.pt", weights_only=True)["algorithm"]


def steps(run: Path) -> list[str]:
    return [path.name.removeprefix("step_") for path in sorted(run.glob("checkpoints/step_*"))]


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("first") / "run"
    words = SMALL | {"preprocess.normalize_obs": True, "checkpoint.every": 64, "checkpoint.keep_last": 9}
    return rlplug.train(folder=folder, **words).folder


def begun(folder: Path, **given: Any) -> Any:
    """Return the algorithm of a run that has not made a round."""
    with rlplug.Session(folder=folder, **SMALL | {"seed": 5} | given) as run:
        normalizer = run._trainer.policy.normalizer.state_dict()  # type: ignore[union-attr]
        return {name: x.clone() for name, x in run.algorithm.state_dict().items()}, normalizer


def equal(a: dict[str, Any], b: dict[str, Any], prefix: str = "") -> bool:
    return all(torch.equal(a[name], b[name]) for name in a if name.startswith(prefix))


def test_a_run_begins_with_the_weights_of_another(first, tmp_path):
    found, normalizer = begun(tmp_path / "a", init_from=str(first), **{"preprocess.normalize_obs": True})
    assert equal(found, weights(first))
    saved = torch.load(sorted(first.glob("checkpoints/step_*"))[-1] / "weights.pt", weights_only=True)["normalizer"]
    moments = [name for name in saved if name != "returns"]
    assert moments
    assert all(torch.equal(normalizer[name], saved[name]) for name in moments)
    found, _ = begun(tmp_path / "b", init_from=f"{first}@{int(steps(first)[0])}")
    assert equal(found, weights(first, 0))
    assert not equal(found, weights(first))
    torch.save(weights(first), tmp_path / "w.pt")
    assert equal(begun(tmp_path / "c", init_from=str(tmp_path / "w.pt"))[0], weights(first))


def test_weights_of_the_script(first, tmp_path):
    given = weights(first)
    assert equal(begun(tmp_path / "a", init_from=given)[0], given)
    found, _ = begun(tmp_path / "b", init_from={"path": given, "prefix": ["net.torso"]})
    assert equal(found, given, "net.torso")
    assert not equal(found, given)
    with rlplug.Session.resume(tmp_path / "a") as run:
        assert run.updates == 0
    fewer = {name: x for name, x in given.items() if "torso" not in name}
    with pytest.raises(ConfigError, match=r"init_from: only this run has net\.torso"):
        begun(tmp_path / "c", init_from=fewer)
    assert not (tmp_path / "c").exists()


def test_a_part_of_the_weights(first, tmp_path):
    found, _ = begun(tmp_path / "a", init_from={"path": str(first), "prefix": ["net.torso"]})
    own, _ = begun(tmp_path / "b")
    assert equal(found, weights(first), "net.torso")
    assert equal(found, own, "net.policy")
    assert not equal(found, own, "net.torso")


def test_a_resumed_run_does_not_read_them_again(first, tmp_path):
    torch.save(weights(first), tmp_path / "w.pt")
    with rlplug.Session(folder=tmp_path / "run", init_from=str(tmp_path / "w.pt"), **SMALL) as run:
        run.step()
    (tmp_path / "w.pt").unlink()
    with rlplug.Session.resume(tmp_path / "run") as run:
        assert run.updates == 1


@pytest.mark.parametrize(
    ("setting", "key", "said"),
    [
        ("nowhere", "init_from", "nowhere does not exist|nowhere"),
        ("{first}@7", "init_from", "has no checkpoint of step 7"),
        ({"path": "{first}", "prefix": ["nett"]}, "init_from.prefix", r"no weight of both runs begins with 'nett'"),
        (
            {"path": "{first}", "only": ["net"]},
            "init_from",
            r"should be a path, \{path: ..., prefix: \[...\]\} or \{pol",
        ),
        ({"path": "{first}", "prefix": []}, "init_from", "should be a path,"),
        ({"prefix": ["net"]}, "init_from", "should be a path,"),
        ({"policies": {"prey": 3}}, "init_from", "should be a path,"),
        ({"policies": {"prey": "{first}"}}, "init_from.policies.prey", "PPO has no policies that play against others"),
    ],
)
def test_weights_that_do_not_exist_are_refused(first, tmp_path, setting, key, said):
    def put(x: Any) -> Any:
        if isinstance(x, dict):
            return {name: put(part) for name, part in x.items()}
        return x.replace("{first}", str(first)) if isinstance(x, str) else x

    given = put(setting)
    with pytest.raises(ConfigError, match=said) as error:
        rlplug.train(folder=tmp_path / "run", **SMALL | {"init_from": given})
    assert error.value.key == key
    assert not (tmp_path / "run").exists()


def test_weights_of_other_sizes_are_refused(first, tmp_path):
    said = r"^init_from: net\.torso\S* has the shape \[\d+, 4\] in .*, and \[8, 4\] in this run"
    with pytest.raises(ConfigError, match=said):
        rlplug.train(folder=tmp_path / "run", init_from=str(first), model={"hidden": [8, 64]}, **SMALL)


# ---- evaluation and the machine --------------------------------------------------------------------------------------


def test_evaluations_have_their_own_environment_and_mode(first, tmp_path):
    limit = {"eval.episodes": 3, "eval.env": {"max_episode_steps": 5}}
    shorter = rlplug.train(folder=tmp_path / "a", **SMALL | limit)
    assert shorter.summary["eval/length_mean"] == 5
    assert max(columns(shorter.folder, "episode/length")[0]) > 5
    lengths = []
    for mode in ("greedy", "explore"):
        words = SMALL | {"eval.episodes": 9, "eval.mode": mode}
        lengths.append(rlplug.train(folder=tmp_path / mode, **words).summary["eval/length_mean"])
    assert lengths[0] != lengths[1]


def test_an_evaluation_with_other_spaces_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"^eval\.env: changes the spaces that the policy is trained for"):
        rlplug.train(folder=tmp_path / "run", **SMALL | {"eval.env": {"id": "MountainCar-v0"}})
    with pytest.raises(ConfigError, match=r"^eval\.env\.max_episode_steps: -3 is out of range"):
        rlplug.train(folder=tmp_path / "run", **SMALL | {"eval.env": {"max_episode_steps": -3}})
    with pytest.raises(ConfigError, match=r"^eval\.mode: 'sample' is none of the options"):
        rlplug.train(folder=tmp_path / "run", **SMALL | {"eval.mode": "sample"})
    assert not (tmp_path / "run").exists()


def test_the_load_of_the_machine_is_logged(tmp_path):
    result = rlplug.train(folder=tmp_path / "run", **SMALL | {"log.system": True})
    cpu, ram, own = columns(result.folder, "system/cpu_percent", "system/ram_percent", "system/process_ram_mb")
    assert all(0 <= x <= 100 for x in cpu + ram)
    assert all(x > 50 for x in own)
