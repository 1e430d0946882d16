import torch
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from rlplug.nn.moments import PIECE, Moments


def test_merging_batches_gives_the_moments_of_all():
    x = torch.randn(100, 3, 2, generator=torch.Generator().manual_seed(0)) * 5.0 + 100.0
    moments = Moments((3, 2))
    for part in x.split([1, 0, 30, 69]):
        moments.add(part)
    assert (moments.mean.unique(), moments.var.unique()) == (0.0, 1.0)
    moments.commit()
    assert_close(moments.mean, x.mean(0))
    assert_close(moments.var, x.var(0, correction=0))
    assert_close(moments.scale(), 1.0 / x.std(0, correction=0))


def test_a_single_number_has_no_deviation_yet():
    moments = Moments()
    moments.add(torch.tensor([7.0]))
    moments.commit()
    assert (moments.mean, moments.var) == (0.0, 1.0)


def test_shares_of_several_ranks_are_added_up():
    x = torch.arange(10.0)
    shares: list[torch.Tensor] = []
    Moments().add(x[3:], lambda own: shares.append(own) or own)
    both = Moments()
    both.add(x[:3], lambda own: torch.cat([own, *shares]))
    both.commit()
    assert_close((both.mean, both.var), (x.mean(), x.var(correction=0)))


class Largest(TorchDispatchMode):
    """How many numbers the largest tensor in double precision has that is made meanwhile."""

    size = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **kwargs or {})
        if isinstance(out, torch.Tensor) and out.dtype == torch.float64:
            self.size = max(self.size, out.numel())
        return out


def test_images_are_summed_up_in_pieces():
    x = torch.randint(256, (40, 84, 84, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    moments = Moments((84, 84, 8))
    with Largest() as largest:
        moments.add(x)
    assert x.numel() > 2 * PIECE >= 2 * largest.size > 0
    moments.commit()
    assert_close(moments.mean, x.float().mean(0))
    assert_close(moments.var, x.float().var(0, correction=0))
