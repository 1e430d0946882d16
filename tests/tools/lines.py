"""Command lines as people mistype them, and what rlplug answers: never a traceback, nor silence.

python -m tests.tools.lines 1000 [seed]

Without a seed, there is a new one, which is printed. What would train is checked only, but for some lines, which are
given few steps. Every line is answered by a copy of one process that has imported everything.
"""

import random
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rlplug.cli import main
from rlplug.config import compose, option_names
from tests.tools.asking import Answer, ask
from tests.tools.asking import main as campaign

GROUPS = (
    "algo",
    "env",
    "model",
    "buffer",
    "exploration",
    "loop",
    "hardware",
    "logger",
    "curriculum",
    "estimator",
    "experiment",
    "tuned",
)
WORDS = r"""
-1 0 1.5 1e30 -1e-30 99999999999999999999 nan inf -inf true null '' word [] [1,2] [a,[b]] {} {a:1} [0] [-3] 1e3 1e400
[[0,1],[0,2]] [[5,1],[1,2]] [[0,1],[1e30,2]] [[0,1e-3],['${total_steps}',0]] [100000,100000] ${nope} ${algo} 100k 0.0
${oc.env:NOPE} héé 名前 🙂 1_000 0x10 1, ' " x=y .. / \ 9223372036854775807 9223372036854775808 2147483648 linear auto
range(3) choice(1,2) glob(*) int(3) sort(3,1) !!python/object:os.system ??? @ # $ %s {}{}
"""
VALUES = (*WORDS.split(), "a b", "x" * 5000, "\u200b", "\u202eabc", "\uff41\uff4c\uff47\uff4f")
ODD = """
= == a= =a algo algo= algo==sac algo=ppo=sac algo. .algo=ppo algo..lr=1 ~ ~algo +algo=sac ++ + --nope - -z --cfg trian
resume evaluate env.id=.:Y-v0 hydra.run.dir=/proc/x hydra.nope=1 hydra/nope=1 hydra.run.dir='' hydra=null hydra.job=3
hydra.searchpath=[file:///nowhere] num_envs=1e9 hardware.threads=99999999999 algo=[ppo algo=ppo] algo={ppo algo='ppo
env=cartpole,pendulum seed=range(3) seed=choice(1,2) model.hidden=[100000,100000]
"""
ODDITIES = (
    *ODD.split(),
    *("train train", "resume nowhere", "evaluate nowhere", "plugins nope", "plugins algo nope", "resume " + "x" * 5000),
    *("evaluate /dev/null", "resume /etc/passwd", "experiment=null --cfg job", "--package nope", "--cfg nope"),
    *("--info nope", "-m seed=range(1,1)", "algo=ppo -m seed=1,2,x", "-m algo=ppo,", "env=gymnasium env.id=os:system"),
    *("-m hydra/launcher=nope seed=1,2", "env=gymnasium env.id=:", "env=gymnasium env.id=a:b:c"),
    "hardware=ray hardware.devices=100",
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
MOST = 10_000  # lines of one seed
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


class Lines:
    """Command lines, each of which a copy of this process answers in an empty folder.

    Args:
        work: an empty folder.
        seed: it determines the lines.
        lines: these instead of generated ones.
    """

    def __init__(self, work: Path, seed: int, lines: Sequence[str] = ()) -> None:
        import rlplug.cli.check
        import rlplug.cli.describe
        import rlplug.cli.train
        import rlplug.run.build  # noqa: F401  what every copy of this process needs

        self.work, self.outcomes = work, Counter[tuple[str, str]]()
        self.lines = [line.split(" ") for line in lines] or generate(MOST, seed)

    def faults(self, number: int) -> list[str]:
        """Ask one line; what would train is checked only."""
        line = self.lines[number]
        is_run = not any(word.startswith("-") for word in line) and "=" in line[0]
        (folder := self.work / str(number)).mkdir()
        answer = ask(" ".join(line), lambda: main(["check", *line] if is_run else list(line)), folder)
        shutil.rmtree(folder)
        self.outcomes["exit code", str(answer.code)] += 1
        fault = fault_of(line, answer)
        return [f"{answer.what[:300]}: {fault}\n{answer.printed[-1500:]}"] if fault else []


def fault_of(line: Sequence[str], answer: Answer) -> str | None:
    """Return what is wrong with the answer to a line: it may have a line for each mistake, and a library may warn."""
    most = 3 * len(line) + 100 * ("--info" in line)  # Hydra prints before it composes
    return answer.fault((0, 1, 2) if line[0] == "train" else (0, 2), most, longest=20_000)


if __name__ == "__main__":
    odd = sys.argv[1] == "odd"
    make = partial(Lines, lines=ODDITIES if odd else ())
    sys.exit(campaign(make, [str(len(ODDITIES)), "0"] if odd else sys.argv[1:]))
