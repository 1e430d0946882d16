"""The code of docs/python.md runs, with fewer steps."""

import re
from pathlib import Path
from typing import Any

import pytest

import rlplug

PAGE = Path(__file__).parents[2] / "docs" / "python.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


def test_the_code_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.chdir(tmp_path)
    small = {"20_000": "1_100", "5_000": "0", "[32, 32]": "[8]", "updates == 10": "updates == 2"}
    names: dict[str, Any] = {"__name__": "__main__"}
    for block in BLOCKS:
        for long, short in small.items():
            block = block.replace(long, short)
        exec(compile(block, str(PAGE), "exec"), names)
    assert isinstance(names["result"], rlplug.Result)
    assert names["longest"].steps > 0
    assert names["action"] in (0, 1)
    assert {folder.parent.name for folder in tmp_path.glob("runs/*/*/summary.json")}
    assert (names["run"].folder / "agent.pt").is_file()
    assert "eval/return_mean" in capsys.readouterr().out
