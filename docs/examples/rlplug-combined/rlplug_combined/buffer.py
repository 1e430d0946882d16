"""Combined experience replay: Zhang & Sutton 2017 (arXiv:1712.01275), section 4.

A large replay buffer hardly ever samples the newest transitions while they are new. Here every sample contains some of
them. The base class stores rows, reads windows of them, and saves what is new: docs/buffers.md.
"""

import numpy as np
import torch
from rlplug import Context
from rlplug.buffer import Ring, Storage, Windows
from rlplug.settings import NonNegativeInt, option, settings


class Listed(Ring):
    """Keeps the rows of a shard, and lists the windows that can be sampled: the ids of their first rows, in order."""

    def allocate(self, like):
        super().allocate(like)
        self.ids = np.zeros(self.rows * self.columns, np.int64)  # window n is at index n % len(ids)
        self.count = self.gone = 0  # windows so far, and those with overwritten rows


class Combined(Windows[Listed]):
    """Samples `newest` windows from the newest ones, one for each column, and the others uniformly."""

    ring = Listed

    # Every option: type, range, and what it does. The defaults are in conf/buffer/combined.yaml.
    @settings
    class Config(Storage):
        newest: NonNegativeInt = option("Windows of a sample from the newest; 0: uniform sampling.")

    def __init__(self, cfg: Config, ctx: Context):
        super().__init__(cfg, ctx)
        self.newest = min(cfg.newest, self.batch_size)

    def added(self, ring, first):
        """List the newly complete windows, and drop those with overwritten rows."""
        row = np.arange(max(ring.oldest, first - self.window + 1), ring.written - self.window + 1)
        at, column = np.nonzero(ring.valid[row % ring.rows])  # a final observation begins no transition
        ring.ids[(ring.count + np.arange(len(at))) % len(ring.ids)] = row[at] * self.columns + ring.begin + column
        ring.count += len(at)
        while ring.gone < ring.count and ring.ids[ring.gone % len(ring.ids)] < ring.oldest * self.columns:
            ring.gone += 1

    def __len__(self):
        return sum(ring.count - ring.gone for ring in self.rings)

    def draw(self):
        """Sample the first row and column of each window, and return its id and probability: `[B]` each."""
        newest = np.concatenate([self.listed(ring, max(ring.gone, ring.count - ring.columns)) for ring in self.rings])
        # the number of draws does not depend on the rows: several processes share one generator
        chosen = self.ctx.randint(len(newest), self.newest).cpu().numpy()
        others = self.ctx.randint(len(self), self.batch_size - self.newest).cpu().numpy()
        ids = np.concatenate((newest[chosen], self.numbered(others)))
        share = self.newest / self.batch_size
        prob = (1 - share) / len(self) + share / len(newest) * np.isin(ids, newest)
        drawn = {"index": torch.from_numpy(ids), "sample_prob": torch.from_numpy(prob).float()}
        return *np.divmod(ids, self.columns), drawn

    def listed(self, ring, first):
        """Return the ids of the windows of a ring from number `first` on."""
        return ring.ids[np.arange(first, ring.count) % len(ring.ids)]

    def numbered(self, number):
        """Return the ids of the windows `number [n]`, counted over the rings of all shards (one per actor)."""
        ids, below = np.zeros_like(number), 0
        for ring in self.rings:
            size = ring.count - ring.gone
            mine = (number >= below) & (number < below + size)
            ids[mine] = ring.ids[(ring.gone + number[mine] - below) % len(ring.ids)]
            below += size
        return ids

    def nbytes(self, row):
        return super().nbytes(row) + 8 * self.rings.rows * self.columns
