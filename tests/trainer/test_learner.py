"""The learner without a wrapper: one rank equals two ranks equals four microbatches."""

from dataclasses import replace
from itertools import chain

import pytest
import torch
from torch import nn
from torch.func import functional_call

from rlplug.api import Algorithm, Context, Losses, Optim, Trainable
from rlplug.distributed.collectives import Collectives
from rlplug.distributed.fabric import AnyFabric, one_rank
from rlplug.testing.checks.runs import again
from rlplug.testing.context import context
from rlplug.testing.rank_pool import ranks
from rlplug.trainer.learner import RankLearner
from rlplug.trainer.placement import Placement
from rlplug.types import Compile, ConfigError
from tests.contract.worlds import gradients

B, T = 8, 5


class NoisyActor(Trainable):
    """A masked actor-critic loss with reparameterised noise: two parts in one graph."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.actor, self.critic = nn.Linear(3, 2), nn.Linear(5, 1)

    def optimizers(self):
        return {
            "actor": Optim(torch.optim.Adam(self.actor.parameters(), 1e-2), grad_clip=0.1),
            "critic": Optim(torch.optim.Adam(self.critic.parameters(), 1e-2), grad_clip=0.1, grad_clip_by="norm"),
        }

    def forward(self, batch, parts):
        action = torch.tanh(self.actor(batch["obs"]) + batch["noise"])
        still = {k: p.detach() for k, p in self.critic.named_parameters()}
        q = functional_call(self.critic, still, (torch.cat([batch["obs"], action], -1),)).squeeze(-1)
        error = self.critic(torch.cat([batch["obs"], batch["action"]], -1)).squeeze(-1) - batch["returns"]
        everything = {"actor": -q, "critic": error.square(), "decay": 1e-2 * self.actor.weight.square().sum()}
        chosen = {k: v for k, v in everything.items() if k in parts or (k == "decay" and "actor" in parts)}
        return Losses(chosen, {"error": error.abs().detach(), "weight": self.actor.weight.detach().norm()})


class Recurrent(Trainable):
    """A loss over an LSTM that is unrolled on rows ``[T+1, B]``, the last of which only bootstraps."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.cell, self.head = nn.LSTMCell(3, 4), nn.Linear(4, 1)

    def optimizers(self):
        return {"all": Optim(torch.optim.SGD(self.parameters(), 0.1), grad_clip=0.05, grad_clip_by="value")}

    def forward(self, batch, parts):
        h = c = batch["obs"].new_zeros(batch["obs"].shape[1], 4)
        out = []
        for x, first in zip(batch["obs"], batch["is_first"], strict=True):
            keep = (~first).float().unsqueeze(-1)
            h, c = self.cell(x, (h * keep, c * keep))
            out.append(self.head(h).squeeze(-1))
        value = torch.stack(out)
        return Losses({"value": (value[:-1] - value[1:].detach() - batch["reward"][:-1]).square()})


def flat_batch():
    g = torch.Generator().manual_seed(1)
    batch = {"obs": torch.randn(B, 3, generator=g), "noise": torch.randn(B, 2, generator=g)}
    batch |= {"action": torch.randn(B, 2, generator=g), "returns": torch.randn(B, generator=g)}
    return batch | {"valid": torch.tensor([1, 1, 0, 1, 1, 1, 1, 0], dtype=torch.bool)}


def segment():
    g = torch.Generator().manual_seed(2)
    valid = torch.rand(T + 1, B, generator=g) > 0.3
    valid[-1] = False
    first = torch.rand(T + 1, B, generator=g) > 0.7
    batch = {"obs": torch.randn(T + 1, B, 3, generator=g), "reward": torch.randn(T + 1, B, generator=g)}
    return batch | {"valid": valid, "is_first": first}


class Team(Trainable):
    """A loss of every agent, ``[T, B, N]``, and a term beside them."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.value = nn.Linear(3, 1)

    def optimizers(self):
        return {"all": Optim(torch.optim.SGD(self.parameters(), 0.1), grad_clip=0.05)}

    def forward(self, batch, parts):
        error = self.value(batch["obs"]).squeeze(-1)[:-1] - batch["reward"][:-1]
        return Losses({"value": error.square(), "decay": self.value.weight.norm()}, {"error": error.detach().abs()})


class Sparse(Trainable):
    """A loss that reaches one head for rare rows only, another one never, and a third that is frozen."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.value, self.rare, self.unused, self.frozen = (nn.Linear(3, 1) for _ in range(4))
        self.frozen.requires_grad_(False)

    def optimizers(self):
        return {"all": Optim(torch.optim.AdamW(self.parameters(), 0.1, weight_decay=0.5), grad_clip=0.5)}

    def forward(self, batch, parts):
        error = (self.value(batch["obs"]) + self.frozen(batch["obs"])).squeeze(-1) - batch["returns"]
        if batch["is_rare"].any():
            error = error + torch.where(batch["is_rare"], self.rare(batch["obs"]).squeeze(-1), 0.0)
        return Losses({"value": error.square()})


def sparse_batch():
    return flat_batch() | {"is_rare": torch.arange(B) == 1}


def team_segment():
    batch, g = segment(), torch.Generator().manual_seed(3)
    alive = torch.rand(T + 1, B, 2, generator=g) > 0.4
    batch |= {
        key: torch.stack([batch[key], torch.randn(batch[key].shape, generator=g)], 2) for key in ("obs", "reward")
    }
    return batch | {"alive": alive}


CASES = {
    "noisy_actor": (NoisyActor, flat_batch, 0),
    "lstm": (Recurrent, segment, 1),
    "team": (Team, team_segment, 1),
    "sparse": (Sparse, sparse_batch, 0),
}


def learner_of(who, fabric=None, **options):
    ctx = context(rank=fabric.global_rank, world_size=fabric.world_size) if fabric else context()
    return RankLearner(fabric=fabric or one_rank(), ctx=ctx, algorithm=who, buffer=None, **options)  # type: ignore[arg-type]


def three_steps(fabric: AnyFabric, case: str, microbatches: int = 1, scaled: bool = False, compile: Compile = "off"):
    """Weights, losses and gradient norm after three steps on this rank's share of the batch."""
    make, batch_of, axis = CASES[case]
    who, batch = make(), batch_of()
    share = {k: v.chunk(fabric.world_size, axis)[fabric.global_rank] for k, v in batch.items()}
    learner = learner_of(who, fabric, microbatches=microbatches, scale_losses=scaled, compile=compile)
    grads = gradients(learner, share, who)
    for _ in range(3):
        losses = learner.minimize(share, who)
    assert learner.steps.compiler.active == (compile == "max")
    return who.state_dict(), grads, losses.terms, losses.metrics


def close(a, b, atol=1e-6):
    for x, y in zip(a, b, strict=True):
        assert x.keys() == y.keys()
        for key in x:
            torch.testing.assert_close(x[key], y[key], atol=atol, rtol=0, msg=key)


@pytest.mark.parametrize("case", CASES)
def test_four_microbatches_equal_one_batch(case):
    close(three_steps(one_rank(), case), three_steps(one_rank(), case, microbatches=4))


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_equal_one(case):
    alone = three_steps(one_rank(), case)
    for rank in ranks(2)(three_steps, case):
        close(alone, rank)


def test_means_count_valid_rows_only():
    batch = flat_batch()
    learner = learner_of(NoisyActor())
    losses = learner.minimize(batch, learner.algorithm)
    rows = NoisyActor().forward(batch, ("actor", "critic")).terms["critic"]
    torch.testing.assert_close(losses.terms["critic"], rows[batch["valid"]].mean().detach())


@pytest.mark.parametrize("microbatches", [1, 4])
def test_diagnostics_are_computed_where_they_are_asked_for(microbatches: int):
    class Told(NoisyActor):
        calls = 0

        def diagnostics(self) -> dict[str, torch.Tensor]:
            self.calls += 1
            assert not torch.is_grad_enabled()
            return {"seen": torch.tensor(3.0)}

        def forward(self, batch, parts):
            return replace(super().forward(batch, parts), diagnostics=self.diagnostics)

    who = Told()
    learner = learner_of(who, microbatches=microbatches)
    assert "seen" not in learner.minimize(flat_batch(), who, diagnostics=False).metrics
    assert who.calls == 0
    assert learner.minimize(flat_batch(), who).metrics["seen"] == 3.0
    assert who.calls == microbatches


def test_means_count_living_agents_only():
    batch, who = team_segment(), Team()
    learner = learner_of(who)
    losses = learner.minimize(batch, who)
    terms = Team().forward(batch, ("all",)).terms["value"]
    counts = (batch["valid"].unsqueeze(-1) & batch["alive"])[:-1]
    assert 0 < counts.sum() < batch["valid"].sum() * 2
    torch.testing.assert_close(losses.terms["value"], terms[counts].mean().detach())
    junk = batch | {"obs": batch["obs"].masked_fill(~batch["alive"].unsqueeze(-1), torch.nan)}
    again = learner_of(Team())
    torch.testing.assert_close(again.minimize(junk, again.algorithm).terms["value"], losses.terms["value"])


class Mixed(Team):
    """Terms with and without agents."""

    def forward(self, batch, parts):
        losses = super().forward(batch, parts)
        return Losses(losses.terms | {"joint": losses.terms["value"].mean(-1)})


class Wrong(NoisyActor):
    def forward(self, batch, parts):
        row = self.actor(batch["obs"])
        return Losses({"actor": row.sum(-1), "critic": row})


@pytest.mark.parametrize(
    ("make", "batch"),
    [(Mixed, team_segment()), (Wrong, flat_batch()), (Wrong, {k: v for k, v in flat_batch().items() if k != "valid"})],
    ids=["agents", "valid", "every row"],
)
def test_terms_of_other_shapes_are_refused(make, batch):
    with pytest.raises(ConfigError, match=rf"{make.__name__}\.forward returned a term of shape"):
        learner_of(who := make()).minimize(batch, who)


class Delayed(NoisyActor):
    def optimizers(self):
        parts = super().optimizers()
        parts["actor"].every = 2
        return parts

    def after_step(self, parts, losses, learner):
        self.moved = parts


def test_a_part_that_is_not_due_is_neither_computed_nor_moved():
    who = Delayed()
    learner = learner_of(who)
    assert learner.minimize(flat_batch(), who, ["actor"]).terms == {}, "none of the parts is due"
    moved = []
    for _ in range(4):
        before = {k: v.clone() for k, v in who.state_dict().items()}
        losses = learner.minimize(flat_batch(), who)
        moved.append(not torch.equal(before["actor.weight"], who.actor.weight))
        assert ("actor" in losses.terms) == ("actor" in who.moved) == moved[-1]
        assert not torch.equal(before["critic.weight"], who.critic.weight)
    assert moved == [True, False, True, False]


@pytest.mark.parametrize(
    ("by", "expected"), [("value", [0.1, 0.1]), ("norm", [0.1, 0.1]), ("global_norm", [0.06, 0.08])]
)
def test_clipping(by, expected):
    class Two(Trainable):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))

        def optimizers(self):
            return {"all": Optim(torch.optim.SGD([self.a, self.b], lr=1.0), grad_clip=0.1, grad_clip_by=by)}

        def forward(self, batch, parts):
            return Losses({"loss": -(3.0 * self.a.sum() + 4.0 * self.b.sum())})

    who = Two()
    learner_of(who).minimize({}, who)
    torch.testing.assert_close(torch.cat([who.a, who.b]).detach(), torch.tensor(expected), atol=1e-5, rtol=0)


def shares(fabric: AnyFabric):
    """Row minibatches of a segment, as global row numbers."""
    ctx = context(rank=fabric.global_rank, world_size=fabric.world_size, seed=3)
    learner = RankLearner(fabric=fabric, ctx=ctx, algorithm=NoisyActor(), buffer=None)  # type: ignore[arg-type]
    number = torch.arange((T + 1) * B).view(T + 1, B)
    batch = {"valid": segment()["valid"], "number": number}
    batch = {k: v.chunk(fabric.world_size, 1)[fabric.global_rank] for k, v in batch.items()}
    cut = [b["number"].tolist() for _ in range(2) for b in learner.minibatches(batch, 7, "row")]
    x = batch["number"].float()
    return cut, [float(learner.reduce(x, op, batch["valid"])) for op in ("mean", "std", "sum", "max", "min")]


def test_minibatches_and_statistics_are_those_of_one_rank():
    whole, numbers = shares(one_rank())
    both = ranks(2)(shares)
    for i, minibatch in enumerate(whole):
        assert sorted(minibatch) == sorted(both[0][0][i] + both[1][0][i])
    expected = sorted(torch.arange((T + 1) * B).view(T + 1, B)[segment()["valid"]].tolist())
    assert sorted(chain.from_iterable(whole[: len(whole) // 2])) == expected
    for _, theirs in both:
        assert theirs == pytest.approx(numbers)


class Jittered(Algorithm):
    """Draws noise for every row of its sample, of which it then takes minibatches."""

    def __init__(self, ctx: Context) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.ctx, self.value = ctx, nn.Linear(3, 1)

    def optimizers(self):
        return {"all": Optim(torch.optim.Adam(self.parameters(), 0.1))}

    def prepare(self, batch):
        return batch | {"noise": self.ctx.randn(B, T + 1).T}

    def forward(self, batch, parts):
        return Losses({"value": (self.value(batch["obs"]).squeeze(-1) - batch["reward"] - batch["noise"]).square()})

    def update(self, batch, learner):
        for part in learner.minibatches(batch, 6, "row"):
            losses = learner.minimize(part, self)
        return losses


def learned_from_the_whole(fabric: AnyFabric, from_loop: bool):
    """Weights and losses of two updates from rows that every rank has: a replicated rollout, or episodes of jobs."""
    ctx = context(rank=fabric.global_rank, world_size=fabric.world_size, num_envs=B)
    buffer, who = again(segment()), Jittered(ctx)
    placement = Placement(Collectives(fabric), replicated=not from_loop)
    learner = RankLearner(fabric=fabric, ctx=ctx, algorithm=who, buffer=buffer, placement=placement)
    for _ in range(2):
        learner.hold(from_loop)
        losses = learner.update(segment() if from_loop else None)
    return who.state_dict(), losses.terms


@pytest.mark.parametrize("from_loop", [False, True])
def test_noise_of_rows_that_every_rank_has_is_the_same_on_all(from_loop):
    alone = learned_from_the_whole(one_rank(), from_loop)
    for rank in ranks(2)(learned_from_the_whole, from_loop):
        close(alone, rank)


def nothing(fabric: AnyFabric):
    """Statistics where no row of any rank counts."""
    learner = RankLearner(fabric=fabric, ctx=context(), algorithm=NoisyActor(), buffer=None)  # type: ignore[arg-type]
    return [float(learner.reduce(torch.ones(3), op, torch.zeros(3, dtype=torch.bool))) for op in ("mean", "std", "sum")]


def test_statistics_of_nothing_are_numbers():
    """As a round has no valid row in which every column shows a final observation."""
    assert nothing(one_rank()) == [0.0, 0.0, 0.0]
    assert ranks(2)(nothing) == [[0.0, 0.0, 0.0]] * 2


def test_parameter_groups_follow_their_own_schedules():
    """TD-MPC2 trains its encoder with a smaller step size, in one optimizer."""

    class Two(Trainable):
        def __init__(self):
            super().__init__()
            self.a, self.b = torch.nn.Parameter(torch.zeros(1)), torch.nn.Parameter(torch.zeros(1))
            self.sizes = [torch.tensor(0.5), torch.tensor(2.0)]

        def forward(self, batch, parts):
            return Losses({"all": (self.a + self.b).sum()})

        def optimizers(self):
            sgd = torch.optim.SGD([{"params": [p], "lr": 1.0} for p in (self.a, self.b)], lr=1.0)
            return {"all": Optim(sgd, lr=self.sizes)}

    who = Two()
    learner = learner_of(who)
    learner.minimize({}, who)
    who.sizes[1].fill_(4.0)  # a schedule moves on
    state = learner.parts(who)["all"].state()
    learner.parts(who)["all"].load(state)
    learner.minimize({}, who)
    assert [who.a.item(), who.b.item()] == [-1.0, -6.0]
