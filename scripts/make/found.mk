# What this machine has: the CPU's instructions, nvcc and its GPUs, libraries. The Makefile or the user sets CXX,
# CXXSTD, cppflags, MARCH, NVCC, GPU_ARCH, PRECISION and INCLUDES before.

CPU_HAS := $(shell $(CXX) -march=native -dM -E -x c++ /dev/null 2>/dev/null | \
  grep -oE '__(AMX_BF16|AVX512BF16|AVX2)__|__ARM_FEATURE_CRC32')
ANY_MARCH := $(if $(filter __AVX2__,$(CPU_HAS)),x86-64-v3,$(if $(filter __ARM_FEATURE_CRC32,$(CPU_HAS)),armv8-a+crc))
HOST_MARCH := $(or $(filter-out native,$(MARCH)),$(if $(ANY_MARCH),$(shell \
  $(CXX) -march=$(ANY_MARCH) -E -x c++ /dev/null >/dev/null 2>&1 && echo $(ANY_MARCH))),native)
CPU_BF16 := $(patsubst __%__,%,$(filter __AMX_BF16__ __AVX512BF16__,$(CPU_HAS)))
# What -march=native means here: programs that were compiled for another machine's CPU are built anew.
NATIVE_CPU := $(shell $(CXX) -march=native -Q --help=target 2>/dev/null | cksum)
# To collect garbage is a tenth of g++'s time. It need not below half a gigabyte.
KEEP_GARBAGE := --param ggc-min-heapsize=524288
KEEP_GARBAGE := $(shell $(CXX) -Werror $(KEEP_GARBAGE) -E -x c++ /dev/null >/dev/null 2>&1 && echo '$(KEEP_GARBAGE)')

comma := ,
# have_header NAME [FLAGS]
have_header = $(shell printf '\043include <%s>\n' $(1) | \
  $(CXX) $(CXXSTD) $(cppflags) $(2) -E -x c++ - >/dev/null 2>&1 && echo yes)
found = $(if $(1),found,not found)
# Which nvcc, GPUs and architectures; scripts/gpu.sh says what these are.
define newline


endef
$(eval $(subst |,$(newline),$(shell \
  NVCC='$(NVCC)' GPU_ARCH='$(GPU_ARCH)' PRECISION='$(PRECISION)' scripts/gpu.sh | tr '\n' '|')))
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
# oneDNN, which the CPU's programs need, and libarchive with zlib, which data/tokenize needs.
HAVE_DNNL := $(call have_header,dnnl.h)
HAVE_ARCHIVE := $(and $(call have_header,archive.h),$(call have_header,zlib.h))
# Chart.js, of Debian's and Ubuntu's libjs-chart.js: version 3 and 4 have different names.
CHART_FOLDERS := /usr/share/javascript/chart.js /usr/share/nodejs/chart.js/dist $(INCLUDES)
CHART_JS := $(firstword $(wildcard $(foreach f,$(CHART_FOLDERS),$(f)/chart.min.js $(f)/chart.umd.js)))
CHART_LICENCE := $(if $(CHART_JS),$(wildcard /usr/share/doc/libjs-chart.js/copyright))
