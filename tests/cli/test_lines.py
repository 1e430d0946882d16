"""Generated command lines: each gets one clear answer. ``python -m tests.tools.lines`` asks more of them."""

import pytest

from tests.tools.lines import ODDITIES, Answer, ask, generate, run


def faults(answers: list[Answer]) -> list[tuple[str, str | None, str]]:
    return [(" ".join(answer.line)[:200], answer.fault, answer.printed[-500:]) for answer in answers if answer.fault]


def test_a_few_generated_lines():
    answers = run(40, seed=7)
    assert faults(answers) == []
    assert sum(answer.code == 2 for answer in answers) > 20


@pytest.mark.parametrize("line", ODDITIES)
def test_odd_lines(line: str):
    assert faults([ask(line.split(" "))]) == []


@pytest.mark.slow
def test_five_hundred_generated_lines():
    assert len({tuple(line) for line in generate(500, 0)}) > 400
    answers = run(500, seed=0)
    assert faults(answers) == []
    assert sum(answer.code == 2 for answer in answers) > 350


def test_a_fault_is_seen():
    """Whatever the generator finds, it finds it by these."""
    good = Answer(["x"], 2, "rlplug: x: unknown key\n", 0.1)
    assert good.fault is None
    assert Answer(["x"], 2, "", 0.1).fault == "0 lines, 0 of them its own"
    assert Answer(["x"], 2, good.printed * 4, 0.1).fault == "4 lines, 4 of them its own"
    assert Answer(["x"], 2, good.printed + "more\n", 0.1).fault == "2 lines, 1 of them its own"
    assert Answer(["x"], 1, good.printed, 0.1).fault == "exit code 1"
    assert Answer(["x"], None, "", 60.0).fault == "no answer in 60 s"
    assert Answer(["x"], 2, "Traceback (most recent call last):\n", 0.1).fault == "a traceback"
