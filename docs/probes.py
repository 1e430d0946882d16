"""Write the two tables of docs/probes.md. ``python docs/probes.py`` trains everything, which takes many minutes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).with_suffix(".md")
TABLES = {"probes": "rlplug.testing.probes", "planted": "tests.tools.planted"}


def main() -> None:
    text = PAGE.read_text()
    for name, module in TABLES.items():
        done = subprocess.run([sys.executable, "-m", module], stdout=subprocess.PIPE, text=True, check=False)
        head, _, rest = text.partition(f"<!-- {name} -->")
        end = f"<!-- end {name} -->"
        text = f"{head}<!-- {name} -->\n\n{done.stdout}\n{end}{rest.partition(end)[2]}"
    PAGE.write_text(text)


if __name__ == "__main__":
    main()
