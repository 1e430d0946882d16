import pytest
import torch
from torch.testing import assert_close

from rlplug.nn.noisy import NoisyLinear, Stream, redraw


def draws(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return lambda *shape, rows: torch.randn(*shape, generator=generator)


def layer(seed=0, sigma0=0.5) -> NoisyLinear:
    torch.manual_seed(seed)
    return NoisyLinear(3, 2, sigma0)


def test_initialisation_is_that_of_factorised_noise():
    """Fortunato et al., section 3.2: means uniform in +- p^-0.5, deviations sigma0 p^-0.5."""
    noisy = NoisyLinear(400, 300, sigma0=0.4)
    assert_close(noisy.sigma_weight, torch.full((300, 400), 0.02))
    assert_close(noisy.sigma_bias, torch.full((300,), 0.02))
    assert noisy.weight.abs().max() <= 0.05
    assert noisy.weight.std().item() == pytest.approx(0.05 / 3**0.5, rel=0.02)


def test_output_by_hand():
    noisy, x = layer(), torch.randn(5, 3)
    redraw([noisy], draws())
    inside, outside = noisy.noise_in, noisy.noise_out
    assert inside.shape == (3,)
    assert outside.shape == (2,)
    weight = torch.stack([noisy.weight[j] + noisy.sigma_weight[j] * outside[j] * inside for j in range(2)])
    assert_close(noisy(x), x @ weight.T + noisy.bias + noisy.sigma_bias * outside)
    assert_close(noisy(x, noisy=False), x @ noisy.weight.T + noisy.bias)
    assert not torch.allclose(noisy(x), noisy(x, noisy=False))
    assert_close(noisy(x.view(5, 1, 3)), noisy(x).view(5, 1, 2))


def test_noise_is_the_signed_root_of_one_normal_draw_that_all_ranks_share():
    layers, asked = [layer(), NoisyLinear(2, 4)], []
    drawn = torch.tensor([4.0, -9.0, 0.25, -1.0, 0.0, 16.0, -0.25, 1.0, 1.0, -4.0, 9.0])

    def draw(*shape, rows):
        asked.append((shape, rows))
        return drawn

    redraw(layers, draw)
    assert asked == [((3 + 2 + 2 + 4,), False)]
    noise = torch.cat([layers[0].noise_in, layers[0].noise_out, layers[1].noise_in, layers[1].noise_out])
    assert_close(noise, torch.tensor([2.0, -3.0, 0.5, -1.0, 0.0, 4.0, -0.5, 1.0, 1.0, -2.0, 3.0]))


def test_noise_is_new_with_every_redraw_and_stays_in_between():
    noisy, x, draw = layer(), torch.randn(5, 3), draws()
    assert_close(noisy(x), noisy(x, noisy=False), rtol=0, atol=0)
    redraw([noisy], draw)
    first = noisy(x)
    assert_close(noisy(x), first, rtol=0, atol=0)
    redraw([noisy], draw)
    assert not torch.allclose(noisy(x), first)
    redraw([], draw)


def test_means_and_deviations_learn_and_noise_is_no_state():
    noisy = layer()
    with torch.inference_mode():  # as while acting
        redraw([noisy], draws())
    noisy(torch.ones(1, 3)).sum().backward()
    assert set(noisy.state_dict()) == {"weight", "bias", "sigma_weight", "sigma_bias"}
    assert_close(noisy.sigma_weight.grad, torch.outer(noisy.noise_out, noisy.noise_in))
    assert_close(noisy.sigma_bias.grad, noisy.noise_out)
    assert_close(noisy.weight.grad, torch.ones(2, 3))


@pytest.mark.parametrize("noisy", [True, False])
def test_a_stream_is_its_layers_with_relu_between_them(noisy):
    stream, x = Stream([3, 4, 2], sigma0=0.5), torch.randn(5, 3)
    redraw(list(stream.layers), draws())
    hidden, output = stream.layers
    assert_close(stream(x, noisy), output(hidden(x, noisy).relu(), noisy))
    assert not torch.allclose(stream(x, True), stream(x, False))


def test_a_stream_without_noise():
    stream, x = Stream([3, 4, 2], sigma0=None), torch.randn(5, 3)
    assert not [layer for layer in stream.layers if isinstance(layer, NoisyLinear)]
    assert_close(stream(x, True), stream(x, False), rtol=0, atol=0)
