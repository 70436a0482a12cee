# make serve            set everything up and start the server       (ARGS="--port 9000 …" goes to headrace serve)
# make test             set everything up and run the tests          (TESTS="tests/serving/core -k pages" picks some)
# make lint             ruff and mypy
# make check-NAME       a heavier bar; writes evidence/NAME.json      (make checks lists them)
# make simulate         seeds of the simulator: SEEDS=20000 SEED0=0, and 1,000 of fairness and of isolation; shrinks what fails
# make simulate-bugs    which seeds find which planted bug     (ARGS=--update renews the list that the tests start from)
# make aot-tpu          compile all kernels and whole steps for absent TPUs (ARGS="--chips v6e --only decode …"; --help)
# make aot-cuda         the same for an absent H100 and H200        (ARGS="--chips h100 --only decode …"; --help)
# make check-peers      llama-server and vLLM beside it on a CPU     (ARGS="--set llama_server=… --set vllm=… …")
# make check-plan       headrace plan by both compilers, against public measurements
# make autobahn         RFC 6455 by Autobahn's test suite, in an environment of its own with Python 2.7
# make protocol         write PROTOCOL.md from the message schema
# PYTHON=python3.13 picks the interpreter; one of another version than python3 gets a .venv-3.13 of its own.

PYTHON ?= python3
ARGS ?=
TESTS ?=
SEEDS ?= 20000
SEED0 ?= 0
SPECIAL_SEEDS ?= $(if $(filter-out 1,$(SEEDS)),1000,0)

version = $(shell $(1) -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)
python_version := $(call version,$(PYTHON))
ifeq ($(python_version),$(call version,python3))
VENV ?= .venv
else
VENV ?= .venv-$(python_version)
endif
BIN := $(VENV)/bin

CHECKS := golden metamorphic interpret load load-memory faults cases start bench mesh int8 hosts
CHECKS += journal fuzz cancels memory-slope
CHECKS += overload fairness gap
CHECKS += simulation isolation
CHECKS += probe native sanitizers
CHECKS += deterministic swap
CHECKS += activations
STRICT := bench core engine edge

.DEFAULT_GOAL := help
.PHONY: help serve test lint typecheck protocol aot-tpu aot-cuda check-plan check-peers autobahn checks venv venv-dev clean simulate simulate-bugs $(CHECKS:%=check-%)

help:
	@sed -n '/^#/!q; s/^# //p' Makefile

python:
	@test -n "$(python_version)" || { \
	  echo "headrace: '$(PYTHON)' does not run here; name a Python 3.11 or newer with PYTHON=…" >&2; exit 2; }
.PHONY: python

venv: python
	@$(PYTHON) scripts/make_venv.py $(VENV)

venv-dev: python
	@$(PYTHON) scripts/make_venv.py $(VENV) dev

serve: venv
	@exec $(BIN)/headrace serve $(ARGS)

# Two at a time: most tests wait for a compiler or another process on one core. Files stay whole: they share fixtures;
# the longest come first (tests/conftest.py).
test: venv-dev
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder $(TESTS)

lint: venv-dev typecheck
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# The import package is put together from several folders; mypy wants to see it as one tree.
typecheck: venv-dev
	@rm -rf .typecheck && mkdir -p .typecheck/headrace
	@ln -s ../../serving/package_root/__init__.py ../../serving/package_root/py.typed .typecheck/headrace/
	@for folder in model serving pallas_kernels sharding; do ln -s ../../$$folder .typecheck/headrace/; done
	cd .typecheck && $(abspath $(BIN))/python -m mypy --config-file ../pyproject.toml \
	  --cache-dir ../.mypy_cache --python-executable $(abspath $(BIN))/python $(STRICT:%=-p headrace.serving.%)

protocol: venv-dev
	$(BIN)/python scripts/make_protocol.py

simulate: venv-dev
	@mkdir -p evidence
	$(BIN)/python -m scripts.simulate --seeds $(SEEDS) --seed0 $(SEED0) --fairness $(SPECIAL_SEEDS) \
	  --isolation $(SPECIAL_SEEDS) --out evidence/simulate.json $(ARGS)

simulate-bugs: venv-dev
	@mkdir -p evidence
	$(BIN)/python -m scripts.simulate_bugs --out evidence/simulate-bugs.json $(ARGS)

# libtpu, the TPU's compiler, comes with the tpu extra, at the version that jax[tpu] pins.
aot-tpu: python
	@$(PYTHON) scripts/make_venv.py $(VENV)-aot-tpu tpu
	$(VENV)-aot-tpu/bin/python -m scripts.aot_tpu --out evidence/aot-tpu.json $(ARGS)

# The CUDA plugin compiles without a driver; the script adds it, and ptxas, at the version of JAX.
aot-cuda: python
	@$(PYTHON) scripts/make_venv.py $(VENV)-aot-cuda
	$(VENV)-aot-cuda/bin/python -m scripts.aot_cuda --install --out evidence/aot-cuda.json $(ARGS)

# Both compilers, each in its environment.
check-plan: python
	@$(PYTHON) scripts/make_venv.py $(VENV)-aot-tpu tpu
	@$(PYTHON) scripts/make_venv.py $(VENV)-aot-cuda
	@mkdir -p evidence
	$(VENV)-aot-tpu/bin/python -m scripts.check_plan --cuda-python $(abspath $(VENV))-aot-cuda/bin/python --install \
	  --out evidence/plan.json $(ARGS)

# The suite and the old packages that it needs stay outside the project's environment.
autobahn: venv-dev
	@mkdir -p evidence
	$(BIN)/python -m scripts.check_autobahn --folder $(VENV)-autobahn --table scripts/autobahn/results.md \
	  --out evidence/autobahn.json $(ARGS)

# llama-server and vLLM beside headrace on a CPU; scripts/peers/README.md says how to get them and how ARGS names them.
check-peers: venv-dev
	@mkdir -p evidence
	$(BIN)/python -m scripts.check_peers --out evidence/peers.json $(ARGS)

checks:
	@printf 'make check-%s\n' $(CHECKS) plan peers

$(CHECKS:%=check-%): check-%: venv-dev
	@mkdir -p evidence
	$(BIN)/python -m scripts.check_$(subst -,_,$*) --out evidence/$*.json

clean:
	rm -rf .typecheck .mypy_cache .ruff_cache .pytest_cache
