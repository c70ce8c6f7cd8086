# gpt2-sla. `make help` lists the targets; start with `make train` and `make test`.

CXX      ?= g++
NVCC     ?= nvcc
CXXSTD   := -std=c++17
# Warnings are errors in CI (WERROR=1), where the compiler is known; another compiler's new warning must not stop a
# user's build.
WARNINGS := -Wall -Wextra $(if $(WERROR),-Werror)
# No -ffast-math: NaN and infinity must stay what they are. These two only give up errno and floating-point traps.
# MARCH: the CPU that programs are for. What they share with the programs for a GPU is for any of its kind, if this one
# is no older: those are often built on one machine and run on others.
MARCH := native
CPU_HAS := $(shell $(CXX) -march=native -dM -E -x c++ /dev/null 2>/dev/null | \
  grep -oE '__(AMX_BF16|AVX512BF16|AVX2)__|__ARM_FEATURE_CRC32')
ANY_MARCH := $(if $(filter __AVX2__,$(CPU_HAS)),x86-64-v3,$(if $(filter __ARM_FEATURE_CRC32,$(CPU_HAS)),armv8-a+crc))
HOST_MARCH := $(or $(filter-out native,$(MARCH)),$(if $(ANY_MARCH),$(shell \
  $(CXX) -march=$(ANY_MARCH) -E -x c++ /dev/null >/dev/null 2>&1 && echo $(ANY_MARCH))),native)
march = $(MARCH)
OPTIMIZE = -O3 -march=$(march) -fno-math-errno -fno-trapping-math -ffp-contract=fast
ifdef DEBUG
OPTIMIZE = -O1 -g -march=$(march) -DSLA_DEBUG
endif
CPPFLAGS += -I. $(addprefix -I,$(INCLUDES))
# To collect garbage is a tenth of g++'s time. It need not below half a gigabyte.
KEEP_GARBAGE := --param ggc-min-heapsize=524288
KEEP_GARBAGE := $(shell $(CXX) -Werror $(KEEP_GARBAGE) -E -x c++ /dev/null >/dev/null 2>&1 && echo '$(KEEP_GARBAGE)')
CXXFLAGS += $(CXXSTD) $(WARNINGS) $(KEEP_GARBAGE) $(OPTIMIZE) -fopenmp
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
# ATTENTION=FMA: in fp16 attention is computed in fp32, on GPUs whose tensor cores or shared memory it does not fit
# otherwise. What is built so lies in $(BUILD)/fp16_fma.
ifneq ($(ATTENTION),)
ifneq ($(ATTENTION) $(precision),FMA fp16)
$(error ATTENTION=$(ATTENTION): it must be FMA, and with PRECISION=FP16)
endif
precision := fp16_fma
endif
CPU_BF16 := $(patsubst __%__,%,$(filter __AMX_BF16__ __AVX512BF16__,$(CPU_HAS)))
gpu_precision := $(or $(precision),bf16)
cpu_precision := $(or $(precision),$(if $(CPU_BF16),bf16,fp32))
precision_flags.bf16 := -DPRECISION_BF16
precision_flags.fp16 := -DPRECISION_FP16
precision_flags.fp16_fma := -DPRECISION_FP16 -DSLA_ATTENTION_FMA
# What -march=native means here: programs that were compiled for another machine's CPU are built anew.
NATIVE_CPU := $(shell $(CXX) -march=native -Q --help=target 2>/dev/null | cksum)

comma := ,
# What this machine has.
have = $(shell command -v $(1) >/dev/null 2>&1 && echo yes)
# have_header NAME [FLAGS]
have_header = $(shell printf '\043include <%s>\n' $(1) | \
  $(CXX) $(CXXSTD) $(CPPFLAGS) $(2) -E -x c++ - >/dev/null 2>&1 && echo yes)
found = $(if $(1),found,not found)
# Which nvcc, GPUs and architectures; scripts/gpu.sh says what these are.
define newline


endef
$(eval $(subst |,$(newline),$(shell \
  NVCC='$(NVCC)' GPU_ARCH='$(GPU_ARCH)' PRECISION='$(PRECISION)' ATTENTION='$(ATTENTION)' \
  scripts/gpu.sh | tr '\n' '|')))
HAVE_NVCC := $(if $(nvcc),yes)
ifdef nvcc
override NVCC := $(nvcc)
# nvcc's host compiler is CXX, of whose words one is the compiler.
NVCC_CXX := -ccbin $(firstword $(filter-out ccache distcc,$(CXX)))
endif
# OpenMPI, by which mpirun's processes find each other; its C++ bindings are not used.
HAVE_MPI := $(shell mpicxx --showme:compile >/dev/null 2>&1 && echo yes)
MPI_FLAGS := $(if $(HAVE_MPI),-DSLA_MPI -DOMPI_SKIP_MPICXX $(shell mpicxx --showme:compile 2>/dev/null))
MPI_LIBS := $(if $(HAVE_MPI),$(filter -L% -l%,$(filter-out -lmpi_cxx,$(shell mpicxx --showme:link 2>/dev/null))))
# cuBLASLt and NCCL, if a program links with them where nvcc looks for libraries: there may be a header without its
# library, and a library without the name that the linker looks for.
links_with = $(shell echo 'int main() {}' | $(CXX) -x c++ - -o /dev/null $(CUDA_LIBRARIES) $(1) 2>/dev/null && echo yes)
CUDA_LIBRARIES := $(if $(HAVE_NVCC),$(shell $(NVCC) -dryrun -o /dev/null none.o 2>&1 | sed -n 's/^.*LIBRARIES=//p'))
HAVE_CUBLASLT := $(if $(HAVE_NVCC),$(call links_with,-lcublasLt))
# The folder of the library that programs were linked with, if the loader does not look there. nvcc names one of stubs
# before it, which are for linking alone.
CUDA_RPATH := $(if $(HAVE_CUBLASLT),$(shell program=`mktemp` && { echo 'int main() {}' | $(CXX) -x c++ - \
  -o "$$program" -Wl,--no-as-needed,-t $(CUDA_LIBRARIES) -lcublasLt 2>&1 | \
  sed -n 's,/libcublasLt[^/]*$$,,p' | sed 's,/stubs$$,,' | tail -n 1; \
  env -u LD_LIBRARY_PATH "$$program" >/dev/null 2>&1 && echo found; rm -f "$$program"; }))
CUDA_RPATH := $(if $(filter found,$(CUDA_RPATH)),,$(CUDA_RPATH))
HAVE_NCCL := $(if $(HAVE_NVCC),$(and $(call have_header,nccl.h,-I$(dir $(shell command -v $(NVCC)))../include),$(call \
  links_with,-lnccl)))
NCCL_LIBS := $(if $(HAVE_NCCL),-lnccl)
# oneDNN, which the CPU's programs need, and libarchive with zlib, without which data/tokenize reads plain files only.
HAVE_DNNL := $(call have_header,dnnl.h)
HAVE_ARCHIVE := $(and $(call have_header,archive.h),$(call have_header,zlib.h))
# Chart.js, of Debian's and Ubuntu's libjs-chart.js: version 3 and 4 have different names.
CHART_FOLDERS := /usr/share/javascript/chart.js /usr/share/nodejs/chart.js/dist $(INCLUDES)
CHART_JS := $(firstword $(wildcard $(foreach f,$(CHART_FOLDERS),$(f)/chart.min.js $(f)/chart.umd.js)))
CHART_LICENCE := $(if $(CHART_JS),$(wildcard /usr/share/doc/libjs-chart.js/copyright))

# Code for this machine's GPUs; where there is none, for those of data centres, and PTX for others. Hopper's is always
# that of sm_90a, which has wgmma.
GENCODE := $(foreach arch,$(filter-out ptx,$(architectures)),-gencode arch=compute_$(arch),code=sm_$(arch)) \
  $(if $(filter ptx,$(architectures)),-gencode arch=compute_80$(comma)code=compute_80 -DSLA_PTX)
NVCCFLAGS = $(CXXSTD) -O3 -lineinfo $(if $(findstring 90a,$(GENCODE)),-DSLA_SM_90A) \
  $(if $(DEBUG),-DSLA_DEBUG) $(if $(HAVE_NCCL),-DSLA_NCCL) \
  $(if $(WERROR),-Werror all-warnings) --threads 0 $(NVCC_CXX) -Xcompiler -Wall,-Wextra,-fopenmp $(GENCODE) \
  $(if $(PORTABLE),-no-compress -Xcompiler -static-libstdc++$(comma)-static-libgcc -Xlinker --as-needed,\
  $(addprefix -Xlinker -rpath=,$(CUDA_RPATH)))

# The emulated GPU: g++ compiles the same sources against dev/emu's headers, and the sanitizers check every access.
# -fsanitize-recover=address and no functions that check accesses, however many there are in a kernel: dev/emu/
# shared_memory.cpp is called for what is poisoned, and ends the program if it is an error.
# With -O2 it takes twice as long to compile, and the tests run no faster. -g1 is enough for stack traces with lines; -g
# would take nearly twice as long as well, for the places of variables in optimized code.
EMU_OPTIMIZE := -O1 -g1
EMUFLAGS := $(CXXSTD) $(WARNINGS) $(KEEP_GARBAGE) -Wno-unknown-pragmas $(EMU_OPTIMIZE) -march=native -fno-math-errno \
  -ffp-contract=fast -fopenmp -fsanitize=address,alignment -fno-sanitize-recover=all \
  -fsanitize-recover=address --param asan-instrumentation-with-call-threshold=2147483647 -DSLA_EMU -DSLA_NCCL \
  -Idev/emu/include

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
EMU_OBJS := $(patsubst %.cpp,$(EMU_OBJ)/%.o,$(wildcard dev/emu/*.cpp dev/emu/ptx/*.cpp))

# Tests of host code; and tests of the model and its operations, on the CPU's and on the emulated GPU's.
HOST_TESTS := $(patsubst dev/test/%.cpp,$(BUILD)/%,$(wildcard dev/test/test_*.cpp))
OPERATIONS_TESTS := test_ops test_attention test_tile
DEVICE_TESTS := test_gpt2_sla test_ops test_attention
EMU_TESTS := $(foreach t,$(DEVICE_TESTS),$(foreach p,bf16 fp16 fp32,$(BUILD)/$(p)/$(t)_emu)) \
  $(BUILD)/bf16/test_tile_emu $(BUILD)/fp16/test_tile_emu $(BUILD)/bf16/test_memory_emu \
  $(DEVICE_TESTS:%=$(BUILD)/fp16_fma/%_emu)
CPU_TESTS := $(foreach t,$(DEVICE_TESTS),$(BUILD)/bf16/$(t)_cpu $(BUILD)/fp32/$(t)_cpu)
# They are started in this order: those that take longest first.
FIRST_TESTS := $(addprefix $(BUILD)/,\
  test_huggingface test_arm64 bf16/test_gpt2_sla_emu fp32/test_gpt2_sla_emu test_cli test_dist test_scripts \
  test_gpu_check test_machine_code test_faults test_resume test_terms test_loss_scaling test_bad_input test_ptx \
  test_reference test_data)
TESTS := $(FIRST_TESTS) $(filter-out $(FIRST_TESTS),$(EMU_TESTS) $(CPU_TESTS) $(HOST_TESTS))
# `make test` leaves these out: all of their tests take long, they or what they run take long to compile, or they find
# little that the same program in the other precision does not. Of all others it runs the tests whose names do not begin
# with Long.
LATER_TESTS := $(filter $(BUILD)/test_emu%,$(HOST_TESTS)) $(filter $(BUILD)/fp16/% $(BUILD)/fp16_fma/%,$(EMU_TESTS)) \
  $(addprefix $(BUILD)/,\
  test_amx test_arm64 test_dist test_evaluate test_faults test_formats test_gpu_check \
  test_hostile test_huggingface test_loss_scaling test_machine_code test_mutants test_ptx test_reference test_scripts \
  bf16/test_gpt2_sla_cpu \
  bf16/test_gpt2_sla_emu bf16/test_memory_emu \
  bf16/test_attention_cpu fp32/test_attention_cpu fp32/test_attention_emu bf16/test_ops_cpu fp32/test_ops_cpu \
  bf16/test_ops_emu fp32/test_ops_emu)
QUICK_TESTS := $(filter-out $(LATER_TESTS),$(TESTS))
# What CI leaves out of the products of shapes, wirings and precisions. PART=k/n: of the tests of these programs every
# n-th is run, from the k-th on. LEAVE_OUT: fp32, bf16 or fp16, no tests of that precision, but of fp16
# test_loss_scaling and test_tile; arm64, not test_arm64. SKIP: no tests that this filter of GoogleTest's matches.
SHARDED_TESTS := $(EMU_TESTS) $(CPU_TESTS) $(addprefix $(BUILD)/,test_amx test_dist test_ptx test_reference)
ifneq ($(PART),)
ifeq ($(shell echo '$(PART)' | awk -F/ '/^[0-9]+\/[0-9]+$$/ && $$1 > 0 && $$1 <= $$2'),)
$(error PART=$(PART): it must be k/n, such as 2/3)
endif
endif
ifneq ($(filter-out fp32 bf16 fp16 arm64,$(LEAVE_OUT)),)
$(error LEAVE_OUT=$(LEAVE_OUT): it must be of fp32, bf16, fp16 and arm64)
endif
LEFT_OUT := $(filter-out $(BUILD)/fp16/test_tile_emu,\
  $(filter $(LEAVE_OUT:%=$(BUILD)/%/%) $(LEAVE_OUT:fp16=$(BUILD)/fp16_fma/%) $(LEAVE_OUT:%=$(BUILD)/test_%),$(TESTS)) \
  $(if $(filter bf16,$(LEAVE_OUT)),$(BUILD)/test_amx))
# What the tests of the command line, of the corpora, of scripts and of several ranks run.
TESTED_PROGRAMS := $(foreach p,fp32 bf16,$(BUILD)/$(p)/train_gpt2_sla_cpu) \
  $(BUILD)/fp32/sample_gpt2_sla_cpu $(BUILD)/fp32/evaluate_gpt2_sla_cpu $(BUILD)/fp32/evaluate_gpt2_sla_emu \
  report experiment data/tokenize data/convert data/probe \
  $(BUILD)/fp32/train_gpt2_sla_emu $(BUILD)/bf16/train_gpt2_sla_emu $(BUILD)/fp16/train_gpt2_sla_emu \
  $(BUILD)/bf16/bench_gpu_emu \
  $(BUILD)/fp32/bench_cpu $(BUILD)/fuzz_safetensors $(BUILD)/emu_ranks $(BUILD)/mutants \
  $(BUILD)/emulated_amx.so $(BUILD)/onednn_cpuid.txt
# What the tests of `make test` run.
QUICK_TESTED_PROGRAMS := $(PROGRAMS:%=$(BUILD)/fp32/%_cpu) report experiment \
  data/tokenize data/convert data/probe

EXPERIMENTS := paper night evidence probe
.PHONY: all help train $(EXPERIMENTS) test test-all list-tests mutants bench-cpu memory-table gpu-model gpu-check
.PHONY: fuzz clean setup programs what-is-here gpu-checked gpu-bundle
.DELETE_ON_ERROR:
.SECONDARY:

# Said before anything is compiled.
GPU_GOALS := $(PROGRAMS) test_gpt2_sla gpu-checked gpu-bundle \
  $(foreach p,bf16 fp16 fp16_fma fp32,\
  $(addprefix $(BUILD)/$(p)/,$(PROGRAMS) $(DEVICE_TESTS) $(OPERATIONS_TESTS) bench_gpu))
ifneq ($(and $(gpu_problem),$(filter $(GPU_GOALS),$(MAKECMDGOALS))),)
$(error $(firstword $(filter $(GPU_GOALS),$(MAKECMDGOALS))): $(gpu_problem))
endif

is_fp16 := $(filter fp16%,$(precision))
FP16_ON_CPU := $(filter $(if $(is_fp16),$(PROGRAMS:%=%_cpu)) $(BUILD)/fp16/%_cpu,$(MAKECMDGOALS))
ifneq ($(FP16_ON_CPU),)
$(error $(firstword $(FP16_ON_CPU)): fp16 is for GPUs alone; PRECISION=BF16 and FP32 are for CPUs, too)
endif

all: what-is-here programs

help:
	@echo 'make            build what this machine can build, and say what it is'
	@echo 'make train      install, build, fetch a corpus, train a small model for up to 5 minutes, sample'
	@echo '                TEXT=path: your own text file or folder; STEPS=n: so many updates; DATA=tinyshakespeare'
	@echo 'make paper      the tables of the SLA paper and other wirings, over seeds (1.6 hours on 2 cores);'
	@echo '                make night, evidence, probe: the other files of scripts/experiments'
	@echo 'make test       install, build and run the tests of every part, those for GPUs on an emulated one'
	@echo '                (4 to 16 minutes on 2 cores)'
	@echo 'make test-all   every test there is (an hour or more); the last line of both says how many passed'
	@echo '                PART=2/3: of the products of shapes and wirings the second third; LEAVE_OUT="fp32 arm64":'
	@echo '                without that precision (or bf16) and what is built for Arm'
	@echo 'make gpu-check  on a machine with a GPU: build, test in both precisions, sanitize, benchmark;'
	@echo '                STEPS=build,tests,sanitize,bench,torch: only these'
	@echo 'make gpu-bundle GPU_ARCH=sm_90: all that gpu-check needs, built, in one file for a machine without internet'
	@echo 'make bench-cpu  speed on the CPU in both precisions, beside PyTorch where PYTHON (python3) has it;'
	@echo '                with and without skip-layer attention; QUICK=1: PyTorch compiles nothing'
	@echo 'make memory-table  the largest micro-batch that fits on GPUs of 16 to 141 GB, for 124M to 774M; needs no GPU'
	@echo 'make gpu-model  writes dev/bench/gpu-model.md: how long each operation of a step should take on an H100'
	@echo '                and an A100; needs no GPU'
	@echo 'make mutants    can the tests fail? FILES="a b", CHANGED=commit: plants bugs in them, one by one, in a copy'
	@echo '                (dev/README.md)'
	@echo 'make fuzz       feed broken safetensors files to the reader, with sanitizers, for SECONDS=60'
	@echo 'make setup      only install the packages that are missing (scripts/setup.sh)'
	@echo 'make clean      remove what was built; corpora in data/ and runs in runs/ stay'
	@echo 'programs        train_gpt2_sla (GPU), train_gpt2_sla_cpu, train_gpt2_sla_emu (emulated GPU), sample_...,'
	@echo '                evaluate_..., report, experiment, test_gpt2_sla, test_gpt2_sla_emu'
	@echo 'PRECISION=FP32  weights and activations in fp32, or in BF16: the default on a GPU, and on a CPU with'
	@echo '                instructions for it; or in FP16, on a GPU alone, with loss scaling (ATTENTION=FMA: with'
	@echo '                attention in fp32, for a V100, and for topk and lsh on a T4)'
	@echo 'DEBUG=1         with any of them: debug information, activations filled with NaN, a wait after every kernel'
	@echo 'WERROR=1        with any of them: warnings are errors, as in CI'
	@echo 'INCLUDES="..."  folders with header-only libraries (CLI11, nlohmann/json, toml++), where they are not installed'

empty :=
# join_all WORDS: with commas.
join_all = $(subst $(empty) ,$(comma) ,$(strip $(1)))
built_in = $(if $(is_fp16),,for the CPU in $(cpu_precision)$(comma) )for a GPU in $(gpu_precision)
BUILT := $(if $(is_fp16),,$(if $(HAVE_DNNL),$(PROGRAMS:%=%_cpu))) report experiment \
  data/tokenize data/convert data/probe $(if $(HAVE_CUBLASLT),$(if $(gpu_problem),,$(PROGRAMS)))
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
	@$(if $(HAVE_ARCHIVE),:,echo 'leaves out: compressed corpora and tar files in data/tokenize (they need libarchive)')
	@$(if $(CHART_JS),:,echo 'leaves out: curves in reports (they need Chart.js)')
	@scripts/setup.sh --check gpu $(if $(HAVE_CUBLASLT),--optional cpu extras,cpu --optional extras)

programs: $(BUILT)

setup:
	@scripts/setup.sh build test

train:
	@scripts/train.sh

# The experiments of scripts/experiments. ARGS: options of ./experiment, such as ARGS="--seeds 1 -o runs/one".
on_gpu := $(if $(gpu_problem),,$(gpus))
$(EXPERIMENTS):
	@$(if $(and $(gpus),$(gpu_problem)),\
	  echo 'note: $(gpus) is not used$(comma) and training is on the CPU: $(gpu_problem)',:)
	@scripts/setup.sh gpu $(if $(on_gpu),,cpu) $(if $(filter evidence,$@),gcide) --optional extras
	@$(MAKE) --no-print-directory -j$(shell nproc) train_gpt2_sla$(if $(on_gpu),,_cpu) report experiment \
	  data/tokenize data/probe
	@./experiment scripts/experiments/$@.toml $(if $(on_gpu),,--trainer ./train_gpt2_sla_cpu) $(ARGS)

# What a test program counted lies in build/test_counts; dev/README.md says which tests are the quick ones.
test:
	@rm -rf $(BUILD)/test_counts/quick
	@scripts/setup.sh build test
	@$(MAKE) --no-print-directory -j$(shell nproc) $(QUICK_TESTED_PROGRAMS) $(QUICK_TESTS)
	@dev/run_tests.sh quick $(QUICK_TESTS)

# AFTER_TEST=1: `make test` has just run; run the others, and add up both. With PART, of what nvcc compiles only the
# trainer is built: the sampler and the evaluator have the same kernels.
test-all:
	@scripts/setup.sh build test browser --optional python arm64
	@$(MAKE) --no-print-directory -j$(shell nproc) \
	  $(if $(PART),$(filter train_gpt2_sla %_cpu,$(BUILT)),programs) $(TESTED_PROGRAMS) $(filter-out $(LEFT_OUT),$(TESTS))
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
	@scripts/setup.sh build
	@$(MAKE) --no-print-directory -j$(shell nproc) $(BUILD)/fp32/bench_cpu $(BUILD)/bf16/bench_cpu
	@$(BUILD)/bf16/bench_cpu compare $(BUILD) $(PYTHON) 5 5 $(if $(QUICK),--quick)
	@for p in bf16 fp32; do $(BUILD)/$$p/bench_cpu && $(BUILD)/$$p/bench_cpu profile 5 || exit 1; done

memory-table:
	@scripts/setup.sh build test
	@$(MAKE) --no-print-directory -j$(shell nproc) $(BUILD)/bf16/memory_table
	@$(BUILD)/bf16/memory_table

gpu-model:
	@scripts/setup.sh build test
	@$(MAKE) --no-print-directory -j$(shell nproc) $(BUILD)/bf16/gpu_model
	@$(BUILD)/bf16/gpu_model > dev/bench/gpu-model.md

# What `make gpu-check` runs.
gpu-checked: $(addprefix $(BUILD)/bf16/,bench_gpu train_gpt2_sla test_tile) \
  $(foreach p,bf16 fp32,$(addprefix $(BUILD)/$(p)/,$(DEVICE_TESTS)))
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
	@scripts/setup.sh gpu
	@$(MAKE) --no-print-directory -j$(shell nproc) gpu-checked $(PROGRAMS:%=$(BUNDLE)/bf16/%) BUILD=$(BUNDLE) \
	  HAVE_NCCL= $(BUNDLE_FLAGS)
	@$(if $(HAVE_NCCL),$(MAKE) --no-print-directory $(BUNDLE)/nccl/bf16/train_gpt2_sla BUILD=$(BUNDLE)/nccl \
	  $(BUNDLE_FLAGS))
	@NVCC='$(NVCC)' dev/gpu_bundle.sh $(BUNDLE) $(GPU_ARCH:sm_%=%)

SECONDS ?= 60
fuzz:
	@scripts/setup.sh build
	@$(MAKE) --no-print-directory -j$(shell nproc) $(BUILD)/fuzz_safetensors
	$(BUILD)/fuzz_safetensors $(SECONDS) $$RANDOM

clean:
	rm -rf $(BUILD) $(TOP_LEVEL) report experiment data/tokenize data/convert data/probe

# ----------------------------------------------------------------------------
# What is built. A stamp for each compiler rebuilds what is concerned when its flags change: the objects of a folder,
# and the programs.

remember = @mkdir -p $(@D); echo '$(1)' | cmp -s - $@ || echo '$(1)' > $@
$(BUILD)/flags $(OBJ)/flags: force
	$(call remember,$(CXX) $(CPPFLAGS) $(CXXFLAGS) $(HOST_MARCH) $(MPI_FLAGS) $(NATIVE_CPU))
$(BUILD)/emu_flags $(EMU_OBJ)/flags: force ; $(call remember,$(CXX) $(CPPFLAGS) $(EMUFLAGS) $(MPI_FLAGS) $(NATIVE_CPU))
$(BUILD)/nvcc_flags: force ; $(call remember,$(NVCC) $(CPPFLAGS) $(NVCCFLAGS))
.PHONY: force
force:

DEPENDENCIES = -MMD -MP -MF $@.d
COMPILE = $(CXX) $(CPPFLAGS) $(CXXFLAGS) $(DEPENDENCIES)
EMU_COMPILE = $(CXX) $(CPPFLAGS) $(EMUFLAGS) $(DEPENDENCIES)
ONEDNN := -ldnnl
GTEST := -lgtest -lgtest_main -lpthread
# Where the .cu files lie.
vpath %.cu dev/test dev/bench

# At the top level lie the programs as links, in the precision asked for or its default.
TOP_LEVEL := $(foreach p,$(PROGRAMS),$p $p_emu $p_cpu) test_gpt2_sla test_gpt2_sla_emu
$(filter-out %_cpu,$(TOP_LEVEL)): %: $(BUILD)/$(gpu_precision)/% force
	@ln -sf $< $@
$(filter %_cpu,$(TOP_LEVEL)): %: $(BUILD)/$(cpu_precision)/% force
	@ln -sf $< $@

# Host code

# `private`: not for the stamp that they depend on.
$(OBJ)/llmc/% $(OBJ)/data/% $(OBJ)/scripts/% $(OBJ)/report.o: private march := $(HOST_MARCH)
$(OBJ)/llmc/ranks/ranks.o: private CPPFLAGS += $(MPI_FLAGS)
$(OBJ)/report.o $(OBJ)/scripts/%.o $(addprefix $(OBJ)/data/,tokenize.o convert.o probe.o): private CXXFLAGS += $(COLD)
$(OBJ)/llmc/ranks/%.o $(OBJ)/llmc/run/%.o $(OBJ)/llmc/model/%.o $(REPORT_OBJS): private CXXFLAGS += $(COLD)
# A test runs for milliseconds and takes seconds to compile, but for the reference's.
$(OBJ)/dev/test/%.o: private CXXFLAGS += $(if $(filter %/test_reference.o,$@),$(COLD),-O0) -DSLA_CPU

$(OBJ)/llmc/model/config_json.o: $(wildcard llmc/model/huggingface/*.py)

# What pages with charts contain beside the repository's files. A folder of INCLUDES can have chart.min.js, too; it
# names its licence.
$(OBJ)/charts/flags: force ; $(call remember,$(CHART_JS) $(CHART_LICENCE))
$(OBJ)/charts/%: $(OBJ)/charts/flags
	cat $($*) /dev/null > $@
$(OBJ)/charts/chart.js: private chart.js := $(CHART_JS)
$(OBJ)/charts/chart_licence.txt: private chart_licence.txt := $(CHART_LICENCE)
$(OBJ)/llmc/report/parts.o: $(addprefix llmc/report/report.,css js) \
  $(addprefix $(OBJ)/charts/chart,.js _licence.txt)
$(OBJ)/llmc/report/parts.o: private CXXFLAGS += -Wa,-I$(OBJ)/charts
$(OBJ)/%.o: %.cpp $(OBJ)/flags
	@mkdir -p $(@D)
	$(COMPILE) -c $< -o $@

$(HOST_LIB): $(HOST_OBJS)
$(REPORT_LIB): $(REPORT_OBJS)
$(HOST_LIB) $(REPORT_LIB):
	@rm -f $@
	$(AR) rcs $@ $^

# Without libarchive it reads plain files only.
$(OBJ)/data/archives: force ; $(call remember,$(HAVE_ARCHIVE))
SOURCE_STREAM := $(if $(HAVE_ARCHIVE),archive_stream,plain_stream)
data/tokenize: $(addprefix $(OBJ)/data/,tokenize.o corpus.o $(SOURCE_STREAM).o shards.o archives) $(HOST_LIB) \
  $(BUILD)/flags
	$(CXX) $(CXXFLAGS) $(filter %.o %.a,$^) $(if $(HAVE_ARCHIVE),-larchive -lz) -lpthread -o $@

report data/convert: %: $(OBJ)/%.o
report: $(REPORT_LIB)
experiment: $(OBJ)/scripts/experiments/experiment.o
data/probe: $(OBJ)/data/probe.o $(OBJ)/data/shards.o
$(BUILD)/encode_records: $(OBJ)/dev/encode_records.o
report experiment data/convert data/probe $(BUILD)/encode_records: $(HOST_LIB) $(BUILD)/flags
	$(CXX) $(CXXFLAGS) $(filter-out $(HOST_LIB),$(filter %.o %.a,$^)) $(HOST_LIB) -o $@

$(BUILD)/mutants: $(OBJ)/dev/test/mutants.o $(BUILD)/flags
	$(CXX) $(CXXFLAGS) $(filter %.o,$^) -lpthread -o $@

$(BUILD)/test_corpus $(BUILD)/test_text_files $(BUILD)/test_emu_triton: GTEST += -larchive -lz
$(BUILD)/test_corpus: $(OBJ)/data/shards.o
$(BUILD)/test_text_files: $(OBJ)/data/archive_stream.o
$(BUILD)/test_%: $(OBJ)/dev/test/test_%.o $(REPORT_LIB) $(HOST_LIB) $(BUILD)/flags
	$(CXX) $(CXXFLAGS) $(filter %.o %.a,$^) $(MPI_LIBS) $(GTEST) -o $@

# The model's object comes before that of its tests: of an inline function that both have, the linker takes the first.
linked = $(filter %/model.o,$^) $(filter-out %/model.o,$(filter %.o %.a,$^))

# On the CPU

CPU_LINK = @mkdir -p $(@D); set -x; $(CXX) $(CXXFLAGS) $(linked) $(MPI_LIBS) $(ONEDNN)

define cpu_programs
$(OBJ)/cpu/$(1)/%.o: %.cu $(OBJ)/flags
	@mkdir -p $$(@D)
	$$(COMPILE) -DSLA_CPU $$(precision_flags.$(1)) -x c++ -c $$< -o $$@

$(OBJ)/cpu/$(1)/model.o: train_gpt2_sla.cu $(OBJ)/flags
	@mkdir -p $$(@D)
	$$(COMPILE) -DSLA_CPU -DSLA_NO_MAIN $$(precision_flags.$(1)) -x c++ -c $$< -o $$@
$(WITH_MODEL:%=$(OBJ)/cpu/$(1)/%.o): private CPPFLAGS += -DSLA_LINKED_MODEL
$(OBJ)/cpu/$(1)/test_gpt2_sla.o: private CXXFLAGS += $(COLD)
$(WITH_MODEL:%=$(BUILD)/$(1)/%_cpu): $(OBJ)/cpu/$(1)/model.o

$(BUILD)/$(1)/%_cpu: $(OBJ)/cpu/$(1)/%.o $(HOST_LIB) $(BUILD)/flags
	$$(CPU_LINK) $$(if $$(filter test_%,$$*),$$(GTEST)) -o $$@

$(BUILD)/$(1)/bench_cpu: $(OBJ)/cpu/$(1)/bench_cpu.o $(HOST_LIB) $(BUILD)/flags
	$$(CPU_LINK) -o $$@

endef
$(eval $(foreach p,fp32 bf16,$(call cpu_programs,$(p))))

# On an emulated GPU. The host code is that of the other programs: no sanitizer, and it lays out no arena.

EMU_LIBS := -rdynamic -lboost_context $(ONEDNN) -ldl $(MPI_LIBS)
EMU_LINK = @mkdir -p $(@D); set -x; $(CXX) $(EMUFLAGS) $(linked) $(EMU_LIBS)

$(EMU_OBJ)/%.o: %.cpp $(EMU_OBJ)/flags
	@mkdir -p $(@D)
	$(EMU_COMPILE) -c $< -o $@
# What executes PTX checks accesses itself, and is fast only if it is optimized; PTX says which sums are fused.
$(EMU_OBJ)/dev/emu/ptx/%.o $(EMU_OBJ)/dev/emu/races.o: private EMUFLAGS := \
  $(filter-out $(EMU_OPTIMIZE) -fsanitize% -fno-sanitize% -ffp-contract=%,$(EMUFLAGS)) \
  -O3 -g1 -fno-strict-aliasing -fno-trapping-math -ffp-contract=off
# Called for every access to shared memory.
$(EMU_OBJ)/dev/emu/shared_memory.o: private EMUFLAGS := $(filter-out $(EMU_OPTIMIZE),$(EMUFLAGS)) -O3 -g1

$(filter $(BUILD)/test_emu%,$(HOST_TESTS)): $(BUILD)/%: $(EMU_OBJ)/dev/test/%.o $(EMU_OBJS) $(BUILD)/emu_flags
	$(EMU_LINK) $(GTEST) -o $@

$(BUILD)/emu_ranks: $(EMU_OBJ)/dev/test/emu_ranks.o $(EMU_OBJS) $(HOST_LIB) $(BUILD)/flags $(BUILD)/emu_flags
	$(EMU_LINK) -o $@

PTX_COMPILE = $(NVCC) $(NVCC_CXX) $(CPPFLAGS) $(CXXSTD) -O3 -lineinfo $(if $(WERROR),-Werror all-warnings) -ptx
$(BUILD)/ptx_flags: force ; $(call remember,$(PTX_COMPILE))

define emulated_programs
$(EMU_OBJ)/$(1)/%.o: %.cu $(EMU_OBJ)/flags
	@mkdir -p $$(@D)
	$$(EMU_COMPILE) $$(precision_flags.$(1)) -x c++ -c $$< -o $$@

$(EMU_OBJ)/$(1)/model.o: train_gpt2_sla.cu $(EMU_OBJ)/flags
	@mkdir -p $$(@D)
	$$(EMU_COMPILE) -DSLA_NO_MAIN $$(precision_flags.$(1)) -x c++ -c $$< -o $$@
$(WITH_MODEL:%=$(EMU_OBJ)/$(1)/%.o): private CPPFLAGS += -DSLA_LINKED_MODEL
$(WITH_MODEL:%=$(BUILD)/$(1)/%_emu): $(EMU_OBJ)/$(1)/model.o
# Its kernels are those of the model's object; of the host's code accesses are not checked.
$(EMU_OBJ)/$(1)/test_gpt2_sla.o: private EMUFLAGS += -O0 \
  $(foreach kind,instrument-reads instrument-writes stack globals,--param asan-$(kind)=0)

$(BUILD)/$(1)/%_emu: $(EMU_OBJ)/$(1)/%.o $(EMU_OBJS) $(HOST_LIB) $(BUILD)/flags $(BUILD)/emu_flags
	$$(EMU_LINK) $$(if $$(filter test_%,$$*),$$(GTEST)) -o $$@

# nvcc's code for the same kernels, as PTX, which the emulated GPU can execute in their place: SLA_EMU_PTX names it.
$(BUILD)/$(1)/%.ptx: %.cu $(BUILD)/ptx_flags
	@mkdir -p $$(@D)
	$$(PTX_COMPILE) -arch=compute_80 $$(precision_flags.$(1)) $$(DEPENDENCIES) $$< -o $$@
$(BUILD)/$(1)/%_90a.ptx: %.cu $(BUILD)/ptx_flags
	@mkdir -p $$(@D)
	$$(PTX_COMPILE) -arch=compute_90a $$(precision_flags.$(1)) $$(DEPENDENCIES) $$< -o $$@
$(BUILD)/$(1)/%_75.ptx: %.cu $(BUILD)/ptx_flags
	@mkdir -p $$(@D)
	$$(PTX_COMPILE) -arch=compute_75 $$(precision_flags.$(1)) $$(DEPENDENCIES) $$< -o $$@

# They only plan, so that any machine can print them; the emulated GPU is needed to link.
$(BUILD)/$(1)/memory_table $(BUILD)/$(1)/gpu_model: $(BUILD)/$(1)/%: $(EMU_OBJ)/$(1)/%.o $(EMU_OBJS) $(HOST_LIB) \
  $(BUILD)/flags $(BUILD)/emu_flags
	$$(EMU_LINK) -o $$@

endef
$(eval $(foreach p,fp32 bf16 fp16 fp16_fma,$(call emulated_programs,$(p))))

# An emulated AMX unit, to be preloaded, and where in oneDNN it must answer for the CPU.

$(BUILD)/emulated_amx.so: dev/emu_amx/amx.cpp $(BUILD)/flags
	$(CXX) $(CXXSTD) $(WARNINGS) -O2 -march=native -fPIC -shared -Wl,-z,initfirst $< -ldl -o $@

$(BUILD)/onednn_cpuid.txt: $(shell $(CXX) -print-file-name=libdnnl.so)
	@mkdir -p $(@D)
	objdump -d --no-show-raw-insn $< | awk '$$2 == "cpuid" || $$2 == "xgetbv" { print $$1, $$2 }' > $@

# On a GPU

NVCC_COMPILE = @mkdir -p $(@D); set -x; $(NVCC) $(CPPFLAGS) $(NVCCFLAGS) $(precision_flags.$*) $(DEPENDENCIES) $<
# GoogleTest from the system, or from its sources where those are all there is
# (INCLUDES=".../googletest/include .../googletest").
GPU_GTEST = $(shell echo 'int main() {}' | $(CXX) -x c++ - -lgtest -o /dev/null 2>/dev/null && echo '$(GTEST)' || \
  echo '$(BUILD)/gtest.o -lpthread')

$(BUILD)/gtest.o:
	@mkdir -p $(@D)
	printf '\043include "src/gtest-all.cc"\n\043include "src/gtest_main.cc"\n' | \
	  $(CXX) $(CPPFLAGS) $(CXXSTD) -O1 -x c++ -c - -o $@

define gpu_program
$(BUILD)/%/$(1): $(1).cu $(HOST_LIB) $(BUILD)/nvcc_flags
	$$(NVCC_COMPILE) $(HOST_LIB) $(MPI_LIBS) -lcublasLt $(NCCL_LIBS) -o $$@

endef
$(eval $(foreach program,$(PROGRAMS) bench_gpu,$(call gpu_program,$(program))))

$(BUILD)/%/test_gpt2_sla: test_gpt2_sla.cu $(HOST_LIB) $(BUILD)/nvcc_flags $(filter %.o,$(GPU_GTEST))
	$(NVCC_COMPILE) $(HOST_LIB) $(MPI_LIBS) $(GPU_GTEST) -lcublasLt $(NCCL_LIBS) -o $@

define operations_test
$(BUILD)/%/$(1): dev/test/$(1).cu $(BUILD)/nvcc_flags $(filter %.o,$(GPU_GTEST))
	$$(NVCC_COMPILE) $$(GPU_GTEST) -lcublasLt -o $$@

endef
$(eval $(foreach test,$(OPERATIONS_TESTS),$(call operations_test,$(test))))

FUZZED := dev/test/fuzz_safetensors.cpp llmc/io/safetensors.cpp llmc/utils/files.cpp
$(BUILD)/fuzz_safetensors: $(FUZZED) llmc/io/safetensors.h $(addprefix llmc/utils/,files.h crc32c.h error.h)
	@mkdir -p $(BUILD)
	$(CXX) $(CPPFLAGS) $(CXXSTD) $(WARNINGS) -O1 -g1 -fsanitize=address,undefined -fno-sanitize-recover=all \
	  -Wno-unknown-pragmas -DSTANDALONE_FUZZER $(FUZZED) -o $@

-include $(wildcard $(BUILD)/*.d $(BUILD)/*/*.d \
  $(foreach depth,* */* */*/* */*/*/*,$(OBJ)/$(depth).d $(EMU_OBJ)/$(depth).d))
