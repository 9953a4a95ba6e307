# Two commands on a fresh machine: `make demo` runs a language model through cuflash, `make test` runs the tests.
# Both set up .venv first. PYTHON chooses the interpreter, as in `make test PYTHON=python3.12`.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/installed

.PHONY: demo test lint clean

demo: $(STAMP)-demo
	$(BIN)/python examples/smollm2.py --check

test: $(STAMP)-test
	$(BIN)/python -m pytest

lint: $(STAMP)-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

$(STAMP)-%: setup.cfg pyproject.toml tools/install.sh
	PYTHON=$(PYTHON) VENV=$(VENV) bash tools/install.sh $*
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info
