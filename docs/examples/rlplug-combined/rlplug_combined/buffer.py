"""Combined: the newest transitions, drawn uniformly, to begin with.

The base keeps rows, reads windows of them, and saves what is new: docs/buffers.md. This class says which windows there
are, and draws them. Row `t` and row `t + 1` of a column (environment) are transition `t`.
"""

import numpy as np
import torch
from rlplug import Context
from rlplug.buffer import Storage, Windows
from rlplug.settings import PositiveInt, option, settings


class Combined(Windows):
    """Draws from the `recent` newest rows of each column; `capacity` of all are kept."""

    # Every option: type, range, and what it does. The defaults stand in conf/buffer/combined.yaml.
    @settings
    class Config(Storage):
        recent: PositiveInt = option("Rows of each column that are drawn from; capacity limits them, too.")

    def __init__(self, cfg: Config, ctx: Context):
        super().__init__(cfg, ctx)
        self.recent = cfg.recent

    def added(self, ring, first):
        """The rows `first` to `ring.written - 1` are new: `starts` looks at all, so there is nothing to note."""

    def starts(self):
        """Row and column `[n]` of every window that may be drawn, in the rings of all shards (one for each actor).

        It looks at every row for every sample, which is simple; a list of them would be faster.
        """
        rows, columns = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
        for ring in self.rings:
            end = ring.written - self.window + 1
            row = np.arange(max(ring.oldest, end - self.recent), end)
            at, column = np.nonzero(ring.valid[row % ring.rows])
            rows.append(row[at])
            columns.append(column + ring.begin)
        return np.concatenate(rows), np.concatenate(columns)

    def __len__(self):
        return len(self.starts()[0])

    def draw(self):
        """Row and column that each window begins with, and its lasting number and probability: `[B]` each."""
        row, column = self.starts()
        drawn = self.ctx.randint(len(row), self.batch_size).cpu().numpy()
        index = torch.from_numpy(row[drawn] * self.columns + column[drawn])
        return row[drawn], column[drawn], {"index": index, "sample_prob": torch.full(index.shape, 1.0 / len(row))}
