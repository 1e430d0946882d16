from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Text, Tuple

from rlplug.nn import Flatten, Pixels, choices_of, flat_size, flatten, remarks
from rlplug.types import ConfigError

VECTOR = Box(-1.0, 1.0, (3,), np.float32)
IMAGE = Box(0, 255, (2, 3, 4), np.uint8)
SPACES = [
    VECTOR,
    IMAGE,
    Box(-1.0, 1.0, (), np.float32),
    Box(-1.0, 1.0, (3,), np.float64),
    Discrete(5),
    MultiDiscrete([2, 3]),
    MultiDiscrete(np.array([[2, 3], [4, 1]])),
    MultiBinary(3),
    MultiBinary((2, 2)),
    Dict({"b": VECTOR, "a": Discrete(3), "c": Dict({"image": IMAGE, "bits": MultiBinary(2)})}),
    Tuple([Discrete(2), VECTOR, Dict({"x": IMAGE})]),
]


def stack(space, elements):
    """Elements of a space as a tree of tensors with a leading axis."""
    if isinstance(space, Dict):
        return {key: stack(sub, [e[key] for e in elements]) for key, sub in space.spaces.items()}
    if isinstance(space, Tuple):
        return tuple(stack(sub, [e[i] for e in elements]) for i, sub in enumerate(space.spaces))
    return torch.from_numpy(np.stack(elements))


def unflatten(x, lead):
    if isinstance(x, dict):
        return {key: unflatten(part, lead) for key, part in x.items()}
    if isinstance(x, tuple):
        return tuple(unflatten(part, lead) for part in x)
    return x.unflatten(0, lead)


def scaled(space: Any, element: Any) -> Any:
    """Space and element with images in [0, 1], the only difference."""
    if isinstance(space, Dict | Tuple):
        keys = list(space.spaces) if isinstance(space, Dict) else range(len(space.spaces))
        parts = {key: scaled(space.spaces[key], element[key]) for key in keys}
        new, inner = ({key: part[i] for key, part in parts.items()} for i in range(2))
        return (Dict(new), inner) if isinstance(space, Dict) else (Tuple(new.values()), tuple(inner.values()))
    return (Box(0, 1, IMAGE.shape), element / np.float32(255)) if space == IMAGE else (space, element)


@pytest.mark.parametrize("space", SPACES, ids=str)
def test_flat_form_is_that_of_gymnasium(space):
    space.seed(0)
    elements = [space.sample() for _ in range(6)]
    expected = torch.from_numpy(np.stack([spaces.flatten(*scaled(space, e)) for e in elements])).float()
    x = stack(space, elements)
    assert expected.shape == (6, flat_size(space))
    for flat in (flatten(space, x), flatten(space, unflatten(x, (2, 3))).flatten(0, 1)):
        assert flat.dtype == torch.float32
        assert torch.equal(flat, expected)


def test_only_bytes_up_to_255_are_scaled():
    x = torch.tensor([[0, 51, 255]], dtype=torch.uint8)
    assert flatten(Box(0, 255, (3,), np.uint8), x).tolist() == [[0.0, pytest.approx(0.2), 1.0]]
    assert flatten(Box(0, 255, (3,), np.uint8), x.float()).tolist() == x.tolist()  # normalised before
    assert flatten(Box(0, 254, (3,), np.uint8), x).tolist() == x.tolist()
    assert flatten(Box(0, 255, (3,), np.int64), x.long()).tolist() == x.tolist()


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int64, np.int32])
def test_images_from_0_to_255_of_any_type_are_what_bytes_are(dtype):
    x = torch.randint(256, (5, *IMAGE.shape), dtype=torch.uint8)
    wide, seen = (
        Box(0, 255, IMAGE.shape, dtype),
        x.to(torch.float32 if dtype in (np.float32, np.float64) else torch.int64),
    )
    assert torch.equal(flatten(wide, seen), flatten(IMAGE, x))
    assert torch.equal(flatten(Box(0, 254, IMAGE.shape, dtype), seen), x.float().flatten(1))
    for pixel_max in (255.0, 10.0):
        assert torch.allclose(Pixels(wide, pixel_max)(seen), Pixels(IMAGE, pixel_max)(x))
    assert torch.equal(Pixels(Box(-1, 255, IMAGE.shape, dtype))(seen), x.float().permute(0, 1, 2, 3))


MANY = Discrete(10_001)


def test_many_choices_become_some_numbers_of_a_table():
    both = Flatten(Dict({"id": MANY, "kinds": MultiDiscrete([3, 20_000]), "x": VECTOR}), embed=True)
    first, second = both.tables
    assert (first.weight.shape, second.weight.shape) == ((10_001, 10), (20_000, 12))
    ids, kinds, x = torch.tensor([0, 10_000]), torch.tensor([[2, 19_999], [0, 7]]), torch.randn(2, 3)
    flat = both({"id": ids, "kinds": kinds, "x": x})
    assert flat.shape == (2, both.size) == (2, 10 + 3 + 12 + 3)
    one_hot = torch.tensor([[0.0, 0, 1], [1, 0, 0]])
    expected = torch.cat([first.weight[ids], one_hot, second.weight[kinds[:, 1]], x], -1)
    assert torch.equal(flat, expected)


@pytest.mark.parametrize("space", [*SPACES, Discrete(10_000)], ids=str)
def test_few_choices_stay_as_they_are(space):
    assert not Flatten(space, embed=True).tables
    assert Flatten(space, embed=True).size == flat_size(space)


def test_a_vector_for_once_is_one_hot():
    assert flat_size(MANY) == 10_001
    assert flatten(MANY, torch.tensor([3])).argmax().item() == 3


def test_what_is_not_plain_from_a_space_is_remarked():
    space = Dict({"id": Discrete(1_000_000), "x": Box(0, 255, (3,)), "image": Box(0, 255, (4, 4, 3), np.int64)})
    image, what, numbers = "'image'", "'id'", "'x'"
    lines = {line[: line.index("]")].removeprefix("observation["): line for line in remarks(space)}
    assert lines.keys() == {image, what, numbers}
    assert "pixels from 0 to 255 of type int64 are divided by 255" in lines[image]
    assert (
        "1,000,000 choices, not one-hot, as up to 10,000 are: model=mlp learns a table of 32 numbers for each, "
        in lines[what]
    )
    assert "numbers from 0 to 255 of type float32 go into networks as they are" in lines[numbers]
    assert not [line for space in SPACES for line in remarks(space)]


def test_a_flat_vector_passes_through():
    x = torch.randn(4, 3)
    assert flatten(VECTOR, x) is x


def test_wrong_trailing_axes():
    with pytest.raises(ValueError, match=r"expected \[\.\.\., 2, 3, 4\].*got \[5, 24\]"):
        flatten(IMAGE, torch.zeros(5, 24))


@pytest.mark.parametrize("function", [flat_size, lambda space: flatten(space, torch.zeros(3))])
def test_unsupported_space(function):
    with pytest.raises(ConfigError, match="no flat form"):
        function(Text(5))


def test_a_forward_pass_compiles_in_one_piece():
    space = SPACES[-2]
    space.seed(0)
    x, whole = stack(space, [space.sample() for _ in range(3)]), Flatten(space)
    assert torch.equal(torch.compile(whole.__call__, fullgraph=True, backend="aot_eager")(x), whole(x))


def test_choices_of_an_action():
    assert choices_of(Discrete(5, start=2)) == [5]
    assert choices_of(MultiDiscrete(np.array([[2, 3], [4, 1]]))) == [2, 3, 4, 1]
    assert choices_of(MultiBinary((2, 2))) == [2, 2, 2, 2]
    assert choices_of(VECTOR) is None
