# What contributors type and what CI runs. `make help` lists the targets.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
CODE := $(wildcard src tests scripts examples benchmarks)

# Tests start hundreds of processes that import this package: each module is compiled once, not by each of them.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help venv demo notebook test test-quick test-part-local test-part-remote test-part-server test-part-packages test-spot test-heavy test-long test-all rows fuzz crash network upgrade-check check sim format docs bench picture gpu-check clean distclean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo "Another interpreter: make venv PYTHON=python3.12"

venv: $(VENV)/.installed ## create .venv with pinned dependencies and this package (instant when nothing changed)
	@:

$(VENV)/.installed: pyproject.toml constraints.txt
	@command -v "$(PYTHON)" >/dev/null || { echo "error: there is no '$(PYTHON)' here"; \
		echo "hint: name a Python >= 3.11: make venv PYTHON=/path/to/python3"; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "error: $(PYTHON) is $$("$(PYTHON)" -V 2>&1), and Python >= 3.11 is needed"; \
		echo "hint: name another one: make venv PYTHON=python3.12"; exit 1; }
	@"$(PYTHON)" -c 'import ensurepip, venv' 2>/dev/null || { \
		echo "error: $(PYTHON) lacks venv or ensurepip"; \
		echo "hint: on Debian and Ubuntu they are in the package python3-venv"; exit 1; }
	@test -x $(BIN)/pip || { echo "creating $(VENV) with $$("$(PYTHON)" -V)"; "$(PYTHON)" -m venv $(VENV); }
	@echo "installing into $(VENV): this package, torch, numpy, the development tools (once; minutes when not cached)"
	@$(INSTALL) -e '.[dev,torch]'
	@touch $@

$(VENV)/.installed-bench: $(VENV)/.installed
	@echo "installing into $(VENV): what the benchmarks compare with"
	@$(INSTALL) -e '.[bench]'
	@touch $@

$(VENV)/.installed-examples: $(VENV)/.installed
	@echo "installing into $(VENV): what the examples with transformers, peft and accelerate need"
	@$(INSTALL) -e '.[examples]'
	@touch $@

$(VENV)/.installed-notebook: $(VENV)/.installed
	@echo "installing into $(VENV): JupyterLab"
	@$(INSTALL) -e '.[notebook]'
	@touch $@

# MLflow caps its neighbours' versions and changes what a run does, so tests use it as users have it: in an environment
# of its own, which sees ours behind its own packages.
$(VENV)/.installed-mlflow: $(VENV)/.installed
	@echo "installing into $(VENV)/mlflow: MLflow and Lightning, for tests of tracking"
	@$(BIN)/python -m venv $(VENV)/mlflow
	@$(BIN)/python -c 'import site; print(f"import site; site.addsitedir({site.getsitepackages()[0]!r})")' \
		> "$$($(VENV)/mlflow/bin/python -c 'import site; print(site.getsitepackages()[0])')/serverless_gpu_tests.pth"
	@$(VENV)/mlflow/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt 'mlflow' lightning
	@touch $@

# Ray, too: `ray_launch` takes the one of the user's environment, and the bare package has to work without any.
$(VENV)/.installed-ray: $(VENV)/.installed
	@echo "installing into $(VENV)/ray: Ray, for tests of ray_launch"
	@$(BIN)/python -m venv $(VENV)/ray
	@$(BIN)/python -c 'import site; print(f"import site; site.addsitedir({site.getsitepackages()[0]!r})")' \
		> "$$($(VENV)/ray/bin/python -c 'import site; print(site.getsitepackages()[0])')/serverless_gpu_tests.pth"
	@$(VENV)/ray/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt 'ray[default,data,train,tune]'
	@touch $@

# Libraries of the programs that users write: they make an environment of their own, which sees ours behind its packages.
$(VENV)/.installed-programs: $(VENV)/.installed-examples
	@echo "installing into $(VENV)/programs: TRL, Lightning, Hydra, XGBoost and others, for tests of users' programs"
	@$(BIN)/python -m venv $(VENV)/programs
	@$(BIN)/python -c 'import site; print(f"import site; site.addsitedir({site.getsitepackages()[0]!r})")' \
		> "$$($(VENV)/programs/bin/python -c 'import site; print(site.getsitepackages()[0])')/serverless_gpu_tests.pth"
	@$(BIN)/python -c 'import tomllib; extras = tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]; \
		print(*extras["programs"], sep="\n")' > $(VENV)/programs/requirements.txt
	@$(VENV)/programs/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
		-r $(VENV)/programs/requirements.txt
	@touch $@

notebook: $(VENV)/.installed-notebook ## open the quickstart in JupyterLab
	@$(BIN)/jupyter lab $(if $(filter 0,$(shell id -u)),--allow-root) examples/quickstart.ipynb

demo: venv ## train a small model on 2 ranks, no GPU needed
	@$(BIN)/python examples/digits_ddp.py

test-quick: venv ## run the unit tests: no processes, sockets or databases; less than a minute
	@$(BIN)/python -m pytest --quiet --numprocesses=2 tests/unit

ifdef PKG
PACKAGE_TESTS := $(wildcard tests/unit/$(PKG) tests/integration/$(PKG))

test: venv
	@test -n "$(PACKAGE_TESTS)" || { echo "error: no tests of a package '$(PKG)'"; \
		echo "hint: name a folder below tests/unit or tests/integration: make test PKG=server/budgets"; exit 1; }
	@$(BIN)/python -m pytest $(PACKAGE_TESTS)
else
# Each part's output comes whole when the part has ended; until then progress lines come past make, by descriptor 9.
test: venv ## run all tests but the long and the heavy ones; PKG=server/budgets: those of one package
	@exec 9>&1; TEST_PROGRESS_FD=9 \
		$(MAKE) --no-print-directory --output-sync=target --keep-going -j$(words $(PARTS)) $(PARTS)
endif

# Most tests wait for processes: parts of them at once take little more than one. pytest-xdist does only for unit tests:
# its workers have threads, and other tests fork.
PARTS := test-part-local test-part-remote test-part-server test-part-packages
LOCAL := tests/e2e/local/
SERVER := tests/integration/server/
PAGES := tests/integration/server/web/

test-part-local:
	TEST_PART=local $(BIN)/python -m pytest $(LOCAL) $(PAGES)

test-part-remote:
	TEST_PART=remote $(BIN)/python -m pytest $(filter-out $(LOCAL) %/__pycache__/,$(wildcard tests/e2e/*/))

test-part-server:
	TEST_PART=server $(BIN)/python -m pytest $(SERVER) --ignore=$(PAGES)

test-part-packages:
	TEST_PART=packages $(BIN)/python -m pytest tests/unit $(filter-out $(SERVER) %/__pycache__/,$(wildcard tests/integration/*/ tests/integration/test_*.py))

SPOT := $(VENV)/.installed-examples $(VENV)/.installed-mlflow $(VENV)/.installed-ray
HEAVY := $(SPOT) $(VENV)/.installed-programs

# One after the other: where other tests have the cores, Ray's processes do not meet in the 15 s that Ray gives them.
test-spot: $(SPOT) ## run some of the heavy and of the long tests: one of each kind
	$(BIN)/python -m pytest -m spot tests/e2e

test-all: test test-heavy test-long ## run all tests but those that need a GPU: an hour and a half

test-heavy: $(HEAVY) ## run the tests that need more packages: most examples, users' programs, MLflow, Ray
	$(BIN)/python -m pytest -m "heavy and not long and not gpu"

test-long: venv ## run the long tests: simulation, crash, network, rows, fuzz, chaos, load
	$(BIN)/python -m pytest -m "long and not gpu"

network: venv ## networks that break, wrong clocks, nodes of the protocol before (namespaces: needs root)
	$(BIN)/python -m pytest -m "not gpu" tests/e2e/network tests/integration/server/http/test_upgrade.py \
		tests/integration/server/operations/test_clocks.py tests/unit/server/operations/test_steady.py

upgrade-check: venv ## the node of the commit before, a run across the upgrade of its server (needs git history)
	@$(BIN)/python -m scripts.upgrade_check

rows: venv ## full disks, a machine without memory, a process that cannot be ended (needs root to make them)
	$(BIN)/python -m pytest -m "not gpu" tests/e2e/rows tests/e2e/local/test_host_memory.py

fuzz: venv ## garbage at every socket and route, with fresh examples, for minutes
	FUZZ_EXAMPLES=200 $(BIN)/python -m pytest -m "not gpu" --hypothesis-profile=long -o timeout=1800 \
		tests/e2e/fuzz tests/unit/client/display/test_terminal.py

crash: venv ## kill server and node at every named place, on SQLite and PostgreSQL; full disks, conflicts, two servers
	$(BIN)/python -m pytest -m "not gpu" tests/e2e/crash

.PHONY: chaos
chaos: venv ## clients, a server and two nodes under faults: make chaos SEED=7 SECONDS=600 DATABASE=postgresql
	@$(BIN)/python -m tests.e2e.chaos --seed $(or $(SEED),1) --seconds $(or $(SECONDS),600) --database $(or $(DATABASE),sqlite)

sim: $(VENV)/.installed ## simulate server, nodes and clients: make sim SEEDS=20000 FIRST=0 STEPS=60 JOBS=2
	@$(BIN)/python -m tests.e2e.simulation --seeds $(or $(SEEDS),2000) --first $(or $(FIRST),0) --steps $(or $(STEPS),60) --jobs $(or $(JOBS),2)

check: venv ## format, lint, types, layers, our own lints, links
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/ruff check $(CODE)
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/python -m scripts.lints
	$(BIN)/python -m scripts.lints.links

format: venv ## rewrite the code in its canonical format
	$(BIN)/ruff check --fix-only --quiet $(CODE)
	$(BIN)/ruff format $(CODE)

$(VENV)/.installed-site: $(VENV)/.installed
	@echo "installing into $(VENV): Sphinx and the theme of the documentation site"
	@$(INSTALL) -e '.[site]'
	@touch $@

site: $(VENV)/.installed-site ## build the documentation site in build/site; warnings and broken links fail
	@$(BIN)/python -m scripts.site

docs: venv ## write the pages that are made from code (docs/troubleshooting.md, docs/openapi.json)
	@$(BIN)/python -m scripts.troubleshooting
	@$(BIN)/python -m scripts.openapi

bench: $(VENV)/.installed-bench $(VENV)/.installed-mlflow $(VENV)/.installed-ray ## run the benchmarks, each against its neighbour in the same run
	@$(BIN)/python -m benchmarks

.PHONY: operation
operation: venv ## restart, back up and restore a server that works, 30 times each; systemd, TLS
	OPERATION_TIMES=30 $(BIN)/python -m pytest -s tests/integration/server/operations \
		tests/integration/server/http/test_proxy_middleware.py tests/integration/server/http/test_tls.py \
		tests/integration/server/db/test_migrations.py tests/e2e/remote/test_operation.py tests/e2e/remote/test_tls.py

.PHONY: bench-check load
bench-check: $(VENV)/.installed-bench ## compare the quick rows with benchmarks/ranges.json; fails when one is a fifth slower
	@$(BIN)/python -m benchmarks --check

load: venv ## put load on a server: 2,000 runs, 10,000 ranks, a flood, 10 GB, 1,000 slow connections, a log in a browser (20 min, 20 GB of disk)
	@$(BIN)/python -m benchmarks --only load-runs --only load-ranks --only load-flood --only load-upload --only load-slow --only load-log

picture: venv ## record the terminal picture of the README again (docs/images/terminal.svg)
	@$(BIN)/python -m scripts.picture

gpu-check: venv ## check what only a real GPU can show (says so and stops without one)
	@$(BIN)/python -m scripts.gpu_check

clean: ## remove caches and build output
	@rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache .coverage
	@find $(CODE) -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean ## also remove .venv
	@rm -rf $(VENV)
