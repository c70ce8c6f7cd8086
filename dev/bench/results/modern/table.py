#!/usr/bin/env python3
"""The tables of README.md beside it, from the logs of modern.toml's runs: table.py OUT. A run that is not finished has none."""
import json
import math
import statistics
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent / "sla"))
from differences import t_quantile  # noqa: E402

OUT = Path(sys.argv[1] if len(sys.argv) == 2 else sys.exit("error: table.py takes the folder of modern.toml's runs"))
MODERN = ["rmsnorm", "qknorm", "rope", "relu2", "untied", "softcap(15)"]


def bits(run, step):
    """Validation loss in bits per byte after the last update; None if it has not come so far."""
    log = run / "log.jsonl"
    for line in reversed(log.read_text().splitlines() if log.exists() else []):
        values = json.loads(line)
        if values.get("step") == step and "val_loss" in values:
            return values["val_bits_per_byte"]
    return None


def cell(value, form="{:.4f}"):
    return "" if value is None else form.format(value)


def main():
    rates = sorted((path.name for path in OUT.glob("rates/*")), key=float)
    print("| | " + " | ".join(rates) + " |\n| --- |" + " --: |" * len(rates))
    for wiring in "plain", "modern":
        print(f"| {wiring} | " + " | ".join(cell(bits(OUT / "rates" / r / f"{wiring}-1", 300)) for r in rates) + " |")
    print("\n| | seed 1 | 2 | 3 | mean | to `modern`, of the seeds that both have |")
    print("| --- | --: | --: | --: | --: | --: |")
    names = {"plain": "plain", "modern": "modern"} | {
        f"without `{part}`": "_".join(p.replace("(", "_").replace(")", "") for p in MODERN if p != part)
        for part in MODERN}
    losses = {name: [bits(OUT / "parts" / f"{folder}-{seed}", 1000) for seed in (1, 2, 3)]
              for name, folder in names.items()}
    for name, values in losses.items():
        done = [v for v in values if v is not None]
        pairs = [a - b for a, b in zip(values, losses["modern"]) if None not in (a, b)]
        difference = ""
        if len(pairs) > 1 and name != "modern":
            half = t_quantile(len(pairs) - 1) * statistics.stdev(pairs) / math.sqrt(len(pairs))
            difference = f"{statistics.mean(pairs):+.4f} +- {half:.4f}"
        print(f"| {name} | {' | '.join(map(cell, values))} | {cell(statistics.mean(done) if done else None)} | "
              f"{difference} |")


if __name__ == "__main__":
    main()
