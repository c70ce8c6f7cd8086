#!/usr/bin/env python3
"""The tables of README.md beside it, from the logs of run.sh: table.py OUT [BASELINE]. A run that is not finished has
none."""
import json
import math
import statistics
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent / "sla"))
from differences import t_quantile  # noqa: E402

ARMS = ["plain", "sla(6,3)", "sla(6,3,v)", "sla(6,3,k)", "vres", "router", "depth", "dense"]
SEEDS = [2, 3, 4]


def bits(run):
    """(updates, bits a byte of the validation data after the last of them), of a run with its last validation."""
    log = run / "log.jsonl"
    lines = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    validations = [x for x in lines if x.get("val_loss") is not None and x["step"] > 0]
    return (validations[-1]["step"], validations[-1]["val_bits_per_byte"]) if validations else (None, None)


def cell(value, form="{:.4f}"):
    return "" if value is None else form.format(value)


def main():
    out, baseline = Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "plain"
    folder = {arm: arm.replace("(", "_").replace(",", "_").replace(")", "") for arm in ARMS}
    rates = sorted({path.name for path in out.glob("*/*") if path.is_dir()}, key=float)
    of_rates, losses, updates = {}, {}, {}
    print("| | updates | " + " | ".join(rates) + " |\n| --- | --: |" + " --: |" * len(rates))
    for arm in ARMS:
        runs = {rate: bits(out / folder[arm] / rate / f"{folder[arm]}-1") for rate in rates}
        of_rates[arm] = {rate: loss for rate, (_, loss) in runs.items() if loss is not None}
        best = min(of_rates[arm], key=of_rates[arm].get) if of_rates[arm] else None
        updates[arm] = next((step for step, _ in runs.values() if step), "")
        losses[arm] = [bits(out / folder[arm] / str(best) / f"{folder[arm]}-{seed}")[1] for seed in SEEDS]
        print(f"| `{arm}` | {updates[arm]} | " + " | ".join(
            cell(runs[rate][1], "**{:.4f}**" if rate == best else "{:.4f}") for rate in rates) + " |")
    print(f"\n| | {' | '.join(f'seed {seed}' for seed in SEEDS)} | mean | to `{baseline}` |")
    print("| --- |" + " --: |" * (len(SEEDS) + 2))
    for arm in ARMS:
        values = losses[arm]
        pairs = [a - b for a, b in zip(values, losses[baseline]) if None not in (a, b)]
        difference = ""
        if len(pairs) > 1 and arm != baseline:
            half = t_quantile(len(pairs) - 1) * statistics.stdev(pairs) / math.sqrt(len(pairs))
            difference = f"{statistics.mean(pairs):+.4f} +- {half:.4f}"
        mean = None if None in values else statistics.mean(values)
        print(f"| `{arm}` | {' | '.join(map(cell, values))} | {cell(mean)} | {difference} |")


if __name__ == "__main__":
    main()
