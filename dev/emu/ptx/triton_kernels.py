"""Compiles kernels written in Triton to PTX for sm_80 and sm_90a, without a GPU (pip install triton).

    dev/emu/ptx/triton_kernels.py FOLDER

dev/test/test_emu_triton.cpp executes them and compares with sums in double: code of another compiler shows whether the
interpreter does what the PTX manual says, and not what nvcc's code happens to need. FOLDER/NAME.ptx begins with the
launch: threads of a block, bytes of shared memory. The kernels are this project's own, and so is the PTX that Triton
makes of them. Some of it lies in dev/emu/ptx/triton.tar.xz, whose files have no folder.
"""
import os
import re
import sys

os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


@triton.jit
def matmul(a, b, c, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """c (M, N) = a (M, K) b (K, N); what is beyond M, N and K is masked. Eight rows of blocks are neighbours."""
    blocks_m, blocks_n = tl.cdiv(M, BM), tl.cdiv(N, BN)
    group = tl.program_id(0) // (8 * blocks_n)
    rows = tl.minimum(blocks_m - group * 8, 8)
    block_m = group * 8 + tl.program_id(0) % (8 * blocks_n) % rows
    block_n = tl.program_id(0) % (8 * blocks_n) // rows
    m, n, k = block_m * BM + tl.arange(0, BM), block_n * BN + tl.arange(0, BN), tl.arange(0, BK)
    acc = tl.zeros((BM, BN), tl.float32)
    for first in range(0, K, BK):
        column, row = (first + k)[None, :], (first + k)[:, None]
        x = tl.load(a + m[:, None] * K + column, mask=(m[:, None] < M) & (column < K), other=0.0)
        y = tl.load(b + row * N + n[None, :], mask=(row < K) & (n[None, :] < N), other=0.0)
        acc = tl.dot(x, y, acc)
    tl.store(c + m[:, None] * N + n[None, :], acc, mask=(m[:, None] < M) & (n[None, :] < N))


@triton.jit
def matmul_of_transposed(a, b, c, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """c (M, N) = a^T b^T of a (K, M), b (N, K); what is beyond M, N and K is masked."""
    blocks_n = tl.cdiv(N, BN)
    block_m, block_n = tl.program_id(0) // blocks_n, tl.program_id(0) % blocks_n
    m, n, k = block_m * BM + tl.arange(0, BM), block_n * BN + tl.arange(0, BN), tl.arange(0, BK)
    acc = tl.zeros((BM, BN), tl.float32)
    for first in range(0, K, BK):
        column, row = (first + k)[None, :], (first + k)[:, None]
        x = tl.load(a + column * M + m[:, None], mask=(m[:, None] < M) & (column < K), other=0.0)
        y = tl.load(b + n[None, :] * K + row, mask=(row < K) & (n[None, :] < N), other=0.0)
        acc = tl.dot(x, y, acc)
    tl.store(c + m[:, None] * N + n[None, :], acc, mask=(m[:, None] < M) & (n[None, :] < N))


@triton.jit
def softmax(out, inp, columns, B: tl.constexpr):
    """A row of `columns` values for each program."""
    row, i = tl.program_id(0), tl.arange(0, B)
    x = tl.load(inp + row * columns + i, mask=i < columns, other=-float("inf"))
    e = tl.exp(x - tl.max(x, axis=0))
    tl.store(out + row * columns + i, e / tl.sum(e, axis=0), mask=i < columns)


@triton.jit
def layernorm(out, mean, rstd, inp, weight, bias, C, eps, B: tl.constexpr):
    """A row of C channels for each program."""
    row, i = tl.program_id(0), tl.arange(0, B)
    x = tl.load(inp + row * C + i, mask=i < C, other=0.0).to(tl.float32)
    m = tl.sum(x, axis=0) / C
    d = tl.where(i < C, x - m, 0.0)
    r = 1 / tl.sqrt(tl.sum(d * d, axis=0) / C + eps)
    tl.store(mean + row, m)
    tl.store(rstd + row, r)
    y = d * r * tl.load(weight + i, mask=i < C) + tl.load(bias + i, mask=i < C)
    tl.store(out + row * C + i, y, mask=i < C)


@triton.jit
def attention(out, q, k, v, T, scale, BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr):
    """Causal attention of one head (program_id(1)) for BM queries: (heads, T, D) each; T is a multiple of BM and BN."""
    first = tl.program_id(0) * BM
    head = tl.program_id(1).to(tl.int64) * T * D
    m, n, d = first + tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, D)
    query = tl.load(q + head + m[:, None] * D + d[None, :])
    largest = tl.full((BM,), -float("inf"), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    acc = tl.zeros((BM, D), tl.float32)
    for start in range(0, first + BM, BN):
        key = tl.load(k + head + (start + n)[None, :] * D + d[:, None])
        scores = tl.dot(query, key) * (scale * 1.4426950408889634)
        scores = tl.where(m[:, None] >= (start + n)[None, :], scores, -float("inf"))
        now = tl.maximum(largest, tl.max(scores, axis=1))
        p = tl.exp2(scores - now[:, None])
        old = tl.exp2(largest - now)
        total = total * old + tl.sum(p, axis=1)
        value = tl.load(v + head + (start + n)[:, None] * D + d[None, :])
        acc = tl.dot(p.to(value.dtype), value, acc * old[:, None])
        largest = now
    tl.store(out + head + m[:, None] * D + d[None, :], (acc / total[:, None]).to(out.dtype.element_ty))


@triton.jit
def histogram(counts, inp, n, B: tl.constexpr, BINS: tl.constexpr):
    """counts[x] += how many of the n values are x, for x below BINS."""
    i = tl.program_id(0) * B + tl.arange(0, B)
    x = tl.load(inp + i, mask=i < n, other=0)
    tl.atomic_add(counts + x, 1, mask=(i < n) & (x < BINS))


@triton.jit
def cumsum(out, inp, columns, B: tl.constexpr):
    """The running sum of each row: a scan across lanes and warps."""
    row, i = tl.program_id(0), tl.arange(0, B)
    x = tl.load(inp + row * columns + i, mask=i < columns, other=0.0)
    tl.store(out + row * columns + i, tl.cumsum(x, axis=0), mask=i < columns)


@triton.jit
def transpose(out, inp, M, N, B: tl.constexpr):
    """out (N, M) = inp (M, N)^T, through shared memory."""
    m, n = tl.program_id(0) * B + tl.arange(0, B), tl.program_id(1) * B + tl.arange(0, B)
    x = tl.load(inp + m[:, None] * N + n[None, :], mask=(m[:, None] < M) & (n[None, :] < N))
    tl.store(out + n[:, None] * M + m[None, :], tl.trans(x), mask=(n[:, None] < N) & (m[None, :] < M))


MATMUL, MATMUL_F16 = "*bf16 *bf16 *fp32 i32 i32 i32", "*fp16 *fp16 *fp32 i32 i32 i32"

# name, kernel, types of the pointers and numbers, constants, warps, stages, numbers that are multiples of 16
KERNELS = [
    ("matmul_bf16", matmul, "*bf16 *bf16 *fp32 i32 i32 i32", dict(BM=64, BN=64, BK=32), 4, 3, ""),
    ("matmul_bf16_aligned", matmul, "*bf16 *bf16 *fp32 i32 i32 i32", dict(BM=128, BN=64, BK=64), 8, 3, "MNK"),
    ("matmul_fp16", matmul, "*fp16 *fp16 *fp32 i32 i32 i32", dict(BM=64, BN=32, BK=32), 4, 2, "NK"),
    ("matmul_tf32", matmul, "*fp32 *fp32 *fp32 i32 i32 i32", dict(BM=32, BN=64, BK=32), 4, 2, "NK"),
    ("softmax", softmax, "*fp32 *fp32 i32", dict(B=1024), 4, 1, ""),
    ("layernorm_fp32", layernorm, "*fp32 *fp32 *fp32 *fp32 *fp32 *fp32 i32 fp32", dict(B=1024), 4, 1, ""),
    ("layernorm_bf16", layernorm, "*bf16 *fp32 *fp32 *bf16 *bf16 *bf16 i32 fp32", dict(B=2048), 8, 1, "C"),
    ("attention_bf16", attention, "*bf16 *bf16 *bf16 *bf16 i32 fp32", dict(BM=64, BN=64, D=64), 4, 3, "T"),
    ("attention_fp16", attention, "*fp16 *fp16 *fp16 *fp16 i32 fp32", dict(BM=128, BN=32, D=128), 8, 2, "T"),
    ("histogram", histogram, "*i32 *i32 i32", dict(B=512, BINS=32), 4, 1, ""),
    ("cumsum", cumsum, "*fp32 *fp32 i32", dict(B=1024), 4, 1, ""),
    ("transpose", transpose, "*bf16 *bf16 i32 i32", dict(B=64), 4, 1, "M"),
]
# With wgmma. A row of a block in shared memory has as many bytes as its swizzle: 128 (or more), 64 or 32.
KERNELS_90 = [
    ("matmul_bf16_wgmma", matmul, MATMUL, dict(BM=64, BN=64, BK=32), 4, 3, "NK"),
    ("matmul_bf16_two_warpgroups", matmul, MATMUL, dict(BM=128, BN=128, BK=64), 8, 3, "MNK"),
    ("matmul_bf16_swizzle32", matmul, MATMUL, dict(BM=64, BN=16, BK=16), 4, 2, "NK"),
    ("matmul_fp16_wgmma", matmul, MATMUL_F16, dict(BM=64, BN=32, BK=64), 4, 4, "NK"),
    ("matmul_tf32_wgmma", matmul, "*fp32 *fp32 *fp32 i32 i32 i32", dict(BM=64, BN=64, BK=32), 4, 2, "NK"),
    ("matmul_of_transposed_bf16", matmul_of_transposed, MATMUL, dict(BM=64, BN=64, BK=64), 4, 3, "MNK"),
    ("matmul_of_transposed_wide", matmul_of_transposed, MATMUL, dict(BM=128, BN=256, BK=32), 8, 2, "MNK"),
    ("matmul_of_transposed_fp16", matmul_of_transposed, MATMUL_F16, dict(BM=64, BN=32, BK=16), 4, 2, "MNK"),
    ("attention_bf16_wgmma", attention, "*bf16 *bf16 *bf16 *bf16 i32 fp32", dict(BM=64, BN=64, D=64), 4, 3, "T"),
    ("attention_bf16_wgmma128", attention, "*bf16 *bf16 *bf16 *bf16 i32 fp32", dict(BM=128, BN=64, D=128), 8, 2, "T"),
    ("attention_fp16_wgmma", attention, "*fp16 *fp16 *fp16 *fp16 i32 fp32", dict(BM=64, BN=32, D=128), 4, 2, "T"),
]


def compiled(capability, kernel, types, constants, warps, stages, multiples_of_16):
    names = [n for n in kernel.arg_names if n not in constants]
    signature = dict(zip(names, types.split())) | {n: "constexpr" for n in constants}
    is_aligned = lambda n: signature[n].startswith("*") or n in multiples_of_16
    attributes = {(kernel.arg_names.index(n),): [["tt.divisibility", 16]] for n in names if is_aligned(n)}
    source = ASTSource(kernel, signature, constexprs=constants, attrs=attributes)
    options = {"num_warps": warps, "num_stages": stages}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def main():
    folder = sys.argv[1]
    os.makedirs(folder, exist_ok=True)
    for capability, (name, kernel, types, constants, warps, stages, multiples_of_16) in (
        [(80, k) for k in KERNELS] + [(90, k) for k in KERNELS_90]):
        k = compiled(capability, kernel, types, constants, warps, stages, multiples_of_16)
        code = re.sub(r"\n\t?\.section\s*\.debug.*", "\n", k.asm["ptx"], flags=re.S)  # for debuggers, with paths
        code = re.sub(r'\.file\s+(\d+) ".*?([^/"]+)"', r'.file \1 "dev/emu/ptx/\2"', code)
        with open(os.path.join(folder, name + ".ptx"), "w") as f:
            f.write(f"// launch {32 * warps} {k.metadata.shared}\n")
            f.write(f"// Made by Triton {triton.__version__} of `{kernel.__name__}` in dev/emu/ptx/triton_kernels.py, ")
            f.write("this project's own code.\n")
            f.write(code.lstrip("\n"))


main()
