# make demo   installs into .venv and runs the main job on real data
# make test   installs into .venv and runs the suite
# PIP_ARGS    options for pip, e.g. PIP_ARGS="--extra-index-url https://download.pytorch.org/whl/cpu"
PYTHON ?= python3
PIP_ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: demo demo-train test check bench clean

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "WideBeam needs Python 3.11 or newer: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev,demo]' $(PIP_ARGS)
	touch $@

demo: $(INSTALLED)
	$(BIN)/python examples/movielens/demo.py $(if $(PIP_ARGS),--pip-args="$(PIP_ARGS)")

demo-train: $(INSTALLED)
	$(BIN)/python examples/movielens/train.py $(if $(PIP_ARGS),--pip-args="$(PIP_ARGS)")

test: $(INSTALLED)
	$(BIN)/python -m pytest -q

check: $(INSTALLED)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: $(INSTALLED)
	$(BIN)/python bench/random_checkpoint.py qwen3-0.6b build/qwen3-0.6b
	$(BIN)/python bench/offline.py build/qwen3-0.6b --cases 500x1 --width 64 --repeats 3

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
