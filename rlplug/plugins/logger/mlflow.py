"""MLflow."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rlplug import hookimpl, tracking
from rlplug.api import Context, Run
from rlplug.settings import option, settings
from rlplug.types import ConfigError

STATUS = {"finished": "FINISHED", "interrupted": "KILLED"}  # any other: FAILED
IDENTITY = "rlplug.run"  # tag by which a resumed run finds its MLflow run
MOST = 100  # parameters per request
LONGEST = 6000  # characters of a parameter
TRIES = "1"  # retries of a request at the start; MLflow's own default waits for minutes


class MLflow:
    """Logs metrics by environment steps, or updates if the loop counts these, the configuration, videos and weights.

    A resumed run continues the same MLflow run, which has each metric once per step.

    Raises:
        ConfigError: mlflow is not installed, or its store cannot be opened or reached.
    """

    @settings
    class Config:
        tracking_uri: str | None = option(
            "Folder, or URI of a database or server; null: MLFLOW_TRACKING_URI, or mlruns."
        )
        experiment: str = option("Experiment of the run.")
        run_name: str | None = option("Name of the run; null: its folder.")
        tags: dict[str, str] = option("Tags of the run.")
        notes: str | None = option("Description of the run.")
        log_model: bool = option("Log the weights of the best checkpoint as an artifact at the end.")

    def __init__(self, cfg: Config, ctx: Context) -> None:
        try:
            from mlflow import MlflowClient
        except ImportError as error:
            raise ConfigError("logger.mlflow", f"needs MLflow ({error}): pip install 'rlplug[mlflow]'") from None
        self.cfg, self._rows, self._id = cfg, tracking.Rows(), ""
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # MLflow maintains its file store, and asks for this
        uri = cfg.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or "mlruns"
        given = os.environ.get("MLFLOW_HTTP_REQUEST_MAX_RETRIES")
        os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"] = given or TRIES
        try:
            is_folder = ":" not in uri and not uri.startswith("databricks")
            self._client = MlflowClient(os.path.abspath(uri) if is_folder else uri)  # a cached store knows one folder
            found = self._client.get_experiment_by_name(cfg.experiment)
            self._experiment = found.experiment_id if found else self._client.create_experiment(cfg.experiment)
        except Exception as error:  # of any of its stores
            reason = next(iter(str(error).splitlines()), type(error).__name__)
            said = f"{uri} cannot be opened ({reason:.200})"
            way = "take a folder to log offline: logger.mlflow.tracking_uri=mlruns"
            raise ConfigError("logger.mlflow.tracking_uri", f"{said}; {way}") from None
        finally:
            if given is None:
                del os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"]

    @hookimpl
    def rlplug_started(self, run: Run) -> None:
        identity, client = tracking.manifest(run)["run"], self._client
        known = client.search_runs([self._experiment], f"tags.`{IDENTITY}` = '{identity}'")
        if known:
            self._id, had = known[0].info.run_id, known[0].data
            client.update_run(self._id, status="RUNNING")
            steps = {name: client.get_metric_history(self._id, name) for name in had.metrics}
            self._rows = tracking.Rows({name: max(one.step for one in found) for name, found in steps.items()})
        else:
            tags = {IDENTITY: identity, "mlflow.source.git.commit": tracking.commit(run), **self.cfg.tags}
            tags |= {"mlflow.note.content": self.cfg.notes}
            name = self.cfg.run_name or "/".join(run.run_dir.parts[-2:])
            given = {key: value for key, value in tags.items() if value is not None}
            created = client.create_run(self._experiment, tags=given, run_name=name)
            self._id, had = created.info.run_id, created.data
        self._log_params({key: x for key, x in _flat(run.config.raw) if key not in had.params})  # they cannot change
        client.log_dict(self._id, run.config.raw, "config.yaml")
        for step, metrics in self._rows.missing(run):
            self._log(metrics, step)

    @hookimpl
    def rlplug_logged(self, metrics: Mapping[str, float], step: int) -> None:
        if new := self._rows.new(metrics, step):
            self._log(new, step)

    @hookimpl
    def rlplug_evaluated(self, run: Run) -> None:
        if video := tracking.video(run):
            self._client.log_artifact(self._id, str(video), "videos")

    @hookimpl
    def rlplug_ended(self, run: Run, summary: Mapping[str, Any]) -> None:
        if self._id:
            for file in tracking.best(run) if self.cfg.log_model else ():
                self._client.log_artifact(self._id, str(file), "best")
            self._client.set_terminated(self._id, STATUS.get(summary["status"], "FAILED"))

    def _log(self, metrics: Mapping[str, float], step: int) -> None:
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        self._client.log_batch(self._id, [Metric(name, value, now, step) for name, value in metrics.items()])

    def _log_params(self, params: Mapping[str, Any]) -> None:
        from mlflow.entities import Param

        every = [Param(key, str(value)[:LONGEST]) for key, value in params.items()]
        for i in range(0, len(every), MOST):
            self._client.log_batch(self._id, params=every[i : i + MOST])


def _flat(node: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the settings of a configuration with dotted keys; a schedule or a list is one setting."""
    if isinstance(node, Mapping):
        for name, value in node.items():
            yield from _flat(value, f"{key}.{name}" if key else str(name))
    else:
        yield key, list(node) if isinstance(node, Sequence) and not isinstance(node, str) else node
