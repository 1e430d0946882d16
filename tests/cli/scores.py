"""A callback of Hydra that keeps what jobs return."""

from typing import Any, ClassVar

from hydra.core.utils import JobReturn
from hydra.experimental.callback import Callback


class Scores(Callback):
    seen: ClassVar[list[Any]] = []

    def on_job_end(self, config: Any, job_return: JobReturn, **kwargs: Any) -> None:
        self.seen.append(job_return.return_value)
