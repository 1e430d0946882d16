"""``profile``: measure where a run spends its time."""

from __future__ import annotations

import argparse
import json
import math
import os
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from rlplug.cli import printing, say, table, tell, without_json
from rlplug.config import composed, validated
from rlplug.registry import hookimpl, warn_broken
from rlplug.types import ConfigError, RunError

if TYPE_CHECKING:
    from pyinstrument import Profiler
    from pyinstrument.frame import Frame

    from rlplug.trainer.trainer import Trainer

USAGE = """rlplug profile [--seconds 10] [--html profile.html] [--json] [key=value ...]

Trains like `rlplug train` for some seconds after the first update and shows where the time goes: a table,
the bottleneck, and an HTML page with every call, as a tree and a timeline. Writes nothing else.
Skips checkpoints, and also evaluations and loggers unless eval.every or logger is set.

  --seconds 10             seconds to profile
  --html profile.html      path of the page; an existing file is replaced
  --json                   print one JSON object"""

INTERVAL = 0.002  # sampling interval in seconds
WIDE = 256  # units of a layer from which bfloat16 pays off; with 128 units it costs 10 %
SETTLES = 30.0  # maximum seconds to wait for compilation
DEVICE = 0.5  # seconds to measure the device, which records every kernel: reading a million of them takes half a minute
BUSY = 0.7  # fraction of the time from which the device is the bottleneck
PLAIN = 0.25  # fraction of the seconds to measure speed without the profiler, which slows the run down

COLLECT, LEARN, BETWEEN = "collecting", "learning", "between rounds"
REST, REPORTS = "the rest", "evaluations, checkpoints, loggers"
OWN = {  # by file and function in this package
    ("trainer/trainer.py", "report"): (BETWEEN, REPORTS),
    ("trainer/trainer.py", "collect"): (COLLECT, REST),
    ("trainer/trainer.py", "play"): (COLLECT, REST),
    ("collection/acting.py", "__call__"): (COLLECT, "acting"),
    ("actors/collector.py", "poll"): (COLLECT, "waiting for actors"),
    ("actors/collector.py", "play"): (COLLECT, "waiting for actors"),
    ("trainer/trainer.py", "update"): (LEARN, REST),
    ("trainer/learner.py", "sample"): (LEARN, "sampling"),
    ("trainer/steps.py", "forward"): (LEARN, "forward"),
    ("nn/optim.py", "backward"): (LEARN, "backward"),
    ("compiler/compiler.py", "step"): (LEARN, "compiled gradient steps"),
    ("trainer/steps.py", "__call__"): (LEARN, "compiled updates"),
    ("trainer/steps.py", "take"): (LEARN, "clipping and optimizer"),
}
CALLED = {  # by function in this package, for calls into plugins or libraries
    ("_play", "step"): (COLLECT, "environments"),
    ("_play_rows", "step"): (COLLECT, "environments"),
    ("_receive", "add"): (COLLECT, "storing"),
    ("_received", "intrinsic_reward"): (LEARN, "intrinsic rewards"),
    ("update", "sample"): (LEARN, "sampling"),
    ("_learned", "prepare"): (LEARN, "targets"),
    ("call", "prepare"): (LEARN, "targets"),
    ("annotated", "annotate"): (LEARN, "priorities and gradients of segments"),  # on the collecting process
    ("update", "feedback"): (LEARN, "priorities"),
}
PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep

Part = tuple[str, str]
"""activity of a run, and part of the activity"""


class Profile(NamedTuple):
    seconds: dict[Part, float]
    steps_per_s: float
    updates_per_s: float
    busy: float | None = None
    """fraction of the time in which a CUDA device is busy; None: there is none"""

    def of(self, what: str) -> dict[str, float]:
        """Return the fractions of the parts of an activity."""
        every = sum(self.seconds.values())
        return {part: spent / every for (name, part), spent in self.seconds.items() if name == what}


def main(arguments: Sequence[str]) -> int:
    """Profile one run.

    Raises:
        ConfigError: the command line is wrong, or asks for several learner processes; pyinstrument is not installed.
        RunError: the run ended too early.
    """
    if {"-h", "--help"} & set(arguments):
        print(USAGE)
        return 0
    arguments, as_json = without_json(arguments)
    parser = _Parser()
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--html", type=Path, default=Path("profile.html"))
    parser.add_argument("words", nargs="*")
    given = parser.parse_intermixed_args(arguments)
    if not 0 < given.seconds < math.inf:
        raise ConfigError("", f"--seconds {given.seconds:g}: should be finite and greater than 0")
    if not os.access(given.html.absolute().parent, os.W_OK) or given.html.is_dir():
        raise ConfigError("", f"--html {given.html}: cannot be written")
    try:
        from pyinstrument import Profiler
    except ImportError as error:
        raise ConfigError("", f"profile needs pyinstrument ({error}): pip install 'rlplug[profile]'") from None
    warn_broken()
    said = " ".join(given.words)
    words = [*(word for word in ("eval.every=0", "logger.only=[]") if word.split("=")[0] not in said), *given.words]
    config = composed(words)
    run, pair = validated(config, config.hydra, words)
    if pair:
        tell(str(pair))

    from rlplug.run.build import build, start  # here, because torch takes seconds to import

    with (
        printing(as_json),
        tempfile.TemporaryDirectory() as folder,
        closing(build(run, Path(folder))) as trainer,
    ):
        if trainer.resolved.plan.world_size > 1:
            raise ConfigError(
                "hardware", "profile supports one learner process; use one device, such as hardware=cpu or 1gpu"
            )
        start(trainer)
        watch = Watch(Profiler(INTERVAL, async_mode="disabled"), given.seconds)
        watch.run(trainer)
        profile = watch.profile()
        advice = bottleneck(profile, trainer)
    given.html.write_text(watch.profiler.output_html(), encoding="utf-8")
    if as_json:
        say(json.dumps(result(profile, advice) | {"page": str(given.html)}))
    else:
        say(f"{text(profile, advice)}\n\nevery call: {given.html}")
    return 0


class Watch:
    """Profiles a run for some seconds from its first update, then ends it."""

    def __init__(self, profiler: Profiler, seconds: float) -> None:
        self.profiler, self.seconds = profiler, seconds
        self._marks: list[tuple[float, int, int]] = []  # time, steps and updates at start, profiling and end
        self._first: float | None = None  # time of the first update
        self._device: DeviceTime | None = None
        self._looks: float | None = None  # start time of the profiler
        self.busy: float | None = None

    def run(self, trainer: Trainer) -> None:
        from rlplug.collection.play import Stopped
        from rlplug.distributed.torch_setup import denormals_flushed

        tell("training up to the first update")
        trainer.hooks.hook.rlplug_started(run=trainer)
        trainer.hooks.register(self)
        try:
            with denormals_flushed(), suppress(Stopped):
                trainer.loop.run(trainer)
        finally:
            if self.profiler.is_running:
                self.profiler.stop()

    @hookimpl
    def rlplug_updated(self, run: Trainer) -> None:
        now = time.perf_counter(), run.progress.env_steps, run.progress.updates
        self._first = self._first or now[0]
        if not self._marks:
            compiler = run.learner.steps.compiler
            called = now[0] > self._first  # not yet at the first update, which is checked and never compiled
            if compiler.active and not (called and compiler.settled) and now[0] - self._first < SETTLES:
                return
            tell(f"profiling for {self.seconds:g} s")
            self._marks.append(now)
        elif now[1] == self._marks[-1][1] and run.loop.unit != "updates":
            pass  # within a burst of updates; measurements end with whole rounds
        elif len(self._marks) == 1:
            if now[0] - self._marks[0][0] >= PLAIN * self.seconds:
                self._marks.append(now)
                if run.ctx.device.type == "cuda":
                    self._device = DeviceTime()
                else:
                    self._look()
        elif self._device is not None and self.busy is None:
            if now[0] - self._marks[1][0] >= min(DEVICE, PLAIN * self.seconds):
                self.busy = self._device.share()
                self._look()
        elif self._looks and time.perf_counter() - self._looks >= (1.0 - PLAIN) * self.seconds:
            from rlplug.collection.play import Stopped

            raise Stopped

    def _look(self) -> None:
        self.profiler.start()
        self._looks = time.perf_counter()

    def profile(self) -> Profile:
        session = self.profiler.last_session
        root = session.root_frame() if session else None
        if root is None:
            raise RunError("the run ended before profiling began; raise total_steps")
        seconds: dict[Part, float] = defaultdict(float)
        for part, spent in _spent(root, (BETWEEN, "")):
            seconds[part] += spent
        (began, *before), (ended, *after) = self._marks[:2]
        steps, updates = ((b - a) / (ended - began) for a, b in zip(before, after, strict=True))
        return Profile(dict(seconds), steps, updates, self.busy)


class DeviceTime:
    """Measures the busy time of a CUDA device from its construction."""

    def __init__(self) -> None:
        from torch import profiler

        self._profiler = profiler.profile(activities=[profiler.ProfilerActivity.CUDA], acc_events=True)
        self._profiler.start()
        self._began = time.perf_counter()

    def share(self) -> float:
        """Stop, and return the fraction of the time in which kernels or copies ran."""
        import torch

        torch.cuda.synchronize()
        seconds = time.perf_counter() - self._began
        self._profiler.stop()
        every = self._profiler.key_averages()
        return sum(event.self_device_time_total for event in every) * 1e-6 / seconds


def _spent(frame: Frame, part: Part) -> Iterator[tuple[Part, float]]:
    """Yield the seconds of a frame and its callees, attributed to the innermost known frame."""
    own = frame.time - sum(child.time for child in frame.children)
    yield part, own
    caller = frame.function if (frame.file_path or "").startswith(PACKAGE) else ""
    for child in frame.children:
        path, name = child.file_path or "", child.function
        found = OWN.get((path.removeprefix(PACKAGE), name)) or CALLED.get((caller, name))
        if path.startswith(os.path.join(PACKAGE, "envs", "")):
            found = COLLECT, "environments"
        yield from _spent(child, part if part[1] == REPORTS else found or part)  # evaluations act, too


def result(profile: Profile, advice: str) -> dict[str, Any]:
    """Return the fractions of the time by activity and part, the speed, and the bottleneck."""
    activities = (COLLECT, LEARN, BETWEEN)
    shares = {what: {part or REST: share for part, share in profile.of(what).items()} for what in activities}
    speed = {"env_steps_per_s": profile.steps_per_s, "updates_per_s": profile.updates_per_s}
    return {"shares": shares, **speed, "device_busy": profile.busy, "bottleneck": advice.removeprefix("bottleneck: ")}


def text(profile: Profile, advice: str) -> str:
    """Return the table, the speed and the bottleneck."""
    rows: list[tuple[str, str, str]] = []
    rate, unit = (profile.steps_per_s, "environment step") if profile.steps_per_s else (profile.updates_per_s, "update")

    def row(name: str, share: float) -> None:
        rows.append((name, f"{share:6.1%}", f"{share / rate * 1e6:10,.1f}"))

    for what in (COLLECT, LEARN, BETWEEN):
        parts = profile.of(what)
        row(what, sum(parts.values()))
        for part in sorted(filter(None, parts), key=lambda part: (part == REST, -parts[part])):
            row(f"  {part}", parts[part])
    lines = table(("", " share", f"us an {unit}"), rows)
    speed = f"{profile.steps_per_s:,.0f} environment steps and {profile.updates_per_s:,.1f} updates a second"
    if profile.busy is not None:
        lines.append(f"the device computes {profile.busy:.0%} of the time; it is counted where the host waits for it")
    return "\n".join([*lines, "", speed, advice])


def bottleneck(profile: Profile, trainer: Trainer) -> str:
    """Return a sentence on the bottleneck with a suggestion."""
    collect, learn, config = profile.of(COLLECT), profile.of(LEARN), trainer.config
    if profile.busy is not None and profile.busy > BUSY:
        halves = "; hardware.precision=bf16-mixed may halve that" if trainer.learner.steps.dtype is None else ""
        return f"bottleneck: the device, which computes {profile.busy:.0%} of the time{halves}"
    collecting, learning, between = (sum(profile.of(what).values()) for what in (COLLECT, LEARN, BETWEEN))
    largest = max(collect, key=lambda part: collect[part], default=REST)
    if between > max(collecting, learning):
        return f"bottleneck: {between:.0%} of the time passes between rounds: {REPORTS}"
    if learning >= collecting:
        part = max(learn, key=lambda part: learn[part])
        compiled = "compile=max may help; " if config.compile != "max" else ""
        fewer = "a smaller replay_ratio means fewer updates, but another experiment; " if config.replay_ratio else ""
        halves = "hardware.precision=bf16-mixed halves matrix-product time; " if _multiplies_bf16(trainer) else ""
        gpu = "hardware=1gpu helps with large networks" if trainer.ctx.device.type == "cpu" else ""
        most = f"learning takes {learning:.0%} of the time, most of it {part} ({learn[part]:.0%})"
        return f"bottleneck: {most}: {compiled}{halves}{fewer}{gpu}".removesuffix("; ").removesuffix(": ")
    return f"bottleneck: {ADVICE[largest].format(share=f'{collect[largest]:.0%}', num_envs=config.num_envs)}"


def _multiplies_bf16(trainer: Trainer) -> bool:
    """Return whether a float32 run would gain from bfloat16: a CPU with hardware support and wide layers."""
    import torch

    if trainer.ctx.device.type != "cpu" or trainer.learner.steps.dtype is not None:
        return False
    wide = any(p.ndim > 1 and min(p.shape[-2:]) >= WIDE for p in trainer.learner.algorithm.parameters())
    return wide and torch.cpu._is_amx_tile_supported()  # pyright: ignore[reportPrivateUsage]


ADVICE: Mapping[str, str] = {
    "environments": (
        "environments take {share} of the time: env.vectorization=subprocess runs them in processes, and "
        "hardware.actors.count=2 or more in Ray actors"
    ),
    "acting": "acting takes {share} of the time: raise num_envs={num_envs}, as environments share a forward pass",
    "storing": "storing collected rows takes {share} of the time: see the buffer's calls in the page",
    "waiting for actors": "the learner waits for actors {share} of the time: raise hardware.actors.count",
    REST: "the collector's own work, without acting and environments, takes {share} of the time: raise num_envs",
}


class _Parser(argparse.ArgumentParser):
    def __init__(self) -> None:
        super().__init__(prog="rlplug profile", add_help=False, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        raise ConfigError("", f"{message}; see rlplug profile --help")
