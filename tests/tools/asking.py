"""Ask rlplug something in a copy of this process, with limits of time and memory, and judge the answer."""

import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

LIMIT_S = 60
MEMORY = 6 * 2**30  # bytes that a copy of this process may add
ESCAPES = ("\x1b[31m", "\x1b]0;owned\x07", "\x07\x08", "\u202e", "\x9b2J", "\r", "\u2028", "\x7f", "\ud800")
MOST_LINES = 40  # of a message, which has one for each setting that is wrong
LONGEST = 3000  # letters of a line


@dataclass
class Answer:
    what: str
    code: int | None  # None: it took too long
    printed: str
    seconds: float

    def fault(self, codes: Sequence[int] = (0, 1, 2), most: int = MOST_LINES, longest: int = LONGEST) -> str | None:
        """Return what is wrong with the answer; None: nothing."""
        lines = self.printed.splitlines()
        own = [line for line in lines if line.startswith(("rlplug: ", '{"error": '))]  # the latter with --json
        if self.code is None:
            return f"no answer in {LIMIT_S} s"
        if "Traceback (most recent call last)" in self.printed and " raised in " not in self.printed:
            return "a traceback"  # of ours: where an environment raises, its own is quoted
        if self.code not in codes:
            return f"exit code {self.code}"
        if odd := sorted({c for c in self.printed if not c.isprintable() and c not in "\n\t"}):
            return f"control characters {odd}"
        if any(line.startswith("rlplug: FORGED") for line in lines):
            return "a forged line"
        if (self.code and not own) or (self.code == 2 and len(lines) > most):
            return f"{len(lines)} lines, {len(own)} of them its own"
        return "a line without an end" if any(len(line) > longest for line in lines) else None


def ask(what: str, call: Callable[[], int | None], folder: Path) -> Answer:
    """Call a function that returns an exit code in a copy of this process, whose working directory is a folder."""
    begin, output = time.monotonic(), folder / "output"
    output.unlink(missing_ok=True)
    if not (child := os.fork()):
        try:
            os.chdir(folder)
            os.setsid()
            descriptor = os.open(output, os.O_CREAT | os.O_WRONLY)
            for stream in (1, 2):
                os.dup2(descriptor, stream)
            held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (held + MEMORY, held + MEMORY))
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            sys.stdout, sys.stderr = (open(stream, "w", closefd=False, errors="surrogatepass") for stream in (1, 2))  # noqa: SIM115
            code = call() or 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
        except BaseException:
            traceback.print_exc()
            code = 1
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    code = None
    while time.monotonic() - begin < LIMIT_S:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            code = os.waitstatus_to_exitcode(status)
            break
        time.sleep(0.005)
    else:
        os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
    text = output.read_text(encoding="utf-8", errors="surrogateescape") if output.exists() else ""
    return Answer(what, code, text, time.monotonic() - begin)


class Campaign(Protocol):
    """Cases that a seed and a number determine."""

    outcomes: Counter[tuple[str, str]]

    def faults(self, number: int) -> list[str]:
        """Run one case and return what is wrong with it."""
        ...


def main(make: Callable[[Path, int], Campaign], words: Sequence[str]) -> int:
    """Run a campaign by ``<cases> [seed [the only case]]``; without a seed, draw one. Return the exit code."""
    count, seed, *only = [*map(int, words), *([random.SystemRandom().randrange(10**6)] if len(words) < 2 else [])]
    print(f"seed {seed}", flush=True)
    work, faults = Path(tempfile.mkdtemp(prefix="rlplug-cases-")), 0
    campaign, began = make(work, seed), time.monotonic()
    for number in only or range(count):
        for fault in campaign.faults(number):
            faults += 1
            print(f"--- {fault}".encode("ascii", "backslashreplace").decode(), flush=True)
    print("\n".join(f"{what}: {how} {n}" for (what, how), n in sorted(campaign.outcomes.items())))
    print(f"{len(only) or count} cases in {time.monotonic() - began:.0f} s, {faults} faults")
    if not faults:
        shutil.rmtree(work)
    return int(bool(faults))
