"""Write the two tables of docs/probes.md. ``python docs/probes.py`` trains everything, which takes many minutes.

``python docs/probes.py planted`` writes one of them. It exits with 1 if something is wrong.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).with_suffix(".md")
TABLES = {"probes": "rlplug.testing.probes", "planted": "tests.tools.planted"}


def main(names: list[str]) -> int:
    wrong = 0
    for name in names or TABLES:
        done = subprocess.run([sys.executable, "-m", TABLES[name]], stdout=subprocess.PIPE, text=True, check=False)
        wrong |= done.returncode
        head, _, rest = PAGE.read_text().partition(f"<!-- {name} -->")
        end = f"<!-- end {name} -->"
        PAGE.write_text(f"{head}<!-- {name} -->\n\n{done.stdout}\n{end}{rest.partition(end)[2]}")
    return wrong


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
