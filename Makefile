# One word per chore, the same for people and for CI. Every target sets itself up on a fresh machine.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.stamp-setup
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

PACKAGES := plugrl-protocol plugrl-envs plugrl-env-client rlightning plugrl-server
SOURCES := $(PACKAGES:%=packages/%/src)
# These run beside simulators, which may have an older Python than the trainer.
CLIENT_SOURCES := $(filter packages/plugrl-protocol/% packages/plugrl-env%,$(SOURCES))
TOOLS := setuptools wheel hatchling editables pytest pytest-timeout pytest-cov pytest-xdist hypothesis psutil ruff mypy import-linter
# With the simulator families that tests and examples run, and the peer that tests compare with.
INSTALL := -e packages/plugrl-protocol[fast] -e packages/plugrl-envs[box2d,mujoco,atari,minatar] \
	-e packages/plugrl-env-client -e packages/rlightning[datasets,ray,video] -e packages/plugrl-server stable_baselines3

# A file's tests stay together: they share a server or a cluster.
SPREAD := --numprocesses auto --maxprocesses 4 --dist loadfile

# Small networks are fastest on one thread, and two runs side by side do not fight for the cores.
export OMP_NUM_THREADS ?= 1

.PHONY: setup demo check test test-slow coverage slim docs bench clean
.DELETE_ON_ERROR:

setup: $(STAMP)

$(STAMP): constraints.txt Makefile $(PACKAGES:%=packages/%/pyproject.toml)
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed; install it, or: make PYTHON=/path/to/python3.11"; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "$(PYTHON) is older than Python 3.11; use: make PYTHON=/path/to/python3.11"; exit 1; }
	test -x $(BIN)/python || "$(PYTHON)" -m venv $(VENV)
	$(PIP) $(TOOLS)
	$(PIP) --no-build-isolation $(INSTALL)
	@touch $@

demo: $(STAMP)   ## train CartPole-v1 until it is solved
	$(BIN)/rlightning train cartpole_ppo

check: $(STAMP)   ## style, types, architecture, sizes
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy $(SOURCES)
	$(BIN)/mypy --python-version 3.10 $(CLIENT_SOURCES)
	$(BIN)/lint-imports --no-cache
	$(BIN)/python scripts/size_budget.py

test: $(STAMP)   ## everything that is fast
	$(BIN)/pytest $(SPREAD) -m "not slow and not slim and not gpu"

test-slow: $(STAMP)   ## full-size faults and learning
	$(BIN)/pytest -m slow

coverage: $(STAMP)
	$(BIN)/pytest -m "not slow and not slim and not gpu" --cov --cov-report=term-missing:skip-covered

slim: $(STAMP)   ## the wheels, each alone in a fresh environment
	$(BIN)/pytest -m slim tests/test_slim_install.py

docs: $(STAMP)
	$(PIP) mkdocs-material
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --site-dir site

bench: $(STAMP)   ## every benchmark, at its full size: QUICK=--quick for a look
	@for file in $$(grep -l __main__ benchmarks/*.py); do echo "== $$file"; $(BIN)/python $$file $(QUICK) || exit 1; done

clean:
	rm -rf $(VENV) site dist build .mypy_cache .ruff_cache .pytest_cache
