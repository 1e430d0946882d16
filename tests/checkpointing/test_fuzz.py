"""Damaged run folders by the dozen: nothing wrong is loaded, and nobody sees a traceback."""

from __future__ import annotations

import io
import shutil
from pathlib import Path
from random import Random

import pytest
import torch

from rlplug.checkpointing import format, serialize
from rlplug.checkpointing.serialize import decode
from rlplug.run.callbacks import restore
from tests.checkpointing.runs import fingerprint
from tests.tools import fuzz

CASES = 40


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


def cases(fuzzer: fuzz.Fuzzer, number: int = 30) -> None:
    for case in range(number):
        fuzzer.case(case)


def test_a_checksum_that_is_not_compared_is_seen(fuzzer: fuzz.Fuzzer, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(format, "read_tree", lambda path, record: decode(path.read_bytes()))
    with pytest.raises(fuzz.ViolationError, match="case "):
        cases(fuzzer, 200)


def test_a_state_that_is_not_restored_is_seen(fuzzer: fuzz.Fuzzer, monkeypatch: pytest.MonkeyPatch):
    def careless(trainer, checkpoint):
        restore(trainer, checkpoint)
        next(trainer.algorithm.parameters()).data.flatten()[0] += 1e-6

    monkeypatch.setattr(fuzz, "restore", careless)
    with pytest.raises(
        fuzz.ViolationError, match=r"a state was loaded that no checkpoint of the run has|came to another end"
    ):
        cases(fuzzer)


def test_another_error_is_seen(fuzzer: fuzz.Fuzzer, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(format.Checkpoint, "verify", lambda self, trees: 1 / 0)
    with pytest.raises(fuzz.ViolationError, match="ZeroDivisionError"):
        cases(fuzzer)


def test_code_that_runs_is_seen(fuzzer: fuzz.Fuzzer, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(serialize, "decode", lambda data: torch.load(io.BytesIO(data), weights_only=False))
    monkeypatch.setattr(fuzz, "PLAIN", {"pickle with code": fuzz.SLY["pickle with code"]})
    monkeypatch.setattr(fuzz, "SLY", fuzz.PLAIN)
    monkeypatch.setattr(fuzz, "OWN", fuzz.PLAIN)
    try:
        with pytest.raises(fuzz.ViolationError):
            cases(fuzzer)
        assert (fuzzer.work / "marker").exists()
    finally:
        shutil.rmtree(fuzzer.work / "marker", ignore_errors=True)


def test_a_case_is_the_same_each_time(sac_run: Path, tmp_path: Path):
    def scene(name: str) -> fuzz.Scene:
        run = fuzz.copied(sac_run, tmp_path / name)
        return fuzz.Scene(run, sac_run, tmp_path / "marker", Random("3 7"))

    one, two = scene("one"), scene("two")
    for kind in (*fuzz.PLAIN.values(), fuzz.SLY["manifest forged"], fuzz.SLY["pickle with code"]):
        for which in (one, two):
            try:
                kind(which)
            except (LookupError, OSError):
                continue
    assert fingerprint(one.run) == fingerprint(two.run) != fingerprint(sac_run)


def test_the_command(sac_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert fuzz.main([str(sac_run), "--cases", "3", "--seed", "5"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "3 cases, 0 violations"
    assert fuzz.main([str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"fuzz: {tmp_path} contains no run\n"
