"""``rlplug profile``: where the time of a run goes."""

import ast
import json
import re
from pathlib import Path
from types import SimpleNamespace

import gymnasium
import pytest
import torch
from gymnasium.envs.classic_control import CartPoleEnv

from rlplug.cli import main
from rlplug.cli.profile import CALLED, COLLECT, LEARN, OWN, PACKAGE, REPORTS, Profile, bottleneck

PPO = ["env=cartpole", "tuned=none", "model.hidden=[8]", "hardware=cpu", "algo.sgd_minibatch_size=32"]
PPO += ["rollout_fragment_length=16", "algo.num_sgd_iter=2", "total_steps=1_000_000", "compile=off"]


def shares(printed: str) -> dict[str, float]:
    return {name: float(share) for name, share in re.findall(r"^( *\S.*?)  +([\d.]+)%  +[\d,.]+$", printed, re.M)}


def left() -> list[str]:
    return [path.name for path in Path().rglob("*")]


class Ponderous(CartPoleEnv):
    """Its steps take long enough to be most of any run; by computing, as a sleeper would be seen as well."""

    def step(self, action):
        sum(range(60_000))
        return super().step(action)


def test_a_table_the_bottleneck_and_a_page_of_every_call(capsys: pytest.CaptureFixture[str]):
    assert main(["profile", "--seconds", "1", *PPO]) == 0
    out, err = capsys.readouterr()
    seen = shares(out)
    outer = {name for name in seen if not name.startswith(" ")}
    assert outer == {"collecting", "learning", "between rounds"}
    assert sum(seen[name] for name in outer) == pytest.approx(100, abs=0.3)
    assert sum(share for name, share in seen.items() if name.startswith(" ")) <= 100.5
    assert {"  acting", "  environments", "  forward", "  backward", "  clipping and optimizer"} < seen.keys()
    assert all(seen[name] > 1 for name in ("  acting", "  environments", "  forward", "  backward"))
    assert re.search(r"^[\d,]+ environment steps and [\d,.]+ updates a second$", out, re.M)
    assert re.search(r"^bottleneck: .+ takes \d+% of the time", out, re.M)
    assert "profiling for 1 s" in err
    assert left() == ["profile.html"]
    assert "NextStepCollector" in Path("profile.html").read_text(encoding="utf-8")


def test_as_json(capsys: pytest.CaptureFixture[str]):
    assert main(["profile", "--seconds=0.2", "--json", *PPO]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found["shares"]) == {"collecting", "learning", "between rounds"}
    assert sum(share for parts in found["shares"].values() for share in parts.values()) == pytest.approx(1.0)
    assert not found["bottleneck"].startswith("bottleneck")
    assert found["env_steps_per_s"] > 0 < found["updates_per_s"]
    assert found["page"] == "profile.html"


def test_slow_environments_are_named_as_the_bottleneck(capsys: pytest.CaptureFixture[str]):
    gymnasium.register("Ponderous-v0", Ponderous)
    try:
        words = [word for word in PPO if word != "env=cartpole"] + ["env=gymnasium", "env.id=Ponderous-v0"]
        assert main(["profile", "--seconds=1", "--html=here.html", *words]) == 0
    finally:
        del gymnasium.registry["Ponderous-v0"]
    out = capsys.readouterr().out
    assert shares(out)["  environments"] > 60
    assert re.search(r"^bottleneck: environments take \d+% of the time: .*hardware.actors.count", out, re.M)
    assert left() == ["here.html"]


def test_evaluations_are_told_apart_from_collecting(capsys: pytest.CaptureFixture[str]):
    assert main(["profile", "--seconds=1", *PPO, "eval.every=64", "eval.episodes=20"]) == 0
    out = capsys.readouterr().out
    assert shares(out)[f"  {REPORTS}"] > 50
    assert re.search(rf"^bottleneck: \d+% of the time passes between rounds: {REPORTS}$", out, re.M)


def test_the_bottleneck_is_the_larger_sum():
    parts = {"environments": 25.0, "acting": 24.0, "the rest": 22.0}
    seconds = {(COLLECT, name): spent for name, spent in parts.items()} | {(LEARN, "forward"): 29.0}
    run = SimpleNamespace(config=SimpleNamespace(num_envs=1))
    assert bottleneck(Profile(seconds, 1.0, 1.0), run).startswith("bottleneck: environments take 25% of the time")


SAC = ["algo=sac", "env=pendulum", "model.hidden=[8]", "rollout_fragment_length=200"]
PARTS = {  # of runs, a part of which something is measured, and what is said of the bottleneck
    "a burst of updates and the steps before it": (
        [*SAC, "num_steps_sampled_before_learning_starts=250"],
        {"collecting": 1},
        "",
    ),
    "off-policy learning": (
        ["algo=dqn", "env=cartpole", "num_steps_sampled_before_learning_starts=200", "replay_ratio=4"],
        {"  sampling": 0, "  targets": 0, "  forward": 0},
        r"^bottleneck: learning takes \d+% .*replay_ratio",
    ),
    "gradients that are computed where they are collected": (
        ["algo=a3c", "env=cartpole"],
        {"  priorities and gradients of segments": 10},
        "",
    ),
}


@pytest.mark.parametrize(("words", "parts", "said"), PARTS.values(), ids=PARTS)
def test_what_is_measured(words: list[str], parts: dict[str, float], said: str, capsys: pytest.CaptureFixture[str]):
    assert main(["profile", "--seconds=1", "hardware=cpu", *words]) == 0
    out = capsys.readouterr().out
    assert all(shares(out)[part] > least for part, least in parts.items())
    assert re.search(said, out, re.M)


@pytest.mark.parametrize(
    ("unit", "width", "dtype", "told"),
    [(True, 256, None, True), (False, 256, None, False), (True, 128, None, False), (True, 256, torch.bfloat16, False)],
)
def test_where_the_processor_multiplies_bfloat16_a_run_of_wide_layers_is_told_so(
    monkeypatch: pytest.MonkeyPatch, unit: bool, width: int, dtype: torch.dtype | None, told: bool
):
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: unit)
    learner = SimpleNamespace(steps=SimpleNamespace(dtype=dtype), algorithm=torch.nn.Linear(width, width))
    config = SimpleNamespace(compile="max", replay_ratio=None)
    run = SimpleNamespace(learner=learner, config=config, ctx=SimpleNamespace(device=torch.device("cpu")))
    said = bottleneck(Profile({(LEARN, "forward"): 1.0}, 1.0, 1.0), run)
    assert ("hardware.precision=bf16-mixed" in said) == told


@pytest.mark.slow
def test_with_actors_the_learner_waits_for_them(capsys: pytest.CaptureFixture[str]):
    actors = ["hardware.actors.count=2", "hardware.actors.num_cpus=0.5"]
    assert main(["profile", "--seconds=3", *actors, *PPO]) == 0
    assert shares(capsys.readouterr().out)["  waiting for actors"] > 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--seconds=0"], "--seconds 0: should be finite and greater than 0"),
        (["--seconds=soon"], "argument --seconds: invalid float value: 'soon'; see rlplug profile --help"),
        (["--html=nowhere/page.html"], "--html nowhere/page.html: cannot be written"),
        (["--fast"], "unrecognized arguments: --fast; see rlplug profile --help"),
        (["hardware=2cpu"], "profile supports one learner process"),
        (["algo.clip=1"], "algo.clip"),
    ],
)
def test_what_cannot_be_profiled_is_one_line(words: list[str], said: str, capsys: pytest.CaptureFixture[str]):
    assert main(["profile", *PPO, *words]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert "Traceback" not in error
    assert not left()


def test_a_run_that_ends_too_soon_says_so(capsys: pytest.CaptureFixture[str]):
    assert main(["profile", *PPO[:-1], "total_steps=256"]) == 1
    assert "the run ended before profiling began; raise total_steps" in capsys.readouterr().err
    assert not left()


def test_the_functions_by_which_parts_are_told_are_there():
    found = {
        (str(path.relative_to(PACKAGE)), node.name)
        for path in Path(PACKAGE).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef)
    }
    assert OWN.keys() <= found
    assert {caller for caller, _ in CALLED} <= {name for _, name in found}
