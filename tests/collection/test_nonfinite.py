"""Numbers that are NaN or infinite end a run, or cost it one gradient step; never more, and never silently."""

import csv
import itertools
import json
import re
from typing import Literal

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

from rlplug.api import Losses, Optim, Trainable
from rlplug.collection.nonfinite import check_segment
from rlplug.config import compose
from rlplug.distributed.fabric import one_rank
from rlplug.run.build import build
from rlplug.run.launch import train
from rlplug.settings import NonNegativeInt, PositiveFloat, option, settings
from rlplug.testing.checks.algorithms import interpreted
from rlplug.testing.rank_pool import ranks
from rlplug.trainer.metrics import Means
from rlplug.trainer.steps import MOST_UNREAD
from rlplug.types import RunError
from tests.contract import toys
from tests.contract.worlds import gradients
from tests.installing import installed, manifest
from tests.trainer.test_learner import NoisyActor, flat_batch, learner_of

FLAWS = {
    "undefined": "the loss term 'baseline' is NaN",
    "unbounded": "the loss term 'baseline' is infinite",
    "gradient": "the gradient of part 'baseline' is infinite",
    "brittle": "the loss term 'baseline' is NaN",
}


class Flawed(toys.Sound):
    """Its gradient step of one update goes wrong, or is never tried."""

    @settings
    class Config:
        lr: PositiveFloat = option("Step size.")
        flaw: Literal["undefined", "unbounded", "gradient", "brittle", "absent"] = option("What goes wrong.")
        at: NonNegativeInt = option("In which update.")

    def update(self, batch, learner):
        if learner.progress.updates + 1 != self.cfg.at:
            return learner.minimize(batch, self)
        if self.cfg.flaw == "absent":
            return Losses({})
        if self.cfg.flaw == "gradient":
            return learner.minimize(batch | {"root": torch.ones_like(batch["reward"])}, self)
        poison = torch.full_like(batch["reward"], torch.inf if self.cfg.flaw == "unbounded" else torch.nan)
        losses = learner.minimize(batch | {"poison": poison}, self)
        return learner.minimize(batch, self) if self.cfg.flaw == "brittle" else losses

    def forward(self, batch, parts):
        if self.cfg.flaw == "brittle" and self.baseline.bias.isnan():
            raise ValueError("found invalid values")  # as torch.distributions does
        losses = super().forward(batch, parts)
        losses.metrics["size"] = self.baseline.weight.detach().norm()
        if "poison" in batch:
            losses.terms["baseline"] = losses.terms["baseline"] + batch["poison"]
        if "root" in batch:  # sqrt(0) is 0, its derivative is not
            bias = self.baseline.bias
            losses.terms["baseline"] = losses.terms["baseline"] + (bias - bias.detach()).sqrt() * batch["root"]
        return losses


YAML = toys.YAML.format(name="flawed") + "  flaw: undefined\n  at: 5\n"
FILES = {
    "rlplug_flawed/__init__.py": manifest(("algo", "flawed", f"{__name__}:Flawed"), conf="rlplug_flawed.conf"),
    "rlplug_flawed/conf/algo/flawed.yaml": YAML,
}


package = installed("rlplug-flawed", "rlplug_flawed", FILES, autouse=False)


@pytest.fixture
def flawed(package):
    return ["algo=flawed", "total_steps=160", "eval.every=0", "eval.episodes=1", "log.every=40", "logger.only=[]"]


def rows(folder):
    with (folder / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


def run(trainer):
    """To the end, without what is said about it."""
    trainer.loop.run(trainer)
    trainer.reports.finish(trainer)


# ---- a run -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flaw", FLAWS)
def test_a_run_stops_and_names_the_term_and_the_step(flawed, tmp_path, flaw):
    trainer = build(compose([*flawed, f"algo.flaw={flaw}"]), tmp_path)
    with pytest.raises(RunError) as stopped:
        run(trainer)
    steps = trainer.progress.env_steps
    assert str(stopped.value) == f"Flawed: {FLAWS[flaw]} at update 5, environment step {steps}"
    assert 64 < steps <= 80, "nothing is collected with weights that went wrong"


def test_the_last_update_is_looked_at_too(flawed, tmp_path):
    sound = build(compose([*flawed, "algo.at=0"]), tmp_path)
    run(sound)
    last = sound.progress.updates
    with pytest.raises(RunError, match=f"is NaN at update {last}, environment step"):
        run(build(compose([*flawed, f"algo.at={last}"]), tmp_path))


def test_no_checkpoint_holds_weights_that_went_wrong(flawed, tmp_path):
    from rlplug.checkpointing.format import checkpoints, find

    folder = tmp_path / "run"
    with pytest.raises(RunError, match="is NaN at update 5, environment step") as stopped:
        train(compose([*flawed, "checkpoint.every=8"]), folder)
    last = find(folder)
    assert f"; the last good checkpoint is {last.path}" in str(stopped.value)
    assert 1 <= last.manifest["updates"] <= 4  # while one is being written, the next one waits
    for path in checkpoints(folder):
        assert all(leaf.isfinite().all() for leaf in find(path).tree("weights")["algorithm"].values())


@pytest.mark.parametrize("flaw", ["undefined", "unbounded", "gradient"])
def test_a_skipped_step_never_happened(flawed, tmp_path, flaw):
    words = (["on_nan=skip", f"algo.flaw={flaw}"], ["algo.flaw=absent"])
    skips, never = (build(compose([*flawed, *more]), tmp_path) for more in words)
    run(skips)
    run(never)
    assert skips.progress.updates == never.progress.updates > 5
    assert skips.algorithm.steps == never.algorithm.steps == skips.progress.updates - 1
    for name, value in never.algorithm.state_dict().items():
        assert torch.equal(skips.algorithm.state_dict()[name], value)
    assert skips.reports.evaluation.latest == never.reports.evaluation.latest


def test_skipped_steps_are_counted_and_leave_the_means_alone(flawed, tmp_path):
    train(compose([*flawed, "on_nan=skip"]), tmp_path / "skip")
    train(compose([*flawed, "algo.flaw=absent"]), tmp_path / "never")
    skip, never = (rows(tmp_path / name) for name in ("skip", "never"))
    counted = [row["train/skipped"] for row in skip if row["time/wall_s"]]
    assert sorted(counted)[-2:] == ["0", "1"]
    assert counted.count("1") == 1
    assert "train/skipped" not in never[0]
    assert [row["train/baseline"] for row in skip] == [row["train/baseline"] for row in never]
    size = {row["step"]: float(row["train/size"]) for row in skip if row["train/size"]}
    assert all(np.isfinite(value) for value in size.values())


def test_ppo_reads_the_kl_of_skipped_steps(tmp_path):
    options = ["algo.kl_stop=0.5", "algo.kl_coeff=0.2", "algo.sgd_minibatch_size=16", "logger.only=[]", "on_nan=skip"]
    small = ["tuned=none", "num_envs=2", "rollout_fragment_length=32"]
    trainer = build(compose(["algo=ppo", "env=cartpole", *small, *options]), tmp_path)
    trainer.collect()
    batch, _ = trainer.learner.sample()
    batch["obs"][3, 1] = torch.nan
    before = {name: value.clone() for name, value in trainer.algorithm.state_dict().items()}
    trainer.update(batch)
    after = trainer.algorithm.state_dict()
    assert trainer.learner.steps.skipped > 0
    assert all(value.isfinite().all() for value in after.values())
    assert not torch.equal(before["net.value.weight"], after["net.value.weight"]), "other minibatches were learned from"
    assert all(np.isfinite(value) for value in trainer.means.drain().values())


# ---- the learner -------------------------------------------------------------------------------------------------


class Feeding(NoisyActor):
    """Feeds back priorities, and counts its steps."""

    steps = 0

    def forward(self, batch, parts):
        losses = super().forward(batch, parts)
        return Losses(losses.terms, losses.metrics, {"priority": batch["returns"]})

    def after_step(self, parts, losses, learner):
        self.steps += 1


def poisoned(fabric, on_nan, microbatches=1, compile="off"):
    """A sound step, one of which a single row of the first rank is NaN, a sound one: what came of it."""
    batch, bad = flat_batch(), flat_batch()
    bad["returns"][3] = torch.nan
    who = Feeding()
    learner = learner_of(who, fabric, microbatches=microbatches, compile=compile, on_nan=on_nan)
    returned = []
    for x in (batch, bad, batch):
        share = {k: v.chunk(fabric.world_size)[fabric.global_rank] for k, v in x.items()}
        returned.append(learner.minimize(share, who))
        learner.progress.updates += 1
        learner.progress.env_steps += 10
    assert (compile == "max") == learner.steps.compiler.active
    message = ""
    try:
        learner.check_finite()
    except RunError as error:
        message = str(error)
    seen = [sorted(losses.feedback) for losses in returned], float(returned[1].terms["critic"])
    return message, learner.steps.skipped, who.steps, seen, who.state_dict()


HOW = {
    "whole": lambda on_nan: [poisoned(one_rank(), on_nan)],
    "microbatches": lambda on_nan: [poisoned(one_rank(), on_nan, 4)],
    "compiled": lambda on_nan: [interpreted()(poisoned)(one_rank(), on_nan, 1, "max")],
    "ranks": lambda on_nan: ranks(2)(poisoned, on_nan),
}


@pytest.mark.parametrize("how", HOW)
def test_every_rank_stops_with_the_same_words_and_skips_the_same_step(how):
    for message, skipped, steps, *_ in HOW[how]("stop"):
        assert message == "Feeding: the loss term 'critic' is NaN at update 2, environment step 10"
        assert (skipped, steps) == (0, 3)
    learner = learner_of(Feeding())
    for _ in range(2):
        learner.minimize(flat_batch(), learner.algorithm)
    for message, skipped, steps, (feedback, critic), weights in HOW[how]("skip"):
        assert message == ""
        assert (skipped, steps) == (1, 2)
        assert feedback == [["priority"], [], ["priority"]], "a priority of NaN would stay in the buffer"
        assert np.isnan(critic)
        for name, value in learner.algorithm.state_dict().items():
            torch.testing.assert_close(weights[name], value, rtol=1e-5, atol=1e-6)


class Clipped(Trainable):
    """An infinite gradient, which clipping by value would hide."""

    def __init__(self, by):
        super().__init__()
        self.by, self.x = by, torch.nn.Parameter(torch.zeros(3))

    def optimizers(self):
        limit = None if self.by == "off" else 1.0
        return {"x": Optim(torch.optim.SGD([self.x], 0.1), limit, "value" if limit is None else self.by)}

    def forward(self, batch, parts):
        return Losses({"root": self.x.sqrt()[:1]})


@pytest.mark.parametrize("by", ["off", "value", "norm", "global_norm"])
@pytest.mark.parametrize("how", ["minimize", "apply"])
def test_gradients_are_looked_at_before_they_are_clipped(by, how):
    def step(on_nan):
        who = Clipped(by)
        learner = learner_of(who, on_nan=on_nan)
        if how == "minimize":
            learner.minimize({}, who)
        else:
            learner.apply(gradients(learner, {}, who), who)
        return learner, who

    learner, _ = step("stop")
    for _ in range(2):  # these weights stay lost, however often it is asked
        with pytest.raises(RunError, match=r"^Clipped: the gradient of part 'x' is (NaN|infinite) at update 1, "):
            learner.check_finite()
    learner, who = step("skip")
    learner.check_finite()
    assert learner.steps.skipped == 1
    assert not who.x.any()


def test_where_nobody_asks_the_learner_does():
    who = Feeding()
    learner, sound = learner_of(who), flat_batch()
    for _ in range(MOST_UNREAD + 5):
        learner.apply({}, who)
    learner.minimize(sound | {"returns": sound["returns"] * torch.nan}, who)
    with pytest.raises(RunError, match="the loss term 'critic' is NaN at update 1"):
        [learner.apply({}, who) for _ in range(MOST_UNREAD)]


def test_means_leave_out_what_is_not_finite_only_when_told():
    means = Means()
    means.add({"a": torch.tensor(1.0), "b": torch.tensor(2.0)})
    means.add({"a": torch.tensor(torch.nan), "b": torch.tensor(4.0)}, finite=True)
    assert means.drain() == {"a": 1.0, "b": 3.0}
    for finite, drained in ((True, {}), (False, {"a": torch.inf})):
        means.add({"a": torch.tensor(torch.inf)}, finite=finite)
        assert means.drain() == drained
    means.load({"age": torch.zeros(2, device="meta")})  # of an accelerator; numbers of the host follow
    means.add({"age": torch.tensor(1.0)})
    assert means.state()["age"].shape == (3,)


# ---- environments ------------------------------------------------------------------------------------------------


class Faulty(gymnasium.Env):
    """One of its copies returns a number that is none, at one step of its own."""

    made = itertools.count()

    def __init__(self, what, number, at, pixels=False, discrete=True):
        vector = spaces.Box(-np.inf, np.inf, (3,), np.float32)
        self.pixels = {"pixels": spaces.Box(0, 255, (2,), np.uint8)} if pixels else {}
        self.observation_space = spaces.Dict({"speed": vector, **self.pixels}) if pixels else vector
        self.action_space = spaces.Discrete(2) if discrete else spaces.Box(-1, 1, (1,), np.float32)
        self.what, self.at, self.t = what, at, 0
        self.faulty = next(Faulty.made) == number

    def _obs(self, fault):
        speed = self.np_random.random(3, np.float32)
        speed[1] = fault or speed[1]
        return {"speed": speed, **{k: v.sample() for k, v in self.pixels.items()}} if self.pixels else speed

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self._obs(np.nan if self.what == "reset" and self.faulty and self.t else None), {}

    def step(self, action):
        self.t += 1
        now = self.faulty and self.t == self.at
        obs = self._obs({"undefined": np.nan, "unbounded": -np.inf}.get(self.what) if now else None)
        reward = np.inf if self.what == "reward" and now else 1.0
        return obs, reward, self.what in ("end", "reset") and now, False, {}


gymnasium.register("NotFinite-v0", Faulty)

QUIET = ["logger.only=[]", "eval.every=0", "eval.episodes=1", "env.max_episode_steps=100"]
FAULTS = {
    "undefined": "obs{part} of environment 1 is NaN at environment step 22",
    "unbounded": "obs{part} of environment 1 is infinite at environment step 22",
    "reward": "reward of environment 1 is infinite at environment step 22",
    # the first observation of an episode comes with the step that environment 0 makes meanwhile
    "reset": "obs{part} of environment 1 is NaN at environment step 23",
}


@pytest.mark.parametrize("pixels", [False, True])
@pytest.mark.parametrize("what", FAULTS)
def test_an_environment_that_goes_wrong_ends_the_run(tmp_path, monkeypatch, what, pixels):
    """In the second of its fragments; copy 0 of it tells the spaces, 1 and 2 are the run's environments 0 and 1."""
    monkeypatch.setattr(Faulty, "made", itertools.count())
    part = ".speed" if pixels else ""
    env = ["env=gymnasium", "env.id=NotFinite-v0", f"+env.kwargs={{what:{what},number:2,at:11,pixels:{pixels}}}"]
    small = ["algo=ppo", "num_envs=2", "rollout_fragment_length=8", "algo.sgd_minibatch_size=16"]
    trainer = build(compose([*env, *small, "on_nan=skip", "total_steps=64", *QUIET]), tmp_path)
    with pytest.raises(RunError) as stopped:
        run(trainer)
    assert str(stopped.value) == FAULTS[what].format(part=part)
    assert trainer.progress.env_steps == 16
    assert trainer.progress.updates == 1


@pytest.mark.parametrize("what", ["undefined", "reward", "brittle"])
def test_an_evaluation_that_goes_wrong_says_so(tmp_path, monkeypatch, what):
    """The third copy of the environment is the one that plays it; a brittle policy stumbles over what it observed."""
    monkeypatch.setattr(Faulty, "made", itertools.count())
    kind = "undefined" if what == "brittle" else what
    env = ["env=gymnasium", "env.id=NotFinite-v0", f"+env.kwargs={{what:{kind},number:2,at:11}}"]
    trainer = build(compose([*env, "num_envs=1", "algo.sgd_minibatch_size=128", *QUIET]), tmp_path)
    act = trainer.algorithm.act

    def brittle(step, carry, mode):
        if what == "brittle" and step["obs"].isnan().any():
            raise ValueError("found invalid values")  # as torch.distributions does
        return act(step, carry, mode)

    monkeypatch.setattr(trainer.algorithm, "act", brittle)
    said = (
        r"^reward of .* is infinite at .* 11$|^reward of .* 10$" if what == "reward" else r"^obs of .* is NaN at .* 11$"
    )
    with pytest.raises(RunError, match=said):
        trainer.reports.evaluation.run(trainer)


def test_a_replay_never_stores_what_went_wrong(tmp_path, monkeypatch):
    monkeypatch.setattr(Faulty, "made", itertools.count())
    env = ["env=gymnasium", "env.id=NotFinite-v0", "+env.kwargs={what:undefined,number:1,at:30,discrete:false}"]
    small = ["algo=sac", "model.hidden=[8]", "num_steps_sampled_before_learning_starts=20"]
    trainer = build(compose([*env, *small, "total_steps=64", *QUIET]), tmp_path)
    with pytest.raises(RunError, match=r"^obs of environment 0 is NaN at environment step 30$"):
        run(trainer)
    assert trainer.progress.env_steps == 29
    assert all(trainer.buffer.sample()["obs"].isfinite().all() for _ in range(10))


def test_what_is_not_used_may_be_anything():
    segment = {
        "obs": {"speed": torch.zeros(3, 2, 4), "pixels": torch.zeros(3, 2, 4, dtype=torch.uint8)},
        "reward": torch.tensor([[1.0, 1e30], [1.0, torch.nan], [torch.inf, torch.nan]]),
        "valid": torch.tensor([[True, True], [True, False], [False, False]]),
    }
    check_segment(segment, 0, range(2))  # rewards of final observations and of the open row
    segment["reward"][0, 0] = -torch.inf
    with pytest.raises(RunError, match=r"^reward of environment 6 is infinite at environment step 102$"):
        check_segment(segment, 100, [6, 7])
    segment["obs"]["speed"][2, 1, 3] = torch.nan
    with pytest.raises(RunError, match=r"^reward"):  # which came first
        check_segment(segment, 100, [6, 7])
    segment["obs"]["speed"][1, 1, 3] = torch.nan  # a final observation, from which returns are bootstrapped
    with pytest.raises(RunError, match=r"^obs\.speed of environment 7 is NaN at environment step 102$"):
        check_segment(segment, 100, [6, 7])


# ---- numbers beyond their bounds ---------------------------------------------------------------------------------

BEYOND = ["env=cartpole", "env.id=rlplug.testing.worlds:FaultyCartPole-v0", "+env.kwargs.beyond=0.05", "num_envs=4"]
TOLD = (
    r"rlplug: environment \d at environment step \d+: observation holds 4\.85 at \[0\], beyond the bounds of its"
    r" space, -4\.8 to 4\.8; the run continues and reports this once \(env\.check_bounds=false: never\)"
)


def words_beyond(*more):
    small = ["rollout_fragment_length=16", "algo.sgd_minibatch_size=32", "model.hidden=[8]", "env.vectorization=list"]
    return [*BEYOND, *small, "total_steps=512", "eval.every=128", "eval.episodes=2", "logger.only=[]", *more]


@pytest.mark.parametrize(
    ("word", "times"),
    [
        ("env.check_bounds=true", 1),
        ("env.check_bounds=false", 0),
        pytest.param("hardware=2cpu", 1, marks=pytest.mark.slow),
    ],
)
def test_an_observation_out_of_bounds_is_told_once_and_the_run_goes_on(word, times, tmp_path, capfd):
    train(compose(words_beyond("algo=ppo", "hardware=cpu", word)), tmp_path / "run")
    said = capfd.readouterr().err
    assert (said.count("beyond the bounds"), bool(re.search(TOLD, said))) == (times, bool(times))
    assert json.loads((tmp_path / "run/summary.json").read_text())["status"] == "finished"
