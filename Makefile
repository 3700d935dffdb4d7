# `make demo`: the main job on the embedded teacher. `make test`: every test. Both set up .venv first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RUN ?= runs/demo

.PHONY: demo test test-fast test-slow lint clean

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,lora]'
	touch $@

demo: $(VENV)/.installed
	$(BIN)/regraft demo --out $(RUN)

test: test-fast test-slow

# Two workers of one thread each: what two cores give.
test-fast: $(VENV)/.installed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m "not slow"

test-slow: $(VENV)/.installed
	$(BIN)/python -m pytest -m slow

lint: $(VENV)/.installed
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

clean:
	rm -rf $(VENV) runs build dist
