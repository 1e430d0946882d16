"""Command lines as people mistype them, and what rlplug answers: never a traceback, nor silence.

python -m tests.tools.lines 1000 [seed]

Without a seed, there is a new one, which is printed. What would train is checked only, but for some lines, which are
given few steps. Every line is answered by a copy of one process that has imported everything.
"""

from __future__ import annotations

import os
import random
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlplug.cli import main
from rlplug.config import compose, option_names

LIMIT_S = 60
MEMORY = 12 * 1024**3  # of address space, of which a process with torch takes some
GROUPS = ("algo", "env", "model", "buffer", "exploration", "loop", "hardware", "logger", "experiment", "tuned")
VALUES = (
    *("-1", "0", "1.5", "1e30", "-1e-30", "99999999999999999999", "nan", "inf", "-inf", "true", "null", "''", "word"),
    *(
        "[]",
        "[1,2]",
        "[a,[b]]",
        "{}",
        "{a:1}",
        "[[0,1],[0,2]]",
        "[[5,1],[1,2]]",
        "${nope}",
        "${algo}",
        "${oc.env:NOPE}",
    ),
    *(
        "héé",
        "名前",
        "🙂",
        "\u200b",
        "\u202eabc",
        "\uff41\uff4c\uff47\uff4f",
        "1_000",
        "0x10",
        "1,",
        "'",
        '"',
        "x=y",
        "a b",
        "..",
        "/",
        "\\",
    ),
    *("1e3", "9223372036854775807", "9223372036854775808", "2147483648", "1e400", "100k", "linear", "auto", "0.0"),
    *(
        "range(3)",
        "choice(1,2)",
        "glob(*)",
        "int(3)",
        "sort(3,1)",
        "[[0,1],[1e30,2]]",
        "[[0,1e-3],['${total_steps}',0]]",
    ),
    *("[100000,100000]", "[0]", "[-3]", "x" * 5000, "!!python/object:os.system", "???", "@", "#", "$", "%s", "{}{}"),
)
ODDITIES = (
    *(
        "=",
        "==",
        "a=",
        "=a",
        "algo",
        "algo=",
        "algo==sac",
        "algo=ppo=sac",
        "algo.",
        ".algo=ppo",
        "algo..lr=1",
        "~",
        "~algo",
    ),
    *("+algo=sac", "++", "+", "--nope", "-", "-z", "--cfg", "--package nope", "--cfg nope", "--info nope"),
    *("algo=[ppo", "algo=ppo]", "algo={ppo", "algo='ppo", "env=cartpole,pendulum", "seed=range(3)", "seed=choice(1,2)"),
    *(
        "train train",
        "trian",
        "resume",
        "resume nowhere",
        "evaluate",
        "evaluate nowhere",
        "plugins nope",
    ),
    *(
        "plugins algo nope",
        "resume " + "x" * 5000,
        "evaluate /dev/null",
        "resume /etc/passwd",
        "experiment=null --cfg job",
    ),
    *(
        "-m seed=range(1,1)",
        "algo=ppo -m seed=1,2,x",
        "-m algo=ppo,",
        "-m hydra/launcher=nope seed=1,2",
        "env.id=.:Y-v0",
    ),
    *(
        "env=gymnasium env.id=:",
        "env=gymnasium env.id=a:b:c",
        "env=gymnasium env.id=os:system",
        "hydra.run.dir=/proc/x",
    ),
    *(
        "hydra.nope=1",
        "hydra/nope=1",
        "hydra.searchpath=[file:///nowhere]",
        "hydra.run.dir=''",
        "hydra=null",
        "hydra.job=3",
    ),
    *(
        "hardware=ray hardware.devices=100",
        "num_envs=1e9",
        "hardware.threads=99999999999",
        "model.hidden=[100000,100000]",
    ),
)
SWEPT = (
    *("range(1e9)", "range(0,1,1e-12)", "range(1,5,0)", "shuffle(range(1000000000))", "interval(0,1)", "choice(1,x)"),
    *("1,2,x", "glob(*)", "range(3)", "[1],[2]", "sort(range(1e9))", "tag(a,range(1e9))", "1," + "2," * 200 + "3"),
)
FLAGS = (
    *("--dry-run", "-v", "--list", "--experimental-rerun x", "--seed=3", "--env", "-m", "--multirun", "-cd nowhere"),
    *(
        "--config-path /nowhere",
        "--config-name nope",
        "--hydra-help",
        "--info all",
        "--info",
        "--resolve",
        "--run",
        "-c",
    ),
    *("-p algo", "-cn x", "-sc query=bash", "--shell-completion nope", "--version", "--help", "-h", "--", "---"),
)
PLACES = (
    *("runs", "latest", ".", "..", "/", "/proc", "/dev/null", "/etc/passwd", "~", "*", "**", "nope/*", "\0", "--json"),
    *("data.path=../../..", "data.path=/dev", "data.path=[]", "x" * 300, "algo", "algo sac", "--explore", "a/../b"),
)
TRAINED = 50
"""one line in so many is trained"""
TINY = (
    *("env=cartpole", "tuned=none", "total_steps=64", "num_envs=1", "rollout_fragment_length=16", "eval.episodes=1"),
    *("train_batch_size=16", "num_steps_sampled_before_learning_starts=16", "hardware=cpu", "compile=off"),
    *("data.path=null", "record.path=null", "hydra.run.dir=run"),
)


def leaves(node: Any, path: str = "") -> Iterator[str]:
    if isinstance(node, Mapping):
        for key, value in node.items():
            yield from leaves(value, f"{path}.{key}".lstrip("."))
    else:
        yield path


def slip(word: str, rng: random.Random) -> str:
    """Return a word with a slip of the pen."""
    i = rng.randrange(len(word))
    return rng.choice(
        [
            word[:i] + word[i + 1 :],
            word[:i] + word[i] + word[i:],
            word[:i] + rng.choice("abcxyz_.-é🙂") + word[i + 1 :],
            word[: i - 1] + word[i] + word[i - 1] + word[i + 1 :] if i else word.upper(),
        ]
    )


def generate(count: int, seed: int) -> list[list[str]]:
    """Return ``count`` command lines."""
    rng = random.Random(seed)
    options = {group: option_names(group) for group in GROUPS}
    bases = {algo: [*leaves(compose([f"algo={algo}"]).raw)] for algo in ("ppo", "dqn", "sac")}

    def cross() -> list[str]:
        several = ("exploration", "logger")
        groups = rng.sample([group for group in GROUPS if group != "tuned"], rng.randint(2, 5))
        picked = [(group, rng.choice(options[group])) for group in groups]
        return [f"{group}=[{name}]" if group in several else f"{group}={name}" for group, name in picked]

    def value() -> list[str]:
        algo = rng.choice([*bases])
        return [f"algo={algo}", f"{rng.choice(bases[algo])}={rng.choice(VALUES)}"]

    def key() -> list[str]:
        algo = rng.choice([*bases])
        return [f"algo={algo}", f"{rng.choice(['', '+', '++', '~'])}{slip(rng.choice(bases[algo]), rng)}=1"]

    def option() -> list[str]:
        group = rng.choice(GROUPS)
        return [f"{group}={slip(rng.choice(options[group]), rng)}"]

    def oddity() -> list[str]:
        return rng.choice(ODDITIES).split(" ")

    def several() -> list[str]:
        return [*value(), *(word for _ in range(rng.randint(1, 3)) for word in value()[1:])]

    def sweep() -> list[str]:
        algo = rng.choice([*bases])
        return ["-m", f"algo={algo},nope", f"{rng.choice(bases[algo])}={rng.choice(SWEPT)}"]

    def flag() -> list[str]:
        return [*rng.choice([[], cross()]), *rng.choice(FLAGS).split(" "), *rng.choice([[], value()]), "seed=x"]

    def word() -> list[str]:
        verb = rng.choice(
            [
                *("resume", "evaluate", "estimate", "data", "plugins", "new", "check", "profile", "play", "watch"),
                *("runs", "diff", "plot", "report"),
            ]
        )
        said = [verb, *(rng.choice([*PLACES, *value(), *key()]) for _ in range(rng.randint(0, 3)))]
        return said if verb != "profile" else [*said, "algo=nope"]

    def tiny() -> list[str]:
        algo = rng.choice(["ppo", "dqn"])
        return ["train", f"algo={algo}", f"{rng.choice(bases[algo])}={rng.choice(VALUES)}", *TINY]

    def garbled() -> list[str]:
        line = " ".join(rng.choice([cross, value, option])())
        for _ in range(rng.randint(1, 3)):
            line = slip(line, rng)
        return [part for part in line.split(" ") if part] or ["algo"]

    kinds: list[Callable[[], list[str]]] = [cross, value, value, value, key, option, oddity]
    kinds += [several, sweep, flag, word, garbled]
    return [(rng.choice(kinds) if i % TRAINED else tiny)() for i in range(count)]


@dataclass
class Answer:
    line: list[str]
    code: int | None  # None: it took too long
    printed: str
    seconds: float

    @property
    def fault(self) -> str | None:
        """What is wrong with the answer; None: nothing."""
        if self.code is None:
            return f"no answer in {LIMIT_S} s"
        if "Traceback (most recent call last)" in self.printed:
            return "a traceback"
        stopped = self.code == 1 and self.line[0] == "train" and self.printed.count("rlplug: ") > 0
        if self.code not in (0, 2) and not stopped:
            return f"exit code {self.code}"
        said = [line for line in self.printed.splitlines() if line.startswith("rlplug: ")]
        most = 3 * len(self.line)  # a line for each mistake, and a library may warn
        if self.code == 2 and not (said and len(self.printed.splitlines()) <= most):
            return f"{len(self.printed.splitlines())} lines, {len(said)} of them its own"
        return None


def ask(line: Sequence[str]) -> Answer:
    """Give a command line to rlplug, in a copy of this process; what would train is checked only."""
    is_run = not any(word.startswith("-") for word in line) and "=" in line[0]
    arguments = ["check", *line] if is_run else list(line)
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "output"
        if not (child := os.fork()):
            try:
                os.chdir(folder)
                os.setsid()
                descriptor = os.open(output, os.O_CREAT | os.O_WRONLY)
                for stream in (1, 2):
                    os.dup2(descriptor, stream)
                resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
                sys.stdout, sys.stderr = (open(stream, "w", closefd=False) for stream in (1, 2))  # noqa: SIM115
                code = main(arguments)
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
        text = output.read_text(encoding="utf-8", errors="replace") if output.exists() else ""
    return Answer(list(line), code, text, time.monotonic() - begin)


def run(lines: Sequence[Sequence[str]]) -> list[Answer]:
    """Return the answers to command lines, and print those that are wrong."""
    import rlplug.cli.check
    import rlplug.cli.describe
    import rlplug.cli.train
    import rlplug.run.build  # noqa: F401  what every copy of this process needs

    answers: list[Answer] = []
    for line in lines:
        answers.append(answer := ask(line))
        if answer.fault:
            print(f"--- {' '.join(line)[:300]}: {answer.fault}\n{answer.printed[-1500:]}", flush=True)
    return answers


if __name__ == "__main__":
    if sys.argv[1] == "odd":
        answers = run([line.split(" ") for line in ODDITIES])
    else:
        seed = int(sys.argv[2]) if len(sys.argv) > 2 else random.SystemRandom().randrange(10**6)
        print(f"seed {seed}", flush=True)
        answers = run(generate(int(sys.argv[1]), seed))
    bad = [answer for answer in answers if answer.fault]
    codes = {
        code: sum(answer.code == code for answer in answers) for code in sorted({a.code for a in answers}, key=str)
    }
    slowest = max(answers, key=lambda answer: answer.seconds)
    print(
        f"{len(answers)} lines, exit codes {codes}, {len(bad)} faults; slowest {slowest.seconds:.1f} s: {slowest.line}"
    )
    sys.exit(bool(bad))
