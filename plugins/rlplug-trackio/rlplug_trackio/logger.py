"""Trackio: metrics, videos and weights in a local database, or in a Hugging Face Space."""

import contextlib
import io

import trackio
from huggingface_hub import get_token
from rlplug import ConfigError, hookimpl, tracking
from rlplug.settings import option, settings


class Trackio:
    """Logs metrics by the run's steps. A resumed run continues its Trackio run."""

    @settings
    class Config:
        project: str = option("Project of the run.")
        run_name: str | None = option("Name of the run; null: its folder. A part of the run's identity follows either.")
        group: str | None = option("Group of runs, such as the seeds of an experiment.")
        space_id: str | None = option("Hugging Face Space to log to; null: the local database.")
        log_model: bool = option("Log the weights of the best checkpoint as an artifact at the end.")

    def __init__(self, cfg, ctx):
        """Check what can be checked before the run starts: a ConfigError here leaves nothing behind."""
        if cfg.space_id and not get_token():
            said = "needs a token of Hugging Face: run `hf auth login` or set HF_TOKEN; null logs offline"
            raise ConfigError("logger.trackio.space_id", said)
        self.cfg, self.run, self.rows = cfg, None, tracking.Rows()

    @hookimpl
    def rlplug_started(self, run):
        """Open the Trackio run of this run, or continue it, and send the rows that it lacks."""
        cfg, about = self.cfg, tracking.manifest(run)
        name = f"{cfg.run_name or run.run_dir.name}-{about['run'][:8]}"  # the identity is the same after `resume`
        self.rows = tracking.Rows(_last(cfg.project, name) if cfg.space_id is None else {})
        with contextlib.redirect_stdout(io.StringIO()):  # it advertises its dashboard
            self.run = trackio.init(
                cfg.project,
                name,
                cfg.group,
                cfg.space_id,
                config={**run.config.raw, "commit": tracking.commit(run)},
                resume="allow",
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )
        for step, metrics in self.rows.missing(run):
            self.run.log(metrics, step)

    @hookimpl
    def rlplug_logged(self, metrics, step):
        """Queue a row of metrics, which a thread of Trackio writes."""
        if self.run and (new := self.rows.new(metrics, step)):
            self.run.log(new, step)

    @hookimpl
    def rlplug_evaluated(self, run):
        """Log the video of an evaluation, if eval.record asks for one."""
        video = tracking.video(run)
        if self.run and video and self.rows.new({"eval/video": 0}, run.steps):
            self.run.log({"eval/video": trackio.Video(str(video), format="mp4")}, run.steps)

    @hookimpl
    def rlplug_ended(self, run, summary):
        """Log the best weights, and wait until everything is written."""
        if self.run:
            if self.cfg.log_model and (files := tracking.best(run)):
                weights = trackio.Artifact(f"{self.run.name}-best", "model", metadata={"status": summary["status"]})
                for file in files:
                    weights.add_file(str(file))
                self.run.log_artifact(weights, aliases=["best"])
            with contextlib.redirect_stdout(io.StringIO()):
                self.run.finish()


def _last(project, name):
    """Return the highest step of each metric of a run in the local database."""
    last = {}
    for row in trackio.SQLiteStorage.get_logs(project, name):
        last |= {metric: row["step"] for metric in row if row["step"] > last.get(metric, -1)}
    return last
