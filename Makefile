# make setup   .venv with everything that training needs, for a CPU or a CUDA machine
# make train   setup, MovieLens-100K, and a training run on it
# make test    setup, linters, type checks and tests of every feature (no GPU needed)
# make test-all    the same with the tests marked `slow`: long soaks, exhaustive cases; the sharder with interpreted kernels;
#                  before a release, and after changes of many parts
# make test-stack  the tests that tell most about a release of torch: with STACK and VENV of its own, what .ci/run does beside
# make test-triton    kernels compile with the Triton of the oldest stack, too; part of what .ci/run does
# make test-hosts  what takes longest, most of it on several hosts (network namespaces, Slurm), as root; not part of test-all
# make test-gpu    tests/gpu on all GPUs of the machine
# make test-fast   unit tests alone, for work in progress
# make lint    linters and type checks alone; `make format` mends what can be mended
#
# Variables: PYTHON (3.11 or newer), DEVICE (cpu or cuda; found by nvidia-smi), STACK (a release of torch with what belongs to
# it, of requirements/stacks, such as 2.13; the newest that can be had), NPROC (ranks of `make train`).

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PIP     = $(BIN)/python -m pip --disable-pip-version-check
# Bytecode is written at first import, which is faster than compiling what is never imported.
INSTALL = $(PIP) install --quiet --no-compile

GPUS   := $(shell nvidia-smi -L 2>/dev/null | grep -c '^GPU ')
DEVICE ?= $(if $(filter 0,$(GPUS)),cpu,cuda)
NPROC  ?= $(if $(filter 1,$(GPUS)),1,2)

# Ranks of one machine share its cores.
export OMP_NUM_THREADS ?= $(shell n=$$(( $$(nproc) / $(NPROC) )); echo $$(( n > 1 ? n : 1 )))

# Where it forbids to write bytecode, every process compiles torch anew: three times as long as an import of it.
unexport PYTHONDONTWRITEBYTECODE

PYTEST = $(BIN)/python -m pytest --dist loadgroup --no-loadscope-reorder
# `make test` saves time by keeping the ranks of a worker on one core; in `make test-all` they truly run at once.
WITHOUT_KERNELS = $(PYTEST) $(1) -m "not interpreted$(2)"
WITH_KERNELS = TRITON_INTERPRET=1 $(PYTEST) -n 2 $(2) -m "$(1)"
# Seconds of processor time, of all processes, beyond which `make test` fails, on a machine as fast as that of tests/processor_time.py.
# Measured were 808 s and 217 to 353 s: beside other work ranks that wait for each other spin for longer.
MOST_WITHOUT_KERNELS = 1000
MOST_WITH_KERNELS    = 400

.PHONY: packages setup setup-dev train test test-all test-stack test-triton test-hosts test-gpu test-fast lint format clean $(addsuffix -without-kernels,test test-all) \
    $(addsuffix -with-kernels,test test-all)

packages: $(VENV)/packages-$(DEVICE)
setup: $(VENV)/setup-$(DEVICE)
setup-dev: setup $(VENV)/dev

train: setup | data/movielens-100k/dataset.json
	$(BIN)/torchrun --standalone --nproc-per-node=$(NPROC) train.py --config configs/quickstart.yaml

# Linters and type checks run beside tests, since they use one core.
test test-all: setup-dev
	$(MAKE) --no-print-directory --jobs=2 lint $@-without-kernels
	$(MAKE) --no-print-directory $@-with-kernels

test-without-kernels:
	$(call WITHOUT_KERNELS,-n 2 --core-per-worker --most-processor-seconds=$(MOST_WITHOUT_KERNELS), and not slow and not exhaustive)

test-with-kernels:
	$(call WITH_KERNELS,interpreted and not slow and not exhaustive,--most-processor-seconds=$(MOST_WITH_KERNELS))

test-all-without-kernels:
	$(call WITHOUT_KERNELS,-n 3, and not exhaustive)

test-all-with-kernels: export CHECK_OVERFLOW = 1
test-all-with-kernels:
	$(call WITH_KERNELS,(interpreted or also_interpreted) and not exhaustive)

# Unit tests of what calls torch, TorchRec, FBGEMM or Triton (stacks differ in nothing else), interpreted operators, and the
# sharder, checkpoints and compiled training of several ranks.
test-stack: setup-dev
	$(PYTEST) -n 2 --core-per-worker -m "not interpreted and not slow and not exhaustive" tests/unit/scaleout/test_training_step.py \
	    $(addprefix tests/unit/test_,$(addsuffix .py,batch captured compat dlrm flops fused_estimates fused_support groups interaction \
	    kernels lasting loader metrics moe multi_task pickled_metadata planning public_api schedule step_timer synthetic telemetry \
	    transformer versions)) \
	    $(addprefix tests/distributed/test_,$(addsuffix .py,checkpoint compiled_training drop_in fused_checkpoint fused_sharder \
	    torchrec_own_tests torchrec_pipelines))
	TRITON_INTERPRET=1 $(PYTEST) -n 2 -m "interpreted and not slow and not exhaustive" tests/ops/embedding_all_to_all tests/ops/gemv_all_reduce

test-triton: setup-dev
	$(INSTALL) --no-deps --upgrade --target $(VENV)/oldest-triton $$(grep triton $(firstword $(sort $(wildcard requirements/stacks/*))))
	PYTHONPATH=$(VENV)/oldest-triton $(PYTEST) -n 2 -m "not slow and not exhaustive" tests/ops/test_compile_for_gpus.py -k "kernels_compile and sm_90"

# One test at a time: hosts that wait for each other take turns badly with others.
test-hosts: setup-dev
	$(PYTEST) -m "exhaustive and not interpreted"
	TRITON_INTERPRET=1 $(PYTEST) -m "exhaustive and interpreted"
	KILLS=10 $(PYTEST) tests/distributed/test_two_hosts.py -k killed_at_random_moments

# What takes longest begins first. A run that is cut short has named what failed by then.
LONGEST_ON_GPUS = $(patsubst %,tests/gpu/test_%_cuda.py,training training_between_hosts transformer_training moe_training all_gather_gemm \
    moe online without_peer_access transports messages)
# Each rank that compiles would start a process for each core, beside the ranks of all workers.
test-gpu: export TORCHINDUCTOR_COMPILE_THREADS = 1
test-gpu: setup-dev
	$(PYTEST) -v -n 14 $(LONGEST_ON_GPUS) $(filter-out $(LONGEST_ON_GPUS),$(wildcard tests/gpu/test_*.py))

test-fast: setup-dev
	$(PYTEST) -n 2 -m "not interpreted and not slow" tests/unit

lint: setup-dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

format: setup-dev
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache *.egg-info

data/movielens-100k/dataset.json: | setup
	$(BIN)/python data/prepare.py movielens --source recbole --output $(@D)

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed: make PYTHON=python3.12 ..." if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)

$(VENV)/packages-$(DEVICE): requirements/base.txt requirements/$(DEVICE).txt requirements/install.sh \
    $(wildcard requirements/stacks/*) $(if $(STACK),$(VENV)/stack-$(STACK)) | $(BIN)/python
	requirements/install.sh $(abspath $(BIN)/python) $(DEVICE) $(STACK)
	touch $@

# Another STACK than before installs anew; none keeps what is there.
$(VENV)/stack-$(STACK): | $(BIN)/python
	rm -f $(VENV)/stack-*
	touch $@

$(VENV)/setup-$(DEVICE): pyproject.toml $(VENV)/packages-$(DEVICE)
	$(INSTALL) --no-deps --editable .
	$(BIN)/python -c 'import dlrm_fused.training.trainer'  # writes bytecode once, not in every rank of the first run
	touch $@

$(VENV)/dev: requirements/dev.txt requirements/mlperf.txt | $(BIN)/python
	$(INSTALL) -r requirements/dev.txt
	$(INSTALL) --no-deps -r requirements/mlperf.txt
	touch $@
