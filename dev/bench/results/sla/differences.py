#!/usr/bin/env python3
"""The numbers of README.md from the runs' logs: differences.py [runs/evidence | logs.tar.xz], by default the archive beside
it. Tables in Markdown: of each arm the rates that were tried and the bits per byte of each seed, of each comparison the
mean difference of pairs, its 95 % interval by Student and its p, by Holm over the arms of a question. The trainer writes
the logs; nothing here is of ./report."""
import csv
import functools
import io
import json
import math
import os
import re
import statistics
import sys
import tarfile

DELTA = 0.01  # bits per byte: the smallest difference of interest


def t_density(x, n):
    return math.exp(math.lgamma((n + 1) / 2) - math.lgamma(n / 2)) / math.sqrt(n * math.pi) * (1 + x * x / n) ** (
        -(n + 1) / 2)


def t_tail(x, n):
    """P(|t| > x) of Student's t with n degrees of freedom: Simpson's rule on the angle, atan(t / sqrt(n))."""
    steps, top = 2000, math.atan(abs(x) / math.sqrt(n))
    h = top / steps
    value = lambda a: t_density(math.sqrt(n) * math.tan(a), n) * math.sqrt(n) / math.cos(a) ** 2
    area = sum((1 if i in (0, steps) else 4 if i % 2 else 2) * value(i * h) for i in range(steps + 1)) * h / 3
    return max(0.0, 1 - 2 * area)


@functools.lru_cache(maxsize=None)
def t_quantile(n):
    """The x that |t| exceeds with probability 0.05."""
    low, high = 0.0, 1000.0
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if t_tail(middle, n) > 0.05 else (low, middle)
    return high


def files(path, wanted):
    """(folder, name, text) of each file of these names in a folder or an archive."""
    if os.path.isdir(path):
        for folder, _, names in os.walk(path):
            for name in wanted:
                if name in names:
                    with open(os.path.join(folder, name), encoding="utf-8") as file:
                        yield os.path.relpath(folder, path), name, file.read()
        return
    with tarfile.open(path) as archive:
        for member in archive:
            if os.path.basename(member.name) in wanted:
                yield (os.path.dirname(member.name), os.path.basename(member.name),
                       io.TextIOWrapper(archive.extractfile(member), "utf-8").read())


def validations(text, key):
    """(the run's description or None, {step: what its validation has under a key}) of a log."""
    description, found = None, {}
    for line in text.splitlines():
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if "run" in entry:
            description = entry["run"]
        elif key in entry:
            found[entry["step"]] = entry[key]
    return description, found


def read(path):
    """{(question, rate or length): {wiring: {seed: bits per byte}}} of the runs that have done all updates."""
    found = {}
    for folder, _, text in files(path, ["log.jsonl"]):
        match = re.search(r"(\w+)/([^/]+)/[^/]+-(\d+)$", folder)
        description, bits = validations(text, "val_bits_per_byte")
        if match and description and description["steps"] in bits:
            question, rate, seed = match.groups()
            found.setdefault((question, rate), {}).setdefault(description["wiring"], {})[int(seed)] = bits[
                description["steps"]]
    return found


def by_position(text, bands):
    """The mean loss of each band, (first position, last position), that the run's context has; `text` is what
    ./evaluate_gpt2_sla_cpu --positions writes."""
    rows = [(int(row["position"]), int(row["tokens"]), float(row["loss"])) for row in csv.DictReader(io.StringIO(text))]
    means = []
    for first, last in bands:
        of_band = [(tokens, loss) for position, tokens, loss in rows if first <= position <= last]
        if of_band:
            means.append(sum(tokens * loss for tokens, loss in of_band) / sum(tokens for tokens, _ in of_band))
    return means


def row(*cells):
    print("| " + " | ".join(cells) + " |")


def interval(differences):
    """(mean, half of the 95 % interval, p); the last two are NaN of a single pair."""
    mean, n = statistics.mean(differences), len(differences)
    if n < 2:
        return mean, math.nan, math.nan
    error = statistics.stdev(differences) / math.sqrt(n)
    return mean, t_quantile(n - 1) * error, t_tail(mean / error, n - 1) if error > 0 else 0.0


def holm(ps):
    """Each p times how many are not smaller, and no less than that of a smaller one."""
    adjusted, worst = [0.0] * len(ps), 0.0
    for rank, i in enumerate(sorted(range(len(ps)), key=lambda i: ps[i])):
        worst = max(worst, min(1.0, (len(ps) - rank) * ps[i]))
        adjusted[i] = worst
    return adjusted


def deciding_pairs(mean, sigma, pairs):
    """How many pairs would decide with this mean and sigma, before Holm: their interval leaves out 0, or lies within
    +-DELTA."""
    enough = max(abs(mean), DELTA - abs(mean))
    while pairs < 1000 and t_quantile(pairs - 1) * sigma / math.sqrt(pairs) > enough:
        pairs += 1
    return pairs


def said(mean, half, p, sigma, pairs):
    if math.isnan(half):
        return "one pair"
    if p < 0.05:
        return "lower" if mean < 0 else "higher"
    if abs(mean) + half < DELTA:
        return f"the same within {DELTA}"
    return f"not decided: {deciding_pairs(mean, sigma, pairs + 1)} such pairs would"


def less(a, b):
    """{seed: a's less b's} of the seeds that both have."""
    return {seed: a[seed] - b[seed] for seed in sorted(a) if seed in b}


def comparisons(title, arms):
    """arms: [(name, {seed: difference})], those without a pair are left out."""
    arms = [(name, list(differences.values())) for name, differences in arms if differences]
    if not arms:
        return
    print(f"\n{title}\n")
    row("arm", "pairs", "difference", "95 %", "p, Holm", "")
    row("---", "--:", "--:", "--:", "--:", "---")
    intervals = [interval(differences) for _, differences in arms]
    adjusted = holm([1.0 if math.isnan(p) else p for _, _, p in intervals])
    for (name, differences), (mean, half, _), p in zip(arms, intervals, adjusted):
        sigma = statistics.stdev(differences) if len(differences) > 1 else math.nan
        row(f"`{name}`", str(len(differences)), f"{mean:+.4f}", "" if math.isnan(half) else f"+- {half:.4f}",
            "" if math.isnan(half) else f"{p:.3f}", said(mean, half, p, sigma, len(differences)))


def tuned(runs, question):
    """{wiring: (best rate, {seed from 2 on: bits})}, and the table of what seed 1 has at each rate."""
    rates = {}  # {wiring: {rate: bits of seed 1}}
    for (of_question, rate), wirings in runs.items():
        if of_question == question:
            for wiring, bits in wirings.items():
                if 1 in bits:
                    rates.setdefault(wiring, {})[rate] = bits[1]
    if rates:
        columns = sorted({rate for of_wiring in rates.values() for rate in of_wiring}, key=float)
        print(f"\n{question}: bits per byte of seed 1 at each rate\n")
        row("arm", *columns)
        row("---", *["--:"] * len(columns))
        for wiring, of_wiring in rates.items():
            row(f"`{wiring}`", *(f"{of_wiring[c]:.4f}" if c in of_wiring else "" for c in columns))
    best = {}
    for wiring, of_wiring in rates.items():
        rate = min(of_wiring, key=of_wiring.get)
        best[wiring] = rate, {s: b for s, b in runs[question, rate][wiring].items() if s > 1}
    seeds = sorted({s for _, bits in best.values() for s in bits})
    if seeds:
        print(f"\n{question}: bits per byte at the best rate\n")
        row("arm", "rate", *(f"seed {s}" for s in seeds), "mean", "sigma")
        row("---", *["--:"] * (len(seeds) + 3))
        for wiring, (rate, bits) in best.items():
            values = list(bits.values())
            row(f"`{wiring}`", rate, *(f"{bits[s]:.4f}" if s in bits else "" for s in seeds),
                f"{statistics.mean(values):.4f}" if values else "",
                f"{statistics.stdev(values):.4f}" if len(values) > 1 else "")
    return {wiring: bits for wiring, (_, bits) in best.items()}


def main():
    here = os.path.dirname(os.path.abspath(__file__))
    path = sys.argv[1] if len(sys.argv) > 1 else os.path.join(here, "logs.tar.xz")
    if len(sys.argv) > 2 or not os.path.exists(path):
        sys.exit(f"error: {path}: there is no such folder or archive; usage: differences.py [runs/evidence | logs.tar.xz]")
    runs = read(path)
    block, controls, modern = (tuned(runs, question) for question in ("block", "controls", "modern"))
    plain = block.get("plain", {})
    if len(plain) > 1:
        sigma = statistics.stdev(plain.values())
        print(f"\nsigma of plain: {sigma:.4f}; pairs by the protocol: "
              f"{min(10, max(5, math.ceil(7.85 * 2 * (sigma / DELTA) ** 2)))}")
    comparisons("block: less plain", [(w, less(b, plain)) for w, b in block.items() if w != "plain"])
    comparisons("controls: less plain of the block",
                [("plain, 252 channels" if w == "plain" else w, less(b, plain)) for w, b in controls.items()])
    terms = "rmsnorm qknorm rope relu2 untied softcap(15)"  # of modern, as the log has it
    comparisons("modern: less modern",
                [(w, less(b, modern.get(terms, {}))) for w, b in modern.items() if w != terms])

    lengths = {int(rate[1:]): wirings for (question, rate), wirings in runs.items() if question == "documents"}
    arms = ["rope", "rope sla(6,3)", "rope documents", "rope sla(6,3) documents"]
    if lengths:
        print("\ndocuments: bits per byte of each seed\n")
        row("T", *(f"`{arm}`" for arm in arms))
        row("--:", *["---"] * len(arms))
        for T, wirings in sorted(lengths.items()):
            row(f"{T:,}", *(", ".join(f"{b:.4f}" for _, b in sorted(wirings.get(arm, {}).items())) for arm in arms))
    def growth(arm):
        return less(lengths.get(4096, {}).get(arm, {}), lengths.get(256, {}).get(arm, {}))

    def gains(documents):
        return {T: less(wirings.get("rope sla(6,3)" + documents, {}), wirings.get("rope" + documents, {}))
                for T, wirings in sorted(lengths.items())}
    among, within = gains(""), gains(" documents")
    comparisons("documents: T 4,096 less T 256", [(arm, growth(arm)) for arm in arms])
    comparisons("documents: how much less of that growth there is within documents",
                [("rope", less(growth("rope documents"), growth("rope")))])
    comparisons("documents: sla(6,3) less none",
                [(f"T {T:,}", of_T) for T, of_T in among.items()] +
                [(f"T {T:,}, documents", of_T) for T, of_T in within.items()])
    comparisons("documents: what sla(6,3) gains among other texts less within documents",
                [(f"T {T:,}", less(among[T], within[T])) for T in among])


if __name__ == "__main__":
    main()
