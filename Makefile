# One command each: `make demo` shows vime at work, `make test` proves it.
# Every target makes the environment it needs; a second run installs nothing.

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
EVAL   ?= fleet

# What torch compiles when an engine starts on a CPU is the same each time: engines of different
# runs find it here, instead of in a temporary directory of their own.
export TORCHINDUCTOR_CACHE_DIR ?= $(abspath $(VENV))/inductor

.PHONY: venv demo demo-ray picture bench chaos kills test test-fast test-slow test-real lint docs browser clean

venv: $(STAMP)

# Bytecode is made on all cores, which pip does not; some packages carry files that are no Python.
$(STAMP): requirements/cpu.lock pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-compile \
		-r requirements/cpu.lock
	$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	touch $@

demo: venv
	$(BIN)/python examples/train.py --demo $(EVAL)

# The same on a Ray cluster of logical GPUs: a training, a rollout and an eval region.
demo-ray: venv
	$(BIN)/python examples/ray_train.py --demo fleet

# The README's picture is the curve of a demo run.
picture: demo
	cp runs/latest/curve.png docs/demo.png

# Every benchmark, some fifteen minutes on an idle machine: figures, pictures, and the tables of the
# README and docs/bench.md. One that fails leaves the others' figures; NAMES="stall pin" runs these.
bench: venv
	$(BIN)/python -m bench.suite $(NAMES)

# What is generated from the code; tests fail when it drifts.
docs: venv
	$(BIN)/python -m vime.fsm.diagram docs/states.md
	$(BIN)/python -m vime.eval.config.flags_doc docs/flags.md

# A headless browser for the test of the exported page (Debian, Ubuntu).
browser:
	command -v chromium >/dev/null && command -v chromedriver >/dev/null || \
		{ apt-get update -qq && apt-get install -y -qq chromium chromium-driver; }

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Breaks a run on real engines in every way, and recomputes its scores: 15 minutes on two cores.
# `make chaos SEED=7` repeats a schedule.
chaos: venv
	$(BIN)/python -m bench.chaos $(if $(SEED),--seed $(SEED))

test: lint test-fast test-slow test-real

test-fast: venv
	$(BIN)/pytest -m "not real and not slow" -n 2 -q

test-slow: venv
	$(BIN)/pytest -m "slow and not real" -n 2 --dist loadscope --no-loadscope-reorder -q

# An engine that starts keeps one core busy, and whoever waits for it none: two cores have room for
# three workers.
test-real: venv
	$(BIN)/pytest -m real -n 3 --dist loadscope --no-loadscope-reorder -q

# Kills the demo's driver five times and resumes it each time; some five minutes.
kills: venv
	VIME_REAL_KILLS=5 $(BIN)/pytest -q tests/journal/test_real_kills.py

clean:
	rm -rf $(VENV) build dist
