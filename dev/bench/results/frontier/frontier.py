#!/usr/bin/env python3
"""The numbers of README.md from the runs' logs: frontier.py [runs/frontier | logs.tar.xz [POINTS.csv]], by default the
archive beside it. Prints tables in Markdown, and writes the points to a file, if one is named, which
dev/figures/figures.py draws. The trainer writes the logs, and ./evaluate_gpt2_sla_cpu RUN/read-N.json of routed models,
RUN/own.json and RUN/positions.csv; nothing here is of ./report. The statistics are those of ../sla/differences.py."""
import csv
import json
import math
import os
import re
import statistics
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [os.path.join(HERE, "..", "sla"), os.path.join(HERE, "..", "probe")]
import differences  # noqa: E402
import solved  # noqa: E402
from differences import DELTA, by_position, files, holm, interval, less, row, t_quantile, t_tail, validations  # noqa: E402

UPDATE, UPDATES = 2048, 1416  # bytes of one; how many
BUDGETS = [0.75, 0.5, 0.25, 0.1]
RANGES = [(1, 15), (16, 63), (64, 127), (128, 256)]  # of bytes before the one that is predicted


def kv_bytes(description):
    """Bytes of K/V per token that generation keeps of a text as long as the run's: a layer's cache ends at its window."""
    window = re.search(r"window\((\d+)(?:,([SL]+))?\)", description["wiring"])
    if not window:
        return description["kv_bytes_per_token"]
    pattern = window[2] or "S"
    kept = [int(window[1]) / description["seq_len"] if pattern[l % len(pattern)] == "S" else 1
            for l in range(description["num_layers"])]
    return description["kv_bytes_per_token"] * statistics.mean(kept)


def read(path):
    """({group: {wiring: {seed: bits per byte}}}, {wiring: bytes of K/V per token}, {wiring: {seed: [bits per byte of each
    of RANGES]}}) of the runs that have done all updates. What a routed model has when it is read as a wiring is in the
    group `read`, and in `own` what one of that wiring has by the same program, whose windows begin elsewhere than
    the trainer's."""
    found, kv, wiring_of, ranges = {}, {}, {}, {}
    wanted = ["log.jsonl", "own.json", "positions.csv"] + [f"read-{i}.json" for i in range(20)]
    for folder, name, text in files(path, wanted):
        match = re.search(r"((?:rates/|points/|larger/)?[^/]+)/[^/]+-(\d+)$", folder)
        if not match:
            continue
        group, seed = match[1], int(match[2])
        if folder.startswith("frontier-linux"):
            group = "linux " + group
        if name == "positions.csv":
            ranges[folder] = seed, [nats / math.log(2) for nats in by_position(text, RANGES)]
            continue
        if name != "log.jsonl":
            result = json.loads(text)
            found.setdefault("own" if name == "own.json" else "read", {}).setdefault(result["wiring"], {})[seed] = result["all_texts"]["bits_per_byte"]
            continue
        description, bits = validations(text, "val_bits_per_byte")
        if description and description["steps"] in bits:
            found.setdefault(group, {}).setdefault(description["wiring"], {})[seed] = bits[description["steps"]]
            if not group.startswith("larger/"):
                kv[description["wiring"]] = kv_bytes(description)
                wiring_of[folder] = description["wiring"]
    of_ranges = {}
    for folder, wiring in wiring_of.items():
        if folder in ranges:
            seed, bits = ranges[folder]
            of_ranges.setdefault(wiring, {})[seed] = bits
    return found, kv, of_ranges


def vertex(means):
    """(the rate at the vertex of the parabola through three means over the logarithm of the rate, what it would gain
    over the lowest mean), or None where it opens downwards. `means`: [(rate, mean)], in the order of rates, around the
    lowest."""
    (a, b, c), step = [mean for _, mean in means], math.log(means[1][0] / means[0][0])
    bend = (a - 2 * b + c) / 2
    if bend <= 0:
        return None
    slope = (c - a) / 2
    at = -slope / (2 * bend)
    return means[1][0] * math.exp(step * at), min(a, b, c) - (b - slope * slope / (4 * bend))


def tuned(runs):
    """{wiring: (best rate, {seed: bits})}; prints all rates, with how many seeds the best and its neighbours have."""
    rates = {}  # {wiring: {rate: {seed: bits}}}
    for group, wirings in runs.items():
        if group.startswith("rates/"):
            for wiring, bits in wirings.items():
                rates.setdefault(wiring, {})[float(group[6:])] = bits
    columns = sorted({rate for of_wiring in rates.values() for rate in of_wiring})
    print("\nRates: bits per byte, the mean of the seeds\n")
    row("arm", "seeds", *(f"{c:g}" for c in columns), "lowest", "vertex", "it would gain")
    row("---", *["--:"] * (len(columns) + 4))
    best = {}
    for wiring, of_wiring in sorted(rates.items()):
        means = [(rate, statistics.mean(of_wiring[rate].values())) for rate in sorted(of_wiring)]
        at = min(range(len(means)), key=lambda i: means[i][1])
        best[wiring] = means[at][0], of_wiring[means[at][0]]
        found = vertex(means[at - 1:at + 2]) if 0 < at < len(means) - 1 else None
        row(f"`{wiring}`", str(min(len(of_wiring[rate]) for rate, _ in means[max(0, at - 1):at + 2])),
            *(f"{dict(means)[c]:.4f}" if c in of_wiring else "" for c in columns), f"{means[at][0]:g}",
            *((f"{found[0]:.2g}", f"{found[1]:.4f}") if found else ("", "")))
    return best


def same_p(differences):
    """p of two one-sided tests that the mean is not within +-DELTA."""
    mean, n = statistics.mean(differences), len(differences)
    error = statistics.stdev(differences) / math.sqrt(n)

    def above(t):  # P(T > t)
        return t_tail(t, n - 1) / 2 if t > 0 else 1 - t_tail(t, n - 1) / 2

    return max(above((mean + DELTA) / error), above((DELTA - mean) / error))


def conclusions(arms):
    """[(wiring, pairs, mean, half of the interval, said)] of {wiring: [differences to plain]}; Holm over all arms."""
    found = [(wiring, of_arm, *interval(of_arm)) for wiring, of_arm in arms.items()]
    different, same = holm([p for *_, p in found]), holm([same_p(of_arm) for _, of_arm, *_ in found])

    def said(mean, p, q):
        found = ["lower" if mean < 0 else "higher"] * (p < 0.05) + [f"the same within {DELTA}"] * (q < 0.05)
        return " and ".join(found) or "not decided"

    return [(wiring, len(of_arm), mean, half, said(mean, p, q))
            for (wiring, of_arm, mean, half, _), p, q in zip(found, different, same)]


def table(title, arms, kv, plain_kv, minus, curve=None):
    print(f"\n{title}\n")
    row("wiring", "K/V, bytes per token", "of plain", "pairs", f"minus {minus}", "95 %", "",
        *(["plain's updates"] if curve else []))
    row("---", "--:", "--:", "--:", "--:", "--:", "---", *(["--:"] if curve else []))
    found = sorted(conclusions(arms), key=lambda c: (-kv[c[0]], c[0]))
    for wiring, pairs, mean, half, said in found:
        row(f"`{wiring}`", f"{kv[wiring]:,.0f}", f"{100 * kv[wiring] / plain_kv:.1f} %", str(pairs), f"{mean:+.4f}",
            f"+- {half:.4f}", said, *([f"{100 * share_of_updates(curve, mean):.0f} %"] if curve else []))
    return found


def positions(arms):
    """The differences to `plain` by what comes before the byte that is predicted."""
    print("\nLess `plain`, bits per byte, by the bytes before\n")
    row("wiring", "pairs", *(f"{first} to {last}" for first, last in RANGES))
    row("---", "--:", *["--:"] * len(RANGES))
    for wiring in sorted(arms):
        seeds = arms[wiring].keys() & arms["plain"].keys()
        if wiring != "plain" and len(seeds) > 1:
            found = [interval([arms[wiring][s][r] - arms["plain"][s][r] for s in seeds]) for r in range(len(RANGES))]
            row(f"`{wiring}`", str(len(seeds)), *(f"{mean:+.3f} +- {half:.3f}" for mean, half, _ in found))


def texts(path, points):
    """`sla(6,6)` less `plain` after several amounts of text, the last that of the points, and what a doubling of the
    text adds to the difference. Returns `plain`'s [(updates, mean)]."""
    runs = differences.read(path)
    bits = {steps: differences.tuned(runs, str(steps)) for steps in sorted({int(q) for q, _ in runs if q.isdigit()})}
    seeds = {seed for of_wiring in bits.values() for of_seed in of_wiring.values() for seed in of_seed}
    bits[UPDATES] = {wiring: {seed: points[wiring][seed] for seed in seeds & points[wiring].keys()}
                     for wiring in ["plain", "sla(6,6)"]}
    bits = {steps: b for steps, b in bits.items() if len(less(b.get("sla(6,6)", {}), b.get("plain", {}))) > 1}
    of_text = {steps: less(b["sla(6,6)"], b["plain"]) for steps, b in bits.items()}
    differences.comparisons("`sla(6,6)` less `plain`, bits per byte, by the text in MB",
                            [(f"{UPDATE * steps / 1e6:.2f}", d) for steps, d in of_text.items()])
    seeds = set.intersection(*(set(d) for d in of_text.values()))
    logs = [math.log2(steps) for steps in of_text]
    middle = statistics.mean(logs)
    slopes = [sum((log - middle) * d[seed] for log, d in zip(logs, of_text.values())) /
              sum((log - middle) ** 2 for log in logs) for seed in sorted(seeds)]
    mean, half, _ = interval(slopes)
    print(f"\nA doubling of the text adds {mean:+.4f} +- {half:.4f} to the difference ({len(slopes)} pairs)")
    return [(steps, statistics.mean(b["plain"].values())) for steps, b in bits.items()]


def share_of_updates(curve, less_plain):
    """The share of the last point's updates after which `plain` has so much more loss, by the line through the points
    of the curve beside it over the logarithm of the updates: runs that end there, at rates of their own."""
    loss = curve[-1][1] + less_plain
    above = max([i for i, (_, mean) in enumerate(curve[:-1]) if mean >= loss], default=0)
    (a, of_a), (b, of_b) = curve[above:above + 2]
    return a * (b / a) ** ((of_a - loss) / (of_a - of_b)) / curve[-1][0]


def welch(a, b):
    """(the mean of a less that of b, half of its 95 % interval), by Welch."""
    of = [(statistics.mean(x), statistics.variance(x) / len(x), len(x) - 1) for x in (a, b)]
    variance = sum(v for _, v, _ in of)
    freedom = variance ** 2 / sum(v * v / n for _, v, n in of)
    return of[0][0] - of[1][0], t_quantile(freedom) * math.sqrt(variance)


def elsewhere(title, groups, rate, runs, kv, of_points):
    """Other text, or another model, at a rate: the differences to `plain`, beside those of the points; and what seed 1
    of the arms that ran at several rates had at each. `groups`: what their names begin with, before the rate."""
    rates = {r: runs.get(groups + r, {}) for r in ("12e-3", "24e-3", "48e-3")}
    plain = rates[rate].get("plain", {})
    arms = {w: less(bits, plain) for w, bits in rates[rate].items() if w != "plain"}
    arms = {w: of_seeds for w, of_seeds in arms.items() if len(of_seeds) > 1}
    if not arms:
        return
    tried = {w: [f"{r}: {bits[w][1]:.4f}" for r, bits in rates.items() if 1 in bits.get(w, {})]
             for w in rates[rate]}
    print(f"\n{title}, `plain`: {statistics.mean(plain.values()):.4f} bits per byte; seed 1 at each rate: " +
          "; ".join(f"`{w}` " + ", ".join(of_rates) for w, of_rates in sorted(tried.items()) if len(of_rates) > 1))
    of_arms = {w: list(of_seeds.values()) for w, of_seeds in arms.items()}
    table(title, of_arms, kv, kv["plain"], "plain, bits per byte")
    print("\nThat minus what it costs as a point\n")
    for wiring, of_arm in sorted(of_arms.items()):
        mean, half = welch(of_arm, list(of_points[wiring].values()))
        row(f"`{wiring}`", f"{mean:+.4f} +- {half:.4f}")


def probes(path):
    """Of a task that all runs solve, the update at which they did, and the log-rank test; of another the last accuracy,
    and differences of pairs."""
    runs, _, chance = solved.read(path)
    of_seeds = [(task, {w: {seed: points for seed, points in of.items() if seed in seeds} for w, of in of_task.items()})
                for task, of_task in sorted(runs.items()) for seeds in (range(7), range(7, 17))]  # each has its protocol
    for task, of_task in of_seeds:
        arms = [w for w in ["plain", "sla(4,6)", "share(2)", "gqa(1)"] if len(of_task.get(w, {})) > 1]
        if "plain" not in arms:
            continue
        times = {w: [solved.waited(of_task[w][seed]) for seed in sorted(of_task[w])] for w in arms}
        last = {w: {seed: 100 * of_task[w][seed][-1][1] for seed in sorted(of_task[w])} for w in arms}
        are_solved = all(is_solved for of_arm in times.values() for _, is_solved in of_arm)
        if are_solved:
            each = {w: ", ".join(str(update) for update, _ in times[w]) for w in arms}
            less_plain = [solved.interval([t for t, _ in times[w]], [t for t, _ in times["plain"]])[:2] for w in arms[1:]]
            ps = holm([solved.permutation_p(times[w], times["plain"]) for w in arms[1:]])
        else:
            each = {w: ", ".join(f"{accuracy:.1f}" for accuracy in last[w].values()) for w in arms}
            found = [interval(list(less(last[w], last["plain"]).values())) for w in arms[1:]]
            less_plain, ps = [(mean, half) for mean, half, _ in found], holm([p for *_, p in found])
        print(f"\n{solved.title(task)}, a guess: {100 * chance[task]:.1f} %\n")
        row("wiring", "solved at update" if are_solved else "right answers, %", "minus plain", "95 %", "p, Holm")
        row("---", "---", "--:", "--:", "--:")
        row("`plain`", each["plain"], "", "", "")
        for w, (mean, half), p in zip(arms[1:], less_plain, ps):
            row(f"`{w}`", each[w], f"{mean:+.0f}", f"+- {half:.0f}", f"{p:.3f}")


def main():
    path = sys.argv[1] if len(sys.argv) > 1 else os.path.join(HERE, "logs.tar.xz")
    if len(sys.argv) > 3 or not os.path.exists(path):
        sys.exit(f"error: {path}: there is no such folder or archive; usage: frontier.py "
                 "[runs/frontier | logs.tar.xz [POINTS.csv]]")
    runs, kv, of_ranges = read(path)
    best = tuned(runs)
    decay = less(runs.get("decay", {}).get("plain", {}), best["plain"][1])
    print("\nWeight decay 0.02 less 0.1, `plain`: " + ", ".join(f"{d:+.4f}" for d in decay.values()))

    points = {wiring: dict(bits) for wiring, (_, bits) in best.items()}
    for group, wirings in runs.items():
        if group.startswith("points"):
            for wiring, bits in wirings.items():
                points.setdefault(wiring, {}).update(bits)
    plain = points["plain"]
    print(f"\n`plain`: {statistics.mean(plain.values()):.4f} bits per byte, sigma {statistics.stdev(plain.values()):.4f}")
    less_plain = {wiring: less(bits, plain) for wiring, bits in points.items() if wiring != "plain"}
    found = table("Points", {w: list(d.values()) for w, d in less_plain.items() if len(d) > 1}, kv, kv["plain"],
                  "plain, bits per byte", texts(path, points))
    if len(sys.argv) > 2:
        with open(sys.argv[2], "w", encoding="utf-8", newline="") as file:
            out = csv.writer(file, lineterminator="\n")
            out.writerows([["wiring", "kv_of_plain", "less_plain", "half"], ["plain", 1, 0, 0]])
            out.writerows([wiring, f"{kv[wiring] / kv['plain']:.4f}", f"{mean:.4f}", f"{half:.4f}"]
                          for wiring, _, mean, half, _ in found)

    print("\nBudgets: the arm with the lowest mean among those that fit, and those whose difference to it is not decided\n")
    row("budget", "lowest", "minus plain", "not decided beside it")
    row("--:", "---", "--:", "---")
    means = {wiring: statistics.mean(d.values()) for wiring, d in less_plain.items()}
    for budget in BUDGETS:
        fit = [wiring for wiring in means if kv[wiring] <= budget * kv["plain"] * 1.0001]
        if not fit:
            continue
        lowest = min(fit, key=means.get)
        beside = []
        for wiring in sorted(fit, key=means.get):
            mean, half, _ = interval(list(less(points[wiring], points[lowest]).values()))
            if wiring != lowest and mean - half < 0:
                beside.append(f"`{wiring}` {mean:+.4f} +- {half:.4f}")
        row(f"{100 * budget:g} %", f"`{lowest}`", f"{means[lowest]:+.4f}", "; ".join(beside))

    own = runs.get("own", {})
    readings = {w: list(less(bits, own[w]).values()) for w, bits in runs.get("read", {}).items() if w in own}
    if readings:
        table("`route(0.3)` read as a wiring, less that wiring trained", readings, kv, kv["plain"], "it trained")
    if of_ranges:
        positions(of_ranges)
    elsewhere("The kernel's sources", "linux rates/", "24e-3", runs, kv, less_plain)
    of_larger = {wiring: 2 * size for wiring, size in kv.items()}  # bytes: heads have twice the channels
    elsewhere("Heads of 16 channels", "larger/", "12e-3", runs, of_larger, less_plain)
    probes(path)


if __name__ == "__main__":
    main()
