# `make demo`: the main job on the embedded teacher. `make test`: every test. `make docs`: the site. All set up .venv first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RUN ?= runs/demo

.PHONY: demo test test-fast test-slow test-transformers lint docs clean

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,lora,docs]'
	touch $@

demo: $(VENV)/.installed
	$(BIN)/regraft demo --out $(RUN)

test: test-fast test-slow

# Two workers of one thread each: what two cores give.
test-fast: $(VENV)/.installed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m "not slow"

test-slow: $(VENV)/.installed
	$(BIN)/python -m pytest -m slow

# What depends on transformers, with another version of it: make test-transformers TRANSFORMERS=5.20.0
test-transformers: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade \
		--target $(CURDIR)/build/transformers-$(TRANSFORMERS) transformers==$(TRANSFORMERS)
	PYTHONPATH=$(CURDIR)/build/transformers-$(TRANSFORMERS) $(BIN)/python -m pytest \
		tests/test_transformers.py tests/test_layers.py tests/test_convert_export.py

lint: $(VENV)/.installed
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

# The site, in build/site; NO_MKDOCS_2_WARNING is about a version that is not used.
docs: $(VENV)/.installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

clean:
	rm -rf $(VENV) build dist  # runs are yours
