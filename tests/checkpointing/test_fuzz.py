"""Damaged run folders by the dozen: nothing wrong is loaded, and nobody sees a traceback."""

import io
import shutil
from contextlib import suppress
from pathlib import Path
from random import Random

import pytest
import torch

from rlplug.checkpointing import format, serialize
from rlplug.checkpointing.serialize import decode
from rlplug.run.callbacks import restore
from tests.checkpointing.runs import fingerprint
from tests.tools import damage, fuzz

CASES = 25


def damaged(run: Path, work: Path, seed: int, cases: int) -> fuzz.Fuzzer:
    before = fingerprint(run)
    fuzzer = fuzz.Fuzzer(run, work, seed)
    good = fingerprint(fuzzer.good)
    for number in range(cases):
        fuzzer.case(number)
    assert fingerprint(run) == before
    assert fingerprint(fuzzer.good) == good, "a case altered what other cases are copied from"
    return fuzzer


def test_some_cases(sac_run: Path, tmp_path: Path):
    fuzzer = damaged(sac_run, tmp_path / "fuzz", seed=0, cases=CASES)
    assert {ended for _, ended in fuzzer.outcomes} >= {"newest", "older", "refused"}
    assert sum(fuzzer.outcomes.values()) >= CASES


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("run", ["sac_run", "ppo_run"])
def test_a_thousand_cases(run: str, seed: int, tmp_path: Path, request: pytest.FixtureRequest):
    fuzzer = damaged(request.getfixturevalue(run), tmp_path / "fuzz", seed, cases=1000)
    kinds = {kind for kind, _ in fuzzer.outcomes}
    assert kinds == {*fuzz.PLAIN, *fuzz.SLY, *fuzz.OWN}, "some damage was never done"


# ---- the fuzzer itself: it sees what is wrong ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def fuzzer(ppo_run: Path, tmp_path_factory: pytest.TempPathFactory) -> fuzz.Fuzzer:
    return fuzz.Fuzzer(ppo_run, tmp_path_factory.mktemp("fuzz") / "fuzz")


def careless(trainer, checkpoint):
    restore(trainer, checkpoint)
    next(trainer.algorithm.parameters()).data.flatten()[0] += 1e-6


FLIPPED, PLANTED = {"bits": damage.PLAIN["file bits flipped"]}, {"code": damage.SLY["pickle with code"]}
SEEN = {  # what is wrong with rlplug, the damage that shows it, and the violation
    "a checksum is not compared": (
        (format, "read_tree", lambda path, record: decode(path.read_bytes())),
        FLIPPED,
        "case ",
    ),
    "a state is not restored": (
        (fuzz, "restore", careless),
        FLIPPED,
        "no checkpoint of the run has|came to another end",
    ),
    "another error": ((format.Checkpoint, "verify", lambda self, trees: 1 / 0), FLIPPED, "ZeroDivisionError"),
    "code runs": (
        (serialize, "decode", lambda data: torch.load(io.BytesIO(data), weights_only=False)),
        PLANTED,
        "case ",
    ),
}


@pytest.mark.parametrize("what", SEEN)
def test_a_violation_is_seen(what: str, fuzzer: fuzz.Fuzzer, monkeypatch: pytest.MonkeyPatch):
    (where, name, wrong), kinds, said = SEEN[what]
    monkeypatch.setattr(where, name, wrong)
    for family in ("PLAIN", "SLY", "OWN"):
        monkeypatch.setattr(fuzz, family, kinds)
    with pytest.raises(fuzz.ViolationError, match=said):
        [fuzzer.case(number) for number in range(50)]
    marker = fuzzer.work / "marker"
    assert marker.exists() == (what == "code runs")
    shutil.rmtree(marker, ignore_errors=True)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert fuzz.main([str(tmp_path), "3"]) == 2
    assert capsys.readouterr().err == f"fuzz: {tmp_path} contains no run\n"


def test_a_case_is_the_same_each_time(ppo_run: Path, tmp_path: Path):
    scenes = [
        damage.Scene(damage.copied(ppo_run, tmp_path / name), ppo_run, tmp_path / "x", Random("3 7")) for name in "ab"
    ]
    for kind in (*fuzz.PLAIN.values(), fuzz.SLY["manifest forged"], fuzz.SLY["pickle with code"]):
        for scene in scenes:
            with suppress(LookupError, OSError):
                kind(scene)
    assert fingerprint(scenes[0].run) == fingerprint(scenes[1].run) != fingerprint(ppo_run)
