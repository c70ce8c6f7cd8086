# gpt2-sla. `make help` lists the targets; start with `make train` and `make test`.

CXX      ?= g++
NVCC     ?= nvcc
CXXSTD   := -std=c++17
# Warnings are errors in CI (WERROR=1), where the compiler is known; another compiler's new warning must not stop a
# user's build. A value that a switch forgets always is one.
WARNINGS := -Wall -Wextra $(if $(WERROR),-Werror,-Werror=switch)
# MARCH: the CPU that programs are for. What they share with the programs for a GPU is for any of its kind, if this one
# is no older: those are often built on one machine and run on others.
MARCH := native
# CPPFLAGS, CXXFLAGS and NVCCFLAGS are the user's.
cppflags = $(CPPFLAGS) -I. $(addprefix -I,$(INCLUDES))

include scripts/make/found.mk

march = $(MARCH)
# No -ffast-math: NaN and infinity must stay what they are. These two only give up errno and floating-point traps.
OPTIMIZE = -O3 -march=$(march) -fno-math-errno -fno-trapping-math -ffp-contract=fast
# Not from the environment, where others' programs have a DEBUG, too.
DEBUG :=
ifdef DEBUG
OPTIMIZE = -O1 -g -march=$(march) -DSLA_DEBUG
endif
cxxflags = $(CXXFLAGS) $(CXXSTD) $(WARNINGS) $(KEEP_GARBAGE) $(OPTIMIZE) -fopenmp
# Code without a hot loop: tests, JSON, command lines, sockets. -O3 takes twice as long to compile it. (-O given last
# wins.)
COLD := $(if $(DEBUG),,-O1)

# Weights and activations: BF16, FP16 (on a GPU alone) or FP32. Unless the user says which, BF16 on a GPU, and on a CPU
# that has instructions for it.
ifneq ($(PRECISION),)
precision := $(if $(filter 1,$(words $(PRECISION))),$(subst BF,bf,$(subst FP,fp,$(filter BF16 FP16 FP32,$(PRECISION)))))
ifeq ($(precision),)
$(error PRECISION=$(PRECISION): it must be BF16, FP16 or FP32)
endif
endif
gpu_precision := $(or $(precision),bf16)
cpu_precision := $(or $(precision),$(if $(CPU_BF16),bf16,fp32))
precision_flags.bf16 := -DPRECISION_BF16
precision_flags.fp16 := -DPRECISION_FP16

# Code for this machine's GPUs; where there is none, for those of data centres, and PTX for others. Hopper's is always
# that of sm_90a, which has wgmma.
GENCODE := $(foreach arch,$(filter-out ptx,$(architectures)),-gencode arch=compute_$(arch),code=sm_$(arch)) \
  $(if $(filter ptx,$(architectures)),-gencode arch=compute_80$(comma)code=compute_80 -DSLA_PTX)
nvccflags = $(NVCCFLAGS) $(CXXSTD) -O3 -lineinfo $(if $(findstring 90a,$(GENCODE)),-DSLA_SM_90A) \
  $(if $(DEBUG),-DSLA_DEBUG) $(if $(HAVE_NCCL),-DSLA_NCCL) \
  $(if $(WERROR),-Werror all-warnings) --threads 0 $(NVCC_CXX) -Xcompiler -Wall,-Wextra,-Werror=switch,-fopenmp \
  $(GENCODE) \
  $(if $(PORTABLE),-no-compress -Xcompiler -static-libstdc++$(comma)-static-libgcc -Xlinker --as-needed,\
  $(addprefix -Xlinker -rpath=,$(CUDA_RPATH)))

BUILD := build
# Programs lie in $(BUILD), those of a precision in $(BUILD)/fp32 and $(BUILD)/bf16. Objects lie in a folder for each
# set of flags, so that going from one to the other and back only links.
OBJ := $(BUILD)/obj/$(if $(DEBUG),debug,release)$(if $(WERROR),_werror)
EMU_OBJ := $(BUILD)/obj/emu$(if $(WERROR),_werror)

# What users run on a GPU or, as NAME_cpu, on the CPU.
PROGRAMS := train_gpt2_sla sample_gpt2_sla evaluate_gpt2_sla

# Programs that are linked with the model's functions, which are compiled once for all of them. (By nvcc each program is
# compiled alone, as one file with the model's.)
WITH_MODEL := $(PROGRAMS) test_gpt2_sla test_memory bench_gpu

# Host code that includes heavy headers (JSON, command line) is compiled by itself, once, whatever the device, and
# linked from a library.
HOST_OBJS := $(patsubst %.cpp,$(OBJ)/%.o,$(filter-out llmc/report/%,$(wildcard llmc/*/*.cpp)))
HOST_LIB := $(OBJ)/libhost.a
# Pages of runs, which no other program than `report` makes.
REPORT_OBJS := $(patsubst %.cpp,$(OBJ)/%.o,$(wildcard llmc/report/*.cpp))
REPORT_LIB := $(OBJ)/libreport.a

EXPERIMENTS := paper night evidence probe frontier
.PHONY: all help train $(EXPERIMENTS) test test-all list-tests mutants bench bench-cpu memory-table gpu-model gpu-check
.PHONY: fuzz clean setup programs what-is-here gpu-checked gpu-bundle
.DELETE_ON_ERROR:
.SECONDARY:

is_fp16 := $(filter fp16,$(precision))
FP16_ON_CPU := $(filter $(if $(is_fp16),$(PROGRAMS:%=%_cpu)) $(BUILD)/fp16/%_cpu,$(MAKECMDGOALS))
ifneq ($(FP16_ON_CPU),)
$(error $(firstword $(FP16_ON_CPU)): fp16 is for GPUs alone; PRECISION=BF16 and FP32 are for CPUs, too)
endif

all: what-is-here programs

help:
	@echo 'make            build what this machine can build, and say what it is'
	@echo 'make train      install, build, fetch a corpus, train the model that 5 minutes are enough for, sample'
	@echo '                MINUTES=n or HOURS=n: in that time; TEXT=path: your own text; DATA=tinyshakespeare'
	@echo '                VOCABULARY=4096: tokens of a vocabulary of that size, learned from the text, not bytes'
	@echo 'make paper      the tables of the SLA paper and other wirings, over seeds (1.6 hours on 2 cores);'
	@echo '                make night, evidence, probe, frontier: the other files of scripts/experiments'
	@echo 'make test       install, build and run the tests of every part, those for GPUs on an emulated one'
	@echo '                (4 to 16 minutes on 2 cores)'
	@echo 'make test-all   every test there is (an hour or more); the last line of both says how many passed'
	@echo '                PART=2/3: of the products of shapes and wirings the second third; LEAVE_OUT="fp32 arm64":'
	@echo '                without that precision (or bf16) and what is built for Arm'
	@echo 'make gpu-check  on a machine with a GPU: build, test in both precisions, sanitize, benchmark;'
	@echo '                STEPS=build,tests,nccl,sanitize,bench,tune,torch: only these'
	@echo 'make gpu-bundle GPU_ARCH=sm_90: all that gpu-check needs, built, in one file for a machine without internet'
	@echo 'make bench      how fast this machine trains three sizes, in a minute: its GPU, or its CPU'
	@echo 'make bench-cpu  speed on the CPU in both precisions, beside PyTorch where PYTHON (python3) has it;'
	@echo '                with and without skip-layer attention; QUICK=1: PyTorch compiles nothing'
	@echo 'make memory-table  the largest micro-batch that fits on GPUs of 16 to 141 GB, for 124M to 774M; needs no GPU'
	@echo 'make gpu-model  writes dev/bench/gpu-model.md: how long each operation of a step should take on an H100'
	@echo '                and an A100; and gpus.md: what fits on twelve GPUs, and how fast it trains; needs no GPU'
	@echo 'make mutants    can the tests fail? FILES="a b", CHANGED=commit: plants bugs in them, one by one, in a copy'
	@echo '                (dev/README.md)'
	@echo 'make fuzz       feed broken safetensors files to the reader, with sanitizers, for SECONDS=60'
	@echo 'make setup      only install the packages that are missing (scripts/setup.sh)'
	@echo 'make clean      remove what was built; corpora in data/ and runs in runs/ stay'
	@echo 'programs        train_gpt2_sla (GPU), train_gpt2_sla_cpu, train_gpt2_sla_emu (emulated GPU), sample_...,'
	@echo '                evaluate_..., report, experiment, test_gpt2_sla, test_gpt2_sla_emu'
	@echo 'PRECISION=FP32  weights and activations in fp32, or in BF16: the default on a GPU, and on a CPU with'
	@echo '                instructions for it; or in FP16, on a GPU alone, with loss scaling'
	@echo 'DEBUG=1         with any of them: debug information, activations filled with NaN, a wait after every kernel'
	@echo 'WERROR=1        with any of them: warnings are errors, as in CI'
	@echo 'INCLUDES="..."  folders with header-only libraries (CLI11, nlohmann/json, toml++), where they are not installed'

empty :=
# join_all WORDS: with commas.
join_all = $(subst $(empty) ,$(comma) ,$(strip $(1)))
built_in = $(if $(is_fp16),,for the CPU in $(cpu_precision)$(comma) )for a GPU in $(gpu_precision)
BUILT := $(if $(is_fp16),,$(if $(HAVE_DNNL),$(PROGRAMS:%=%_cpu))) report experiment \
  $(if $(HAVE_ARCHIVE),data/tokenize) data/convert data/probe $(if $(HAVE_CUBLASLT),$(if $(gpu_problem),,$(PROGRAMS)))
what-is-here:
	@echo 'nvcc     $(call found,$(HAVE_NVCC))'
	@echo 'cuBLASLt $(call found,$(HAVE_CUBLASLT))'
	@echo 'MPI      $(call found,$(HAVE_MPI))'
	@echo 'NCCL     $(call found,$(HAVE_NCCL))'
	@echo 'GPU      $(or $(gpus),not found)'
	@echo 'oneDNN   $(call found,$(HAVE_DNNL))'
	@echo 'CPU      has $(or $(CPU_BF16),no instructions for bf16)$(if $(precision),$(comma) PRECISION=$(PRECISION))'
	@echo 'Chart.js $(call found,$(CHART_JS))'
	@echo 'libarchive $(call found,$(HAVE_ARCHIVE))'
	@echo 'builds:  $(call join_all,$(BUILT)) ($(built_in))'
	@$(if $(gpu_remark),echo 'note:    $(gpu_remark)',:)
	@$(if $(gpu_problem),echo 'leaves out: $(call join_all,$(PROGRAMS)) ($(gpu_problem))',:)
	@$(if $(and $(HAVE_NVCC),$(if $(HAVE_CUBLASLT),,no)),\
	  echo 'leaves out: $(call join_all,$(PROGRAMS)) (the linker finds no libcublasLt.so; LIBRARY_PATH=folder)',:)
	@$(if $(HAVE_DNNL),:,echo 'leaves out: $(call join_all,$(PROGRAMS:%=%_cpu)) (they need oneDNN)')
	@$(if $(is_fp16),echo 'leaves out: $(call join_all,$(PROGRAMS:%=%_cpu)) (they have no fp16)',:)
	@$(if $(HAVE_ARCHIVE),:,echo 'leaves out: data/tokenize (it needs libarchive and zlib)')
	@$(if $(CHART_JS),:,echo 'leaves out: curves in reports (they need Chart.js)')
	@scripts/setup.sh --check gpu $(if $(HAVE_CUBLASLT),--optional cpu,cpu --optional) corpora extras

programs: $(BUILT)

setup:
	@scripts/setup.sh build test --optional extras

train:
	@scripts/train.sh

bench:
	@scripts/bench.sh

# The experiments of scripts/experiments. ARGS: options of ./experiment, such as ARGS="--seeds 1 -o runs/one".
on_gpu := $(if $(gpu_problem),,$(gpus))
$(EXPERIMENTS):
	@$(if $(and $(gpus),$(gpu_problem)),\
	  echo 'note: $(gpus) is not used$(comma) and training is on the CPU: $(gpu_problem)',:)
	@scripts/setup.sh gpu $(if $(on_gpu),,cpu) corpora $(if $(filter probe,$@),,gcide) $(if $(filter night,$@),xz) \
	  --optional extras
	@$(MAKE) --no-print-directory -j$(shell nproc) train_gpt2_sla$(if $(on_gpu),,_cpu) report experiment \
	  data/tokenize data/probe
	@./experiment scripts/experiments/$@.toml $(if $(on_gpu),,--trainer ./train_gpt2_sla_cpu) $(ARGS)

# What a test program counted lies in build/test_counts; dev/README.md says which tests are the quick ones.
test:
	@rm -rf $(BUILD)/test_counts/quick
	@scripts/setup.sh build test --optional extras
	@$(MAKE) --no-print-directory -j$(shell nproc) $(QUICK_TESTED_PROGRAMS) $(QUICK_TESTS)
	@dev/run_tests.sh quick $(QUICK_TESTS)

# AFTER_TEST=1: `make test` has just run; run the others, and add up both. With PART, of what nvcc compiles only the
# trainer is built, for the sampler and the evaluator have the same kernels; without test_machine_code nothing.
test-all:
	@scripts/setup.sh build test browser --optional extras python arm64
	@$(MAKE) --no-print-directory -j$(shell nproc) $(TESTED_PROGRAMS) $(filter-out $(LEFT_OUT),$(TESTS)) \
	  $(if $(PART),$(filter $(if $(filter machine_code,$(LEAVE_OUT)),,train_gpt2_sla) %_cpu,$(BUILT)),programs)
	@PART='$(PART)' SHARDED='$(if $(PART),$(SHARDED_TESTS))' LEAVE_OUT='$(LEAVE_OUT)' SKIP='$(SKIP)' \
	  dev/run_tests.sh $(if $(AFTER_TEST),rest,all) $(filter-out $(LEFT_OUT),$(TESTS))

# For build/mutants: which test programs there are, and what they run.
list-tests:
	@echo '$(QUICK_TESTS)'
	@echo '$(LATER_TESTS)'
	@echo '$(TESTED_PROGRAMS)'

# MUTANTS: options of build/mutants, such as "--sample 40 -j2".
mutants:
	@scripts/setup.sh build test
	@$(MAKE) --no-print-directory $(BUILD)/mutants
	@$(BUILD)/mutants $(if $(BUGS),--bugs) $(if $(CHANGED),--changed $(CHANGED)) $(MUTANTS) $(FILES)

# PYTHON: one that has PyTorch, to compare with.
PYTHON ?= python3
bench-cpu:
	@scripts/setup.sh gpu cpu
	@$(MAKE) --no-print-directory -j$(shell nproc) $(BUILD)/fp32/bench_cpu $(BUILD)/bf16/bench_cpu
	@$(BUILD)/bf16/bench_cpu compare $(BUILD) $(PYTHON) 5 5 $(if $(QUICK),--quick)
	@for p in bf16 fp32; do $(BUILD)/$$p/bench_cpu && $(BUILD)/$$p/bench_cpu profile 5 || exit 1; done

memory-table:
	@scripts/setup.sh gpu cpu test
	@$(MAKE) --no-print-directory -j$(shell nproc) $(BUILD)/bf16/memory_table
	@$(BUILD)/bf16/memory_table

gpu-model:
	@scripts/setup.sh gpu cpu test
	@$(MAKE) --no-print-directory -j$(shell nproc) $(BUILD)/bf16/gpu_model
	@$(BUILD)/bf16/gpu_model > $(BUILD)/gpu-model.md
	@$(BUILD)/bf16/gpu_model --gpus > $(BUILD)/gpus.md
	@mv $(BUILD)/gpu-model.md $(BUILD)/gpus.md dev/bench

gpu-check:
	@dev/gpu_check.sh

# For another machine: without MPI and the instructions of this one's CPU, and without NCCL but for one trainer, as
# there may be none. PORTABLE=1 links the compiler's libraries statically.
BUNDLE := $(BUILD)/bundle
BUNDLE_MARCH ?= $(if $(filter x86_64,$(shell uname -m)),x86-64-v3,armv8-a)
BUNDLE_FLAGS = MARCH=$(BUNDLE_MARCH) HAVE_MPI= PORTABLE=1 DEBUG=
gpu-bundle:
	@$(if $(HAVE_CUBLASLT),:,echo 'error: gpu-bundle needs cuBLASLt, which is not found' >&2; exit 1)
	@$(if $(strip $(GPU_ARCH)),:,echo 'error: gpu-bundle: for which GPU? GPU_ARCH=sm_90 is an H100 or H200' >&2; exit 1)
	@scripts/setup.sh gpu xz
	@$(MAKE) --no-print-directory -j$(shell nproc) gpu-checked $(PROGRAMS:%=$(BUNDLE)/bf16/%) BUILD=$(BUNDLE) \
	  HAVE_NCCL= $(BUNDLE_FLAGS)
	@$(if $(HAVE_NCCL),$(MAKE) --no-print-directory $(BUNDLE)/nccl/bf16/train_gpt2_sla BUILD=$(BUNDLE)/nccl \
	  $(BUNDLE_FLAGS))
	@NVCC='$(NVCC)' dev/gpu_bundle.sh $(BUNDLE) $(GPU_ARCH:sm_%=%)

SECONDS ?= 60
fuzz:
	@scripts/setup.sh gpu
	@$(MAKE) --no-print-directory -j$(shell nproc) $(BUILD)/fuzz_safetensors
	$(BUILD)/fuzz_safetensors $(SECONDS) $$(date +%s)

clean:
	rm -rf $(BUILD) $(TOP_LEVEL) report experiment data/tokenize data/convert data/probe

include scripts/make/rules.mk dev/make/tests.mk
