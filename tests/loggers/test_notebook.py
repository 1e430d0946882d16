"""A run in a notebook: one line, which is updated."""

from __future__ import annotations

import re

import nbclient
import nbformat

RUN = """
import rlplug
words = ["algo=ppo", "env=cartpole", "tuned=none", "total_steps=4096", "model.hidden=[8]", "eval.episodes=2"]
rlplug.train([*words, "logger.only=[progress]", "logger.progress.refresh=20", "hardware=cpu"])
"""


def test_a_notebook_has_one_line(tmp_path):
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(RUN)])
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = notebook.cells[0].outputs
    (shown,) = [output for output in outputs if output.output_type == "display_data"]
    assert re.fullmatch(
        r"━{20}  100%  4,0\d\d/4,096 steps  [\d,]+ steps/s  0:00:00 left  return [\d.]+  eval [\d.]+ ± [\d.]+",
        shown.data["text/plain"],
    )
    printed = "".join(output.text for output in outputs if output.output_type == "stream")
    lines = [line for line in printed.splitlines() if not line.startswith("rlplug: ")]
    assert [line.split()[0] for line in lines] == ["run", "status", "evaluation", "steps", "wall", "run", "next"]
