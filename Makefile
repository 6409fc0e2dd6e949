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

# Two processes: many tests wait for servers of their own. WORKERS=0 runs one, to debug in.
WORKERS ?= 2
test: $(INSTALLED)
	$(BIN)/python -m pytest -q -n $(WORKERS) --dist loadfile

check: $(INSTALLED)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: $(INSTALLED)
	$(BIN)/python bench/random_checkpoint.py qwen3-0.6b build/qwen3-0.6b
	$(BIN)/python bench/offline.py build/qwen3-0.6b --cases 500x1 --width 64 --repeats 3

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

# make memcheck  on a GPU: our kernels under compute-sanitizer, of CUDA or of the package nvidia-cuda-sanitizer-api
#                (13.1 or later: 13.0 comes without its launcher)
.PHONY: memcheck
SANITIZER ?= compute-sanitizer
memcheck:
	PYTORCH_NO_CUDA_MEMORY_CACHING=1 $(SANITIZER) --tool memcheck --error-exitcode 9 $(PYTHON) -m pytest -q -m gpu \
	  tests/engine/test_segment_top.py tests/model/test_ops.py tests/model/test_row_attention.py \
	  -k "(kernels or on_cuda) and not graph"

# make nightly   on a GPU: every benchmark of one device, into build/nightly/, and one summary, build/nightly.md. One that
#                fails stops no other: it is named at the top of the summary, and the status is not 0
# PYTHON         must have widebeam's dependencies with the extra cuda; nothing is installed
# OLD            copy of an earlier night's folder: fails if a case became slower or less accurate
# PEER           URL of an SGLang-compatible server of build/qwen3-1.7b, which is compared with ours; PEER_ARGS: options
#                for bench/peers.py, and behind -- for our server, which needs its share of the memory beside one on
#                the same GPU: PEER_ARGS="--dialects sglang n -- --gpu-memory-utilization 0.4"
.PHONY: nightly
NIGHTLY := build/nightly
ITEMS := build/items.parquet
FEW_ITEMS := build/few-items.parquet
OFFLINE = $(PYTHON) bench/offline.py --matrix --floor
MOVIES = $(PYTHON) bench/accuracy.py examples/movielens/checkpoint --cases 97x64x64 193x16x256
RANDOM = $(PYTHON) bench/accuracy.py build/qwen3-1.7b --cases 200x8x64 1000x2x256
BREAKDOWN = $(PYTHON) bench/breakdown.py build/qwen3-1.7b --cases 1000x1 5000x1 5000x4
SOAK = $(PYTHON) bench/soak.py --vary --requests 10000 --minutes 5 --concurrency 32 --context 2000 --tokens 5
# $(call night,NAME,COMMAND,MORE): one benchmark; MORE comes behind --save
night = $(2) --save $(NIGHTLY)/$(1).json $(3) || echo $(1) >> $(NIGHTLY)/failed
NEEDS_CUDA = import importlib.util as u, sys; \
  sys.exit(None if u.find_spec("torch") and __import__("torch").cuda.is_available() else \
  "make nightly needs a CUDA device and a PyTorch that sees it; there is none for " + sys.executable)

nightly: export PYTHONPATH := $(CURDIR):$(PYTHONPATH)
nightly:
	@$(PYTHON) -c '$(NEEDS_CUDA)'
	@test -z "$(OLD)" || ls $(OLD)/*-offline-*.json
	rm -rf $(NIGHTLY)
	for shape in qwen3-tiny qwen3-0.6b qwen3-1.7b qwen3-4b; do \
	  test -f build/$$shape/config.json || $(PYTHON) bench/random_checkpoint.py $$shape build/$$shape || exit 1; done
	test -f $(ITEMS) || $(PYTHON) bench/random_catalog.py $(ITEMS)
	test -f $(FEW_ITEMS) || $(PYTHON) bench/random_catalog.py $(FEW_ITEMS) --items 10000 --levels 4 --codes 256
	mkdir -p $(NIGHTLY)
	$(call night,1-offline-bf16,$(OFFLINE) build/qwen3-1.7b)
	$(call night,2-offline-fp8-catalog,$(OFFLINE) build/qwen3-1.7b --quantization fp8 --catalog $(ITEMS))
	$(call night,3-offline-0.6b,$(OFFLINE) build/qwen3-0.6b)
	$(call night,4-offline-4b,$(OFFLINE) build/qwen3-4b)
	$(call night,5-floor-bf16,$(PYTHON) bench/floor.py qwen3-1.7b)
	$(call night,6-floor-fp8-catalog,$(PYTHON) bench/floor.py qwen3-1.7b --fp8 --codes 8192)
	$(call night,7-breakdown-bf16,$(BREAKDOWN))
	$(call night,8-breakdown-fp8-catalog,$(BREAKDOWN) --quantization fp8 --catalog $(ITEMS))
	$(call night,9-launching,$(PYTHON) bench/launching.py build/qwen3-1.7b)
	$(call night,9-catalog,$(PYTHON) bench/catalog.py build/qwen3-0.6b)
	$(call night,9-history,$(PYTHON) bench/history.py build/qwen3-1.7b --host-gib 64,-- --max-total-tokens 200000)
	$(call night,9-starts,$(PYTHON) bench/starts.py build/qwen3-1.7b)
	$(call night,9-online,$(PYTHON) bench/online.py --checkpoint build/qwen3-1.7b --concurrency 4 8)
	$(call night,9-soak,$(SOAK) build/qwen3-tiny,-- --catalog items=$(ITEMS) few=$(FEW_ITEMS) --log-level warning)
	$(if $(PEER),$(call night,9-peers,$(PYTHON) bench/peers.py $(PEER) --checkpoint build/qwen3-1.7b,$(PEER_ARGS)))
	$(call night,9-accuracy-movielens,$(MOVIES))
	$(call night,9-accuracy-movielens-fp8,$(MOVIES) --quantization fp8)
	$(call night,9-accuracy-movielens-fp8-kv,$(MOVIES) --kv-cache-dtype fp8)
	$(call night,9-accuracy-random-1.7b,$(RANDOM))
	$(call night,9-accuracy-random-1.7b-fp8,$(RANDOM) --quantization fp8)
	$(call night,9-accuracy-random-1.7b-fp8-kv,$(RANDOM) --kv-cache-dtype fp8)
	@{ test ! -f $(NIGHTLY)/failed || { echo '## Failed'; echo; cat $(NIGHTLY)/failed; echo; }; \
	  for part in $(NIGHTLY)/*.md; do printf '## %s\n\n' $$(basename $$part .md); cat $$part; echo; done; \
	} > build/nightly.md
	@status=0; test ! -f $(NIGHTLY)/failed || status=1; \
	  for old in $(if $(OLD),$(wildcard $(OLD)/*-offline-*.json $(OLD)/*-accuracy-*.json)); do \
	  printf '## Against %s\n\n' $$old; \
	  $(PYTHON) bench/compare.py $$old $(NIGHTLY)/$$(basename $$old) || status=1; echo; done >> build/nightly.md; \
	  echo build/nightly.md; exit $$status

# make quality   what policies and widths buy and cost, on the example's model and data
.PHONY: quality
quality: export PYTHONPATH := $(CURDIR)
quality: $(INSTALLED)
	$(BIN)/python bench/quality.py --save build/quality.json $(if $(PIP_ARGS),--pip-args="$(PIP_ARGS)")

# make online   a server of its own under load over HTTP: closed loops, and twice of what it can do
.PHONY: online
online: export PYTHONPATH := $(CURDIR):$(PYTHONPATH)
online: $(INSTALLED)
	test -f build/qwen3-0.6b/config.json || $(BIN)/python bench/random_checkpoint.py qwen3-0.6b build/qwen3-0.6b
	$(BIN)/python bench/online.py --checkpoint build/qwen3-0.6b --context 500 --width 64 --concurrency 1 2 4 8 --overload \
	  --warm-up 10 --save build/online.json

# make compat   the benchmark clients of SGLang and vLLM against a server on this machine: none of their requests may fail
.PHONY: compat
COMPAT := build/compat
compat: export PYTHONPATH := $(CURDIR)
compat: $(COMPAT)/.installed
	$(COMPAT)/bin/python tests/compat/run.py

$(COMPAT)/.installed: pyproject.toml constraints.txt tests/compat/requirements.txt
	$(PYTHON) -m venv --clear $(COMPAT)
	$(COMPAT)/bin/python -m pip install --quiet --upgrade pip
	$(COMPAT)/bin/python -m pip install --quiet -c constraints.txt -e . $(PIP_ARGS)
	$(COMPAT)/bin/python -m pip install --quiet --no-deps -c constraints.txt -r tests/compat/requirements.txt $(PIP_ARGS)
	touch $@

# make deploy-test   deploy/ with all that checks it; needs Debian's packages haproxy and prometheus (for promtool)
.PHONY: deploy-test
DEPLOY := build/deploy
deploy-test: $(INSTALLED) $(DEPLOY)/.installed
	@for tool in haproxy promtool; do command -v $$tool > /dev/null || \
	  { echo "make deploy-test needs $$tool: apt-get install haproxy prometheus" >&2; exit 1; }; done
	PATH="$(CURDIR)/$(DEPLOY)/bin:$$PATH" $(BIN)/python -m pytest -q tests/deploy

$(DEPLOY)/.installed: tests/deploy/requirements.txt
	$(PYTHON) -m venv --clear $(DEPLOY)
	$(DEPLOY)/bin/python -m pip install --quiet --upgrade pip
	$(DEPLOY)/bin/python -m pip install --quiet -r tests/deploy/requirements.txt $(PIP_ARGS)
	touch $@

# make ray-test   replicas behind Ray Serve on this machine: routes, affinity, failures, an update under load
.PHONY: ray-test
ray-test: export PYTHONPATH := $(CURDIR)
RAY := build/ray
ray-test: $(RAY)/.installed
	$(RAY)/bin/python -m pytest -q tests/deploy/test_ray.py

$(RAY)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv --clear $(RAY)
	$(RAY)/bin/python -m pip install --quiet --upgrade pip
	$(RAY)/bin/python -m pip install --quiet -c constraints.txt -e '.[dev,ray]' $(PIP_ARGS)
	touch $@
