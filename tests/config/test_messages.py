from typing import Annotated, Any, Literal, get_args

import pytest
from pydantic import Field

from rlplug import ConfigError
from rlplug.config import choose, compose, typed
from rlplug.registry.hookspecs import Kind
from rlplug.settings import NonNegativeInt, PositiveFloat, PositiveInt, Scheduled, UnitFloat, option, settings


@settings
class Every:
    steps: NonNegativeInt = option("Steps between two of them.")


@settings
class Config:
    gamma: UnitFloat = option("Discount factor.")
    lr: Scheduled[PositiveFloat] = option("Step size.")
    alpha: PositiveFloat | Literal["auto"] = option("Temperature.")
    activation: Literal["relu", "tanh"] = option("Nonlinearity.")
    hidden: Annotated[list[PositiveInt], Field(min_length=1, max_length=3)] = option("Sizes of the layers.")
    n_step: int | None = option("Rewards before the bootstrap.")
    every: Every = option("How often.")


SCHEDULE = ", or a schedule such as [[0, 0.001], [100_000, 0]]"
GOOD: dict[str, Any] = {
    "gamma": 0.9,
    "lr": 1e-3,
    "alpha": "auto",
    "activation": "relu",
    "hidden": [64, 64],
    "n_step": None,
    "every": {"steps": 1},
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gamma": 1.5}, "algo.gamma: 1.5 is out of range: should be less than or equal to 1"),
        ({"gamma": "high"}, "algo.gamma: 'high' has the wrong type: should be a valid number"),
        ({"gamma": None}, "algo.gamma: null has the wrong type: should be a valid number"),
        ({"gamma": True}, "algo.gamma: true has the wrong type: should be a number"),
        ({"gamma": float("nan")}, "algo.gamma: nan is out of range: should be a finite number"),
        ({"lr": -1}, "algo.lr: -1 is out of range: should be greater than 0"),
        ({"lr": "fast"}, f"algo.lr: 'fast' has the wrong type: should be a valid number{SCHEDULE}"),
        ({"lr": None}, f"algo.lr: null has the wrong type: should be a valid number{SCHEDULE}"),
        ({"lr": [[0, 1e-3], [5, -1]]}, "algo.lr[1][1]: -1 is out of range: should be greater than 0"),
        ({"lr": [[0, 1e-3], [-5, 1]]}, "algo.lr[1][0]: -5 is out of range: should be greater than or equal to 0"),
        ({"lr": [[0, 1e-3], [5]]}, "algo.lr[1][1]: is missing"),
        ({"lr": [[0, 1e-3], [9, float("inf")]]}, "algo.lr[1][1]: inf is out of range: should be a finite number"),
        ({"lr": "linear"}, f"algo.lr: 'linear' has the wrong type: should be a valid number{SCHEDULE}"),
        ({"alpha": "autoo"}, "algo.alpha: 'autoo' has the wrong type: should be a valid number or 'auto'"),
        ({"activation": "rellu"}, "algo.activation: 'rellu' is none of the options: should be 'relu' or 'tanh'"),
        ({"hidden": 64}, "algo.hidden: 64 has the wrong type: should be a valid list"),
        ({"hidden": [64, 0]}, "algo.hidden[1]: 0 is out of range: should be greater than 0"),
        ({"hidden": []}, "algo.hidden: [] is out of range: should have at least 1 item"),
        ({"hidden": [1] * 4}, "algo.hidden: [1, 1, 1, 1] is out of range: should have at most 3 items"),
        ({"n_step": "3k"}, "algo.n_step: '3k' has the wrong type: should be a valid integer, as in 3_000"),
        ({"n_step": 1e30}, f"algo.n_step: 1e+30 is out of range: should be less than or equal to {2**63 - 1}"),
        ({"hidden": [2**63]}, f"algo.hidden[0]: {2**63} is out of range: should be less than or equal to {2**63 - 1}"),
        ({"n_step": 1.5}, "algo.n_step: 1.5 has the wrong type: should be a valid integer"),
        ({"every": 3}, "algo.every: 3 has the wrong type: should be a mapping"),
        ({"every": {"steps": -1}}, "algo.every.steps: -1 is out of range: should be greater than or equal to 0"),
        (
            {"every": {"steps": 1, "step": 1}},
            "algo.every.step: unknown key; did you mean algo.every.steps? There are: steps",
        ),
        (
            {"gama": 0.9},
            "algo.gama: unknown key; did you mean algo.gamma? "
            "There are: activation, alpha, every, gamma, hidden, lr, n_step",
        ),
        (
            {"gamma": 1.5, "lr": -1, "hidden": 64},
            "algo.gamma: 1.5 is out of range: should be less than or equal to 1\n"
            "algo.lr: -1 is out of range: should be greater than 0\n"
            "algo.hidden: 64 has the wrong type: should be a valid list",
        ),
    ],
)
def test_a_mistake_is_one_line_with_its_full_key(change: dict[str, Any], message: str):
    with pytest.raises(ConfigError) as error:
        typed(Config, {**GOOD, **change}, "algo")
    assert str(error.value) == message


def test_the_key_of_a_single_mistake_stands_in_the_error():
    with pytest.raises(ConfigError) as error:
        typed(Config, {**GOOD, "every": {"steps": -1}}, "algo")
    assert error.value.key == "algo.every.steps"


def test_a_missing_option_is_named():
    with pytest.raises(ConfigError, match=r"^algo\.gamma: is missing$"):
        typed(Config, {key: value for key, value in GOOD.items() if key != "gamma"}, "algo")


def test_good_values_are_typed():
    config = typed(Config, {**GOOD, "n_step": 3.0, "lr": [[0, 1], [10, 0.5]]})
    assert config.n_step == 3
    assert config.lr == [(0, 1.0), (10, 0.5)]
    assert config.every == Every(steps=1)


def test_of_many_mistakes_a_message_has_the_first():
    with pytest.raises(ConfigError) as caught:
        compose([f"+stop.p{i}=[]" for i in range(12)])
    lines = str(caught.value).splitlines()
    assert len(lines) == 8
    assert lines[0] == "stop.p0: [] has the wrong type: should be a valid number or a valid string"
    assert lines[-1] == "and 5 more"


@pytest.mark.parametrize("node", ["x\nrlplug: FORGED", ["x\nrlplug: FORGED"], 10**400])
@pytest.mark.parametrize("kind", get_args(Kind))
def test_a_node_that_is_no_mapping_makes_one_line(kind: Kind, node: Any):
    with pytest.raises(ConfigError) as caught:
        choose(kind, kind, node)
    assert "should be a mapping" in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1
