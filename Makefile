# Two commands: `make serve` and `make test`. Both are complete on a fresh clone with Python 3.11 or newer and g++.
# The second time nothing is installed or built again unless its inputs changed.

PYTHON ?=
VENV ?= .venv
HOST ?= 127.0.0.1
PORT ?= 8000
MODEL ?= demo
# tests run side by side, those of a file one after another
TEST_WORKERS ?= 2
FAST_TESTS := $(addprefix tests/,architecture/test_layers.py config core engine layers ops packaging/test_project_files.py platforms worker)
# more flags of the server, or of pytest:  make serve ARGS="--max-num-seqs 64"   make test ARGS="-k scheduler"
ARGS ?=

PY := $(VENV)/bin/python
STAMPS := $(VENV)/.stamps
# Machines that forbid Python to keep bytecode would compile what torch_npu and transformers import in each of the
# hundreds of processes that the tests start: a third of the time that such a process needs to begin.
unexport PYTHONDONTWRITEBYTECODE

# Without --no-compile pip turns thousands of modules into bytecode of which only a few are ever imported.
INSTALL := $(PY) -m pip install --no-build-isolation --no-compile
TORCH_NPU := $(shell grep -o 'torch_npu==[0-9.]*' pyproject.toml)
NATIVE_SOURCES := $(shell find csrc_ascend -path csrc_ascend/sim -prune -o -path csrc_ascend/npu -prune -o -type f \( -name '*.cpp' -o -name '*.h' -o -name '*.hpp' -o -name '*.py' \) -print 2>/dev/null)
# with the custom operators, whose bindings and kernels the tests run on the simulated runtime
SIM_SOURCES := $(shell find csrc_ascend/sim csrc_ascend/npu -type f 2>/dev/null) csrc_ascend/build.py
CLANG_FILES = $(shell find csrc_ascend -type f \( -name '*.cpp' -o -name '*.h' -o -name '*.hpp' \))

# in the order of tests/conftest.py, not that of the number of tests
PYTEST := $(PY) -m pytest -n $(TEST_WORKERS) --dist loadfile --no-loadscope-reorder
PYTEST_CPU = $(PYTEST) $(ALL) $(ARGS)
# the same suite in a process that sees simulated devices: tests/npu and nothing else
PYTEST_NPU = $(PY) -m ascend_vllm.entrypoints.cli sim-run $(SIM_FLAGS) -- $(PYTEST) -o testpaths=tests/npu $(ALL) $(ARGS)
# two devices of 1 GiB; a test that wants others starts a process of its own
SIM_FLAGS ?= --devices 2 --memory 1073741824 --sync-timeout 5

.DEFAULT_GOAL := help
.PHONY: help serve demo-adapter test test-all test-clients test-quantizers test-fast test-cpu test-npu test-arm test-asan test-tsan bench-gate lint format build clients npu sim docs clean distclean

help:
	@echo "make serve   start the server on http://$(HOST):$(PORT) with the demo model"
	@echo "make demo-adapter   train a LoRA adapter of the demo model, and print its directory (docs/lora.md)"
	@echo "make test    run the tests;  make test-cpu, make test-npu  run those on the CPU, those on simulated NPUs"
	@echo "make test-all   run them with every combination (pytest --all);  make test-fast  run those of small parts"
	@echo "make test-clients  run other people's clients, each in an environment of its own (gigabytes)"
	@echo "make test-quantizers  serve checkpoints that other people's tools quantize, each in an environment of its own"
	@echo "make test-asan  run the kernels' tests with AddressSanitizer and UBSan;  make test-tsan  those of threads with TSan"
	@echo "make test-arm   run the kernels' checks as an Arm processor, by qemu-user (g++-aarch64-linux-gnu), and import"
	@echo "                the package by Debian's Python for arm64 (downloads 300 MB into build/arm)"
	@echo "make bench-gate  is the working tree slower than a commit (BASE=COMMIT; default: where it left main)?"
	@echo "make lint    ruff, mypy and clang-format"
	@echo "make format  let ruff and clang-format rewrite the sources"
	@echo "make build   install everything and build the kernels, run nothing"
	@echo "make clients install the clients that the tests use"
	@echo "make sim     install torch_npu beside the environment and build the simulated Ascend runtime"
	@echo "make docs    write docs/flags.md, docs/environment.md, docs/models.md and docs/performance.md again"
	@echo "make clean   remove what was built;  make distclean  remove the virtual environment too"

serve: build
	@echo
	@echo "When the server says \"Application startup complete\", try in another terminal:"
	@echo
	@echo "  curl http://$(HOST):$(PORT)/v1/chat/completions -H 'Content-Type: application/json' \\"
	@echo "    -d '{\"model\": \"$(MODEL)\", \"messages\": [{\"role\": \"user\", \"content\": \"What does --block-size do?\"}], \"temperature\": 0}'"
	@echo
	@echo "or open http://$(HOST):$(PORT)/ui in a browser."
	@echo
	@exec $(PY) -m ascend_vllm.entrypoints.openai.api_server --model $(MODEL) --host $(HOST) --port $(PORT) $(ARGS)

# the demo model, too, unless it is there
demo-adapter: build
	$(PY) -m ascend_vllm.tools.demo.adapter

# Both suites run, so that one round shows every failure. With ARGS a suite may have no test left (exit code 5).
# --all, of test-all: every combination. The digest says what the simulator's own tests have passed with.
test-all: ALL := --all
test test-all: build $(STAMPS)/test clients sim
	@# trained before the tests, once: beside them its threads would wait for one another most of the time
	$(PY) -m ascend_vllm.entrypoints.cli demo
	@cpu=0; npu=0; run() { echo "$$@"; "$$@"; }; \
	run $(PYTEST_CPU) || cpu=$$?; \
	run $(PYTEST_NPU) || npu=$$?; \
	if [ "$$npu$(ALL)$(ARGS)" = 0--all ]; then run $(PY) tests/npu/simulator.py; fi; \
	case "$$cpu $$npu" in "0 0"|"0 5"|"5 0") ;; *) exit 1 ;; esac

# for a change in progress: parts that need no server, and of them the files that take little time
test-fast: build $(STAMPS)/test
	$(PYTEST) -m "not slow" --file-seconds 5 $(FAST_TESTS) $(ARGS)

test-cpu: build $(STAMPS)/test clients
	$(PY) -m ascend_vllm.entrypoints.cli demo
	$(PYTEST_CPU)

test-npu: build $(STAMPS)/test sim
	$(PYTEST_NPU)

# Every client of tests/clients, those of Node only where there is npm; not part of test-all, for what they need takes
# gigabytes. -s: what each client saw is printed.
PYTHON_CLIENTS := $(patsubst tests/clients/%/requirements.txt,%,$(wildcard tests/clients/*/requirements.txt))
NODE_CLIENTS := $(if $(shell command -v npm),$(patsubst tests/clients/%/package.json,%,$(wildcard tests/clients/*/package.json)))
test-clients: build $(STAMPS)/test $(PYTHON_CLIENTS:%=$(STAMPS)/client-%) $(NODE_CLIENTS:%=$(STAMPS)/client-%)
	$(PY) -m ascend_vllm.entrypoints.cli demo
	$(PY) -m pytest -n 0 -s tests/clients/all_clients.py $(ARGS)

# Tools that quantize, each with its own torch, of PyPI; not part of test-all either.
QUANTIZERS := $(patsubst tests/quantizers/%/requirements.txt,%,$(wildcard tests/quantizers/*/requirements.txt))
test-quantizers: build $(STAMPS)/test $(QUANTIZERS:%=$(STAMPS)/quantizer-%)
	$(PY) -m pytest -n 0 tests/quantizers/all_quantizers.py $(ARGS)

# with every set, those of NEON and scalar; then the Python package, by Debian's Python for arm64
test-arm: build $(STAMPS)/test
	$(PY) -m pytest -n 0 --all tests/ops/test_kernels_on_arm.py $(ARGS)
	$(PY) scripts/check_arm_package.py

# Kernels that check themselves, in a copy of the tree: the package's own library stays as it is. The sanitizer's runtime
# library comes first in every process that the tests start, and libstdc++ beside it, which it needs for exceptions.
# Addresses are not random: TSan may not find room for its tables among them.
# $(1): name of the runtime library, $(2): as behind -fsanitize=, $(3): its options, $(4): tests
SANITIZED := build/sanitized
gnu_library = $(shell $${CXX:-g++} -print-file-name=$(1))
define run_sanitized
	rm -rf $(SANITIZED)/$(1)
	mkdir -p $(SANITIZED)/$(1)
	cp -r ascend_vllm tests csrc_ascend pyproject.toml $(SANITIZED)/$(1)
	rm -rf $(SANITIZED)/$(1)/ascend_vllm/_C.so $(SANITIZED)/$(1)/ascend_vllm/_sim
	$(PY) csrc_ascend/build.py --sanitize $(2) --output $(SANITIZED)/$(1)/ascend_vllm/_C.so
	cd $(SANITIZED)/$(1) && exec setarch -R env $(3) PYTHONPATH="$$PWD" \
	  LD_PRELOAD="$(call gnu_library,lib$(1).so) $(call gnu_library,libstdc++.so.6)" \
	  $(abspath $(PY)) -m pytest -n 0 -p no:cacheprovider $(4) $(ARGS)
endef
comma := ,

# test_native_build.py compiles libraries of its own
ASAN_TESTS := tests/ops tests/worker/test_tape_runner.py tests/worker/test_block_mover.py --ignore tests/ops/test_native_build.py
test-asan: build $(STAMPS)/test
	$(call run_sanitized,asan,address$(comma)undefined,ASAN_OPTIONS=detect_leaks=0,$(ASAN_TESTS))

# What is not built with it, torch and libgomp above all, would be reported for synchronisation that it cannot see. Left
# out is the test of a fork, whose child may start no threads under TSan.
TSAN_TESTS := tests/ops/test_team.py tests/ops/test_tapes.py --deselect tests/ops/test_team.py::test_a_fork_has_threads_of_its_own
test-tsan: build $(STAMPS)/test
	$(call run_sanitized,tsan,thread,TSAN_OPTIONS=ignore_noninstrumented_modules=1:die_after_fork=0,$(TSAN_TESTS))

# some minutes on a machine that does nothing else; exits with an error if a row fell by more than its noise
BASE ?=
bench-gate: build
	$(PY) benchmarks/bench_gate.py $(if $(BASE),--base $(BASE)) $(ARGS)

# every linter runs, so that one round shows all there is to mend
lint: build $(STAMPS)/dev
	@status=0; check() { echo "$$@"; "$$@" || status=1; }; \
	check $(PY) -m ruff check .; \
	check $(PY) -m ruff format --check .; \
	check $(PY) -m mypy; \
	check $(VENV)/bin/clang-format --dry-run -Werror $(CLANG_FILES); \
	exit $$status

format: $(STAMPS)/dev
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .
	$(VENV)/bin/clang-format -i $(CLANG_FILES)

build: $(STAMPS)/native $(STAMPS)/package

# other people's clients, which tests/clients lets talk to the server
clients: $(STAMPS)/clients

docs: $(STAMPS)/package
	$(PY) scripts/make_flags_doc.py
	$(PY) scripts/make_environment_doc.py
	$(PY) scripts/make_models_doc.py
	$(PY) scripts/make_performance_doc.py

# torch comes before anything that depends on it, so that nothing pulls another version or build of it
$(STAMPS)/torch: scripts/create_venv.sh
	PYTHON="$(PYTHON)" scripts/create_venv.sh $(VENV)
	@mkdir -p $(STAMPS) && touch $@

# the kernels before the package: pip would build them too, but without the progress bar
$(STAMPS)/native: $(STAMPS)/torch $(NATIVE_SOURCES)
	$(PY) csrc_ascend/build.py
	@touch $@

# order only: new kernels are found in place, the package need not be installed again for them
$(STAMPS)/package: $(STAMPS)/torch pyproject.toml setup.py | $(STAMPS)/native
	$(INSTALL) -e .
	@touch $@

$(STAMPS)/test: $(STAMPS)/package
	$(INSTALL) -e '.[test]'
	@touch $@

# an environment of its own, for these clients ask for other versions of what the server uses
$(STAMPS)/clients: tests/clients/requirements.txt | $(STAMPS)/torch
	$(PY) -m venv $(VENV)/clients
	$(VENV)/clients/bin/python -m pip install --no-compile -r $<
	@touch $@

$(PYTHON_CLIENTS:%=$(STAMPS)/client-%): $(STAMPS)/client-%: tests/clients/%/requirements.txt | $(STAMPS)/torch
	$(PY) -m venv --without-pip $(VENV)/clients/$*
	@# torch as it is here: the one of PyPI brings gigabytes of CUDA
	if grep -q '^torch==' $<; then ln -sfn $(abspath $(wildcard $(VENV)/lib/python3*/site-packages/torch*)) $(VENV)/clients/$*/lib/python3*/site-packages; fi
	$(PY) -m pip --python $(VENV)/clients/$*/bin/python install --no-compile -r $<
	@touch $@

$(QUANTIZERS:%=$(STAMPS)/quantizer-%): $(STAMPS)/quantizer-%: tests/quantizers/%/requirements.txt | $(STAMPS)/torch
	$(PY) -m venv $(VENV)/quantizers/$*
	$(VENV)/quantizers/$*/bin/python -m pip install --no-compile -r $<
	@touch $@

$(NODE_CLIENTS:%=$(STAMPS)/client-%): $(STAMPS)/client-%: tests/clients/%/package-lock.json | $(STAMPS)/torch
	mkdir -p $(VENV)/clients/$*
	cp tests/clients/$*/package.json tests/clients/$*/package-lock.json $(VENV)/clients/$*
	cd $(VENV)/clients/$* && npm ci --ignore-scripts --no-audit --no-fund
	@touch $@

# beside the environment: an ordinary process must not find it, since torch would import it
npu: $(STAMPS)/npu
$(STAMPS)/npu: pyproject.toml | $(STAMPS)/torch
	rm -rf $(VENV)/npu
	$(PY) -m pip install --no-compile --no-deps --target $(VENV)/npu $(TORCH_NPU) decorator attrs
	@touch $@

sim: $(STAMPS)/sim
$(STAMPS)/sim: $(STAMPS)/npu $(SIM_SOURCES) | $(STAMPS)/package
	$(PY) csrc_ascend/sim/build.py
	@touch $@

$(STAMPS)/dev: $(STAMPS)/package
	$(INSTALL) -e '.[dev]'
	@touch $@

clean:
	rm -rf build dist *.egg-info ascend_vllm/*.so ascend_vllm/_sim ascend_vllm/_npu $(addprefix $(STAMPS)/,native package test dev clients client-* quantizer-* npu sim)
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis

distclean: clean
	rm -rf $(VENV)
