#!/usr/bin/env python3
"""The kernels of an update of train_gpt2_sla by time, their sum beside the update's, and the clock.

    dev/bench/kernel_times.py TRAINER OPTION...      # options without -i, -o and -x; such as -e d12 -b 32 -t 1024

Two runs with random tokens: ten updates, of which the median is taken without the first two, while nvidia-smi shows the
clock; then one update under ncu, which must be found on PATH, each kernel by itself, with caches and the clock as they
are.
"""
import csv
import json
import random
import re
import statistics
import struct
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

TOKENS, TOKEN_IDS = 2_000_000, 256  # ids that every vocabulary has
FIRST_KERNEL = "embedding_forward_kernel"  # of an update; before it come the matmuls that measure the GPU
MICROSECONDS = {"nsecond": 1e-3, "ns": 1e-3, "usecond": 1, "us": 1, "msecond": 1e3, "ms": 1e3, "second": 1e6, "s": 1e6}


def fail(message):
    sys.exit(f"error: kernel_times.py: {message}")


def run(command):
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        fail(f"{' '.join(command)}: status {done.returncode}: {done.stderr[-2000:]}")


def median_update(trainer, folder):
    """The median of an update, in ms, and of the clock, in MHz; the clock is None where nvidia-smi shows none."""
    query = ["nvidia-smi", "--query-gpu=clocks.sm", "--format=csv,noheader,nounits", "-lms", "100"]
    clock = subprocess.Popen(query, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        run(trainer + ["-x", "10", "-o", f"{folder}/run"])
    finally:
        clock.terminate()
    clocks = [int(line) for line in clock.communicate()[0].splitlines() if line.strip().isdigit()]
    lines = [json.loads(line) for line in Path(folder, "run/log.jsonl").read_text().splitlines()]
    updates = [line["ms"] for line in lines if line.get("step", 0) > 2 and "ms" in line]
    return statistics.median(updates), statistics.median(clocks[len(clocks) // 2:]) if clocks else None


def kernels_of_update(trainer, folder):
    """Microseconds of each launch, by the kernel's name without its parameters."""
    log = Path(folder, "ncu.csv")
    run(["ncu", "--clock-control", "none", "--cache-control", "none", "--csv", "--metrics", "gpu__time_duration.sum",
         "--log-file", str(log)] + trainer + ["-x", "1"])
    text = log.read_text()
    if '"ID"' not in text:
        fail(f"ncu has written no table: {text[-2000:]}")
    times = defaultdict(list)
    for row in csv.DictReader(text[text.index('"ID"'):].splitlines()):
        name = re.sub(r"^void |\(.*|<.*", "", row["Kernel Name"])
        if row["Metric Name"] != "gpu__time_duration.sum" or not (times or name == FIRST_KERNEL):
            continue
        if row["Metric Unit"] not in MICROSECONDS:
            fail(f"ncu gives times in {row['Metric Unit']}")
        times[name].append(float(row["Metric Value"].replace(",", "")) * MICROSECONDS[row["Metric Unit"]])
    if not times:
        fail(f"ncu has written no {FIRST_KERNEL}, with which an update begins")
    return times


def main():
    if len(sys.argv) < 2:
        fail("usage: kernel_times.py TRAINER OPTION...")
    with tempfile.TemporaryDirectory() as folder:
        ids = random.Random(1).choices(range(TOKEN_IDS), k=TOKENS)
        Path(folder, "tokens.bin").write_bytes(struct.pack(f"<{TOKENS}H", *ids))
        trainer = sys.argv[1:] + ["-i", f"{folder}/tokens.bin", "-v", "0"]
        update, clock = median_update(trainer, folder)
        times = kernels_of_update(trainer, folder)
    total = sum(map(sum, times.values())) / 1000
    print("| kernel | launches | ms | share |\n| --- | --: | --: | --: |")
    for name, each in sorted(times.items(), key=lambda item: -sum(item[1])):
        print(f"| {name} | {len(each)} | {sum(each) / 1000:.3f} | {sum(each) / 10 / total:.1f} % |")
    print(f"\n{sum(map(len, times.values()))} launches, the first update's, {total:.2f} ms; an update takes "
          f"{update:.2f} ms, of which {update - total:.2f} ms are between kernels"
          + (f"; clocks.sm {clock:.0f} MHz." if clock is not None else "; nvidia-smi shows no clock."))


main()
