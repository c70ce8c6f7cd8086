#!/usr/bin/env python3
"""The speed of sample_gpt2_sla_cpu: GPT-2 124M with random weights, one text at a time, in both precisions.

    make build/{fp32,bf16}/{sample_gpt2_sla_cpu,bench_cpu} build/fp32/train_gpt2_sla_cpu data/convert
    dev/bench/bench_sampling.py --vocabulary gpt2.tiktoken --work FOLDER [--llama-bench PROGRAM] [--rounds 5]

First it is compared with transformers and, if there is one, llama.cpp's llama-bench: prompts of 1,024 tokens, and 128
tokens drawn after 32. Then wirings among each other with 4,096 cached positions. One round runs each program once, so
that whatever else the machine does concerns all alike; the figures are medians of the rounds. Weights are drawn by the
trainer, which runs one step, into --work, about 2 GB; models that are there are used again.
For development only: it needs PyTorch and transformers, and nothing else in this project needs Python.
"""
import argparse
import json
import re
import statistics
import struct
import subprocess
import sys
import time
from pathlib import Path

try:
    import torch
    from transformers import AutoModelForCausalLM
except ImportError as e:
    sys.exit(f"error: bench_sampling.py needs PyTorch and transformers: {e}")

ROOT = Path(__file__).resolve().parents[2]
PROMPT, DRAWN, CACHED = 1024, 128, 4096
WIRINGS = ["plain", "sla(9,9)", "gqa(4)", "share(2)", "sla(9,9) gqa(4)", "window(512,SSSL)"]


def run(*command):
    done = subprocess.run([str(part) for part in command], cwd=ROOT, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"error: {' '.join(map(str, command))}: {done.stderr}")
    return done


def model_of(work, wiring, max_seq_len, vocabulary):
    """A folder with GPT-2 124M of random weights."""
    out = work / (re.sub(r"\W+", "_", wiring) + f"_{max_seq_len}")
    folder = out / "step_00000001"
    if not (folder / "model.safetensors").exists():
        tokens = work / "tokens.bin"
        tokens.write_bytes(struct.pack("<256H", *range(256)))
        run("build/fp32/train_gpt2_sla_cpu", "-e", "d12", "--wiring", wiring, "--max-seq-len", max_seq_len,
            "-t", 16, "-b", 1, "-x", 1, "-v", 0, "-i", tokens, "--tokenizer", vocabulary, "-o", out)
        (folder / "optimizer.safetensors").unlink()
    return folder


def sample(precision, folder, prompt_tokens, drawn, work):
    """{prompt and drawn: tokens/s, read: bytes/s, kv: bytes per token, cache: bytes} of a text whose prompt has so many
    tokens."""
    prompt = work / f"prompt_{prompt_tokens}.txt"
    prompt.write_text(" the" * (prompt_tokens - 1))  # a token each, after the end of text
    done = run(f"build/{precision}/sample_gpt2_sla_cpu", folder, "--prompt-file", prompt, "-n", drawn,
               "--ignore-end-of-text")
    found = re.search(r"prompt: (\d+) tokens, (\d+) tokens/s; drawn: (\d+) tokens, ([\d.]+) tokens/s, "
                      r"([\d.]+) (\w+)/s .*; K/V cache ([\d.]+ \w+), (\d+) bytes per token", done.stderr)
    if found is None or int(found[1]) != prompt_tokens or int(found[3]) != drawn:
        sys.exit(f"error: the sampler says {done.stderr}")
    return {"prompt": float(found[2]), "drawn": float(found[4]), "kv": int(found[8]), "cache": found[7],
            "read": float(found[5]) * {"MB": 1e6, "GB": 1e9}[found[6]]}


def llama_bench(program, model):
    done = run(program, "-m", model, "-p", PROMPT, "-n", DRAWN, "-t", torch.get_num_threads(), "-r", 1, "-o", "json")
    return {"prompt" if test["n_prompt"] > 0 else "drawn": test["avg_ts"] for test in json.loads(done.stdout)}


@torch.no_grad()
def transformers_speed(model):
    prompt = torch.full((1, PROMPT), 262)
    begin = time.perf_counter()
    model(prompt, use_cache=True, logits_to_keep=1)
    seconds = time.perf_counter() - begin
    begin = time.perf_counter()
    model.generate(prompt[:, :32], do_sample=False, min_new_tokens=DRAWN, max_new_tokens=DRAWN, pad_token_id=0)
    return {"prompt": PROMPT / seconds, "drawn": DRAWN / (time.perf_counter() - begin)}


def medians(runs):
    numbers = [key for key, value in runs[0].items() if isinstance(value, (int, float))]
    return {key: statistics.median(run[key] for run in runs) for key in numbers}


def ceilings():
    """Rates of matmuls in FLOP/s, of both precisions, and of copies in bytes/s."""
    gemm_bf16, copy = map(float, run("build/bf16/bench_cpu", "ceilings").stdout.split())
    gemm_fp32, _ = map(float, run("build/fp32/bench_cpu", "ceilings").stdout.split())
    return {"bf16": gemm_bf16, "fp32": gemm_fp32, "copy": copy}


def compare(args):
    folder = model_of(args.work, "plain", PROMPT + DRAWN, args.vocabulary)
    ways = {}
    for precision in ("fp32", "bf16"):
        ways[f"sample_gpt2_sla_cpu, {precision}"] = lambda precision=precision: {
            **sample(precision, folder, 32, DRAWN, args.work),
            "prompt": sample(precision, folder, PROMPT, 2, args.work)["prompt"]}
    if args.llama_bench:
        for precision in ("fp32", "bf16"):
            gguf = args.work / f"plain_{precision}.gguf"
            if not gguf.exists():
                run("data/convert", folder, gguf, "--type", precision)
            ways[f"llama.cpp, {precision}"] = lambda gguf=gguf: llama_bench(args.llama_bench, gguf)
    for precision, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
        ways[f"transformers, {precision}"] = lambda model=model: transformers_speed(model)
    runs = {name: [] for name in ways}
    limits = [ceilings()]
    for _ in range(args.rounds):
        for name, way in ways.items():
            runs[name].append(way())
        limits.append(ceilings())
    limit = {key: max(of_round[key] for of_round in limits) for key in limits[0]}
    speeds = {name: medians(of_way) for name, of_way in runs.items()}
    best = max(speed["drawn"] for name, speed in speeds.items() if not name.startswith("sample"))
    elements = sum(p.numel() for p in model.parameters())
    flops = 2 * (elements - (PROMPT + DRAWN) * 768)  # of a prompt's token, of whose weights positions are added
    print(f"| {len(runs)} ways, {args.rounds} rounds | drawn, tokens/s | of the best peer | share of the copy "
          f"bandwidth, {limit['copy'] * 1e-9:.1f} GB/s | prompt, tokens/s | share of its GEMM rate |\n"
          f"| --- | --: | --: | --: | --: | --: |")
    for name, speed in speeds.items():
        precision = name[-4:]
        read = speed.get("read", speed["drawn"] * elements * (4 if precision == "fp32" else 2))
        print(f"| {name} | {speed['drawn']:.1f} | {speed['drawn'] / best:.2f} | {100 * read / limit['copy']:.0f} % | "
              f"{speed['prompt']:.0f} | {100 * speed['prompt'] * flops / limit[precision]:.0f} % of "
              f"{limit[precision] * 1e-9:.0f} GFLOP/s |", flush=True)


def wirings(args, compared):
    folders = {wiring: model_of(args.work, wiring, CACHED + DRAWN, args.vocabulary) for wiring in compared}
    runs = {(wiring, precision): [] for wiring in compared for precision in ("fp32", "bf16")}
    for _ in range(args.rounds):
        for wiring, precision in runs:
            runs[wiring, precision].append(sample(precision, folders[wiring], CACHED, DRAWN // 2, args.work))
    print(f"\n| {CACHED:,} cached positions | K/V bytes per token, fp32 | cache, fp32 | tokens/s, fp32 | of plain | "
          "tokens/s, bf16 | of plain |\n| --- | --: | --: | --: | --: | --: | --: |")
    drawn = {key: medians(of_way)["drawn"] for key, of_way in runs.items()}
    for wiring in compared:
        first = runs[wiring, "fp32"][0]
        columns = [f"{drawn[wiring, p]:.1f} | {drawn[wiring, p] / drawn['plain', p]:.2f}" for p in ("fp32", "bf16")]
        print(f"| `{wiring}` | {first['kv']:,} | {first['cache']} | {' | '.join(columns)} |")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vocabulary", type=Path, required=True,
                        help="GPT-2's, in any format that data/tokenize takes")
    parser.add_argument("--work", type=Path, required=True, help="a folder for models")
    parser.add_argument("--llama-bench", type=Path, help="llama.cpp's program")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--wirings", help="these alone, with ; between them, plain first; nothing else is compared")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    args.work, args.vocabulary = args.work.resolve(), args.vocabulary.resolve()
    if args.wirings:
        return wirings(args, [wiring.strip() for wiring in args.wirings.split(";")])
    compare(args)
    wirings(args, WIRINGS)


if __name__ == "__main__":
    main()
