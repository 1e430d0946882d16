# `make check PYTHON=python` uses that interpreter and not the one of .venv.
PYTHON ?= .venv/bin/python
.PHONY: install check test slow golden docs site wheel

install:  ## install everything that developing needs into .venv
	python3 -m venv .venv
	.venv/bin/python -m pip install -c constraints.txt -e '.[dev]' -e plugins/rlplug-reinforce -e plugins/rlplug-deepsea -e plugins/rlplug-bitflip -e plugins/rlplug-trackio

check:  ## style, spelling, types, dependency rule
	$(PYTHON) -m pytest tests/test_quality.py

test:  ## all tests but those that take minutes
	$(PYTHON) -m pytest -n 2

slow:  ## the tests that take minutes: published thresholds
	$(PYTHON) -m pytest -m slow -o faulthandler_timeout=0

golden:  ## rewrite the golden curves; read the difference before you commit it
	$(PYTHON) -m pytest tests/golden --update-golden

docs:  ## rewrite what is committed of the code's: the drawing of the house, and the matrix (minutes)
	$(PYTHON) docs/architecture.py
	$(PYTHON) docs/matrix.py

site:  ## the documentation in build/site, with warnings as errors
	NO_MKDOCS_2_WARNING=1 $(PYTHON) -m mkdocs build --strict

wheel:  ## dist/*.whl
	$(PYTHON) -m build --wheel
