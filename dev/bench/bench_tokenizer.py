#!/usr/bin/env python3
"""The speed of data/tokenize beside tiktoken's and Hugging Face tokenizers', on the same documents in the same run.

    pip install tiktoken tokenizers
    make data/tokenize
    dev/bench/bench_tokenizer.py --vocabulary r50k_base.tiktoken [--rounds 5] [--megabytes 20] TEXT ...

The first --megabytes of each text are cut into documents of some 4 kB at line ends. One round runs each program once,
so that whatever else the machine does concerns all alike; the table has each one's best round, and the median over the
rounds of how many times as fast one thread of data/tokenize was. data/tokenize is timed as a process, which loads the
vocabulary and writes shards; for the others only the encoding is timed. CPU seconds are summed over all threads, wall
seconds are a clock's. A second table has what a second thread of data/tokenize is worth on all texts, whole.
"""
import argparse
import base64
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time

os.environ["RAYON_NUM_THREADS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
import tiktoken
import tokenizers

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
# GPT-2's, as tiktoken 0.14 has it.
PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""


def load_ranks(path):
    with open(path, "rb") as f:
        return {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in f if line.strip())}


def parts_before(ranks, token):
    """The two tokens that the last merge makes `token` of."""
    parts = [bytes([b]) for b in token]
    while len(parts) > 2:
        best = min(range(len(parts) - 1), key=lambda i: ranks.get(parts[i] + parts[i + 1], 1 << 30))
        parts[best:best + 2] = [parts[best] + parts[best + 1]]
    return parts


def hugging_face(ranks):
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    character = {**{b: chr(b) for b in printable}, **{b: chr(256 + i) for i, b in enumerate(others)}}
    spelt = {token: "".join(character[b] for b in token) for token in ranks}
    merged = [token for token in sorted(ranks, key=ranks.get) if len(token) > 1]
    merges = [tuple(spelt[part] for part in parts_before(ranks, token)) for token in merged]
    vocabulary = {spelt[token]: rank for token, rank in ranks.items()}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    return tokenizer


def documents_of(path, megabytes):
    with open(path, "rb") as f:
        text = f.read(int(megabytes * 1e6)).decode("utf-8", errors="replace").replace("\0", "\n")
    documents, begin = [], 0
    while begin < len(text):
        end = text.find("\n", begin + 4000) + 1 or len(text)
        documents.append(text[begin:end])
        begin = end
    return documents


def cpu_seconds():
    return sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


def timed(f):
    cpu, wall = cpu_seconds(), time.perf_counter()
    count = f()
    return count, cpu_seconds() - cpu, time.perf_counter() - wall


def ours(vocabulary, threads, texts):
    """What data/tokenize takes to write the shards, and how many tokens are in them."""
    with tempfile.TemporaryDirectory() as folder:
        command = [os.path.join(ROOT, "data/tokenize"), "--tokenizer", vocabulary, "--separator", "nul",
                   "--val-fraction", "0", "--threads", str(threads), "--out", os.path.join(folder, "out"), *texts]
        _, cpu, wall = timed(lambda: subprocess.run(command, check=True, stdout=subprocess.DEVNULL))
        with open(os.path.join(folder, "out", "MANIFEST.json")) as f:
            return json.load(f)["train_tokens"], cpu, wall


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabulary", required=True, help="GPT-2's ranks in tiktoken's format")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--megabytes", type=float, default=20, help="of each text")
    parser.add_argument("text", nargs="+")
    arguments = parser.parse_args()
    ranks = load_ranks(arguments.vocabulary)
    encoding = tiktoken.Encoding("gpt2", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={})
    peer = hugging_face(ranks)
    print(f"tiktoken {tiktoken.__version__}, tokenizers {tokenizers.__version__}, best of {arguments.rounds} rounds\n")
    print("| text | program | MB/s (CPU) | MB/s (wall) | data/tokenize is faster (CPU) | (wall) |\n"
          "| --- | --- | --: | --: | --: | --: |")
    for path in arguments.text:
        documents = documents_of(path, arguments.megabytes)
        with tempfile.TemporaryDirectory() as folder:
            corpus = os.path.join(folder, "corpus")
            with open(corpus, "wb") as f:
                f.write("\0".join(documents).encode())
            size = os.path.getsize(corpus) / 1e6
            count_tiktoken = lambda: sum(1 + len(encoding.encode_ordinary(d)) for d in documents)
            count_peer = lambda: sum(1 + len(e.ids) for e in peer.encode_batch_fast(documents))
            programs = {"data/tokenize": lambda: ours(arguments.vocabulary, 1, [corpus]),
                        "tiktoken": lambda: timed(count_tiktoken),
                        "Hugging Face tokenizers": lambda: timed(count_peer)}
            rounds = [{name: program() for name, program in programs.items()} for _ in range(arguments.rounds)]
        counts = {result[0] for results in rounds for result in results.values()}
        if len(counts) != 1:
            sys.exit(f"error: {path}: the programs count different tokens: {counts}")
        base = "data/tokenize"
        for name in programs:
            cpu, wall = (min(results[name][i] for results in rounds) for i in (1, 2))
            ratios = [statistics.median(results[name][i] / results[base][i] for results in rounds) for i in (1, 2)]
            print(f"| {os.path.basename(path)}, {size:.0f} MB | {name} | {size / cpu:.1f} | {size / wall:.1f} | "
                  f"{ratios[0]:.2f}x | {ratios[1]:.2f}x |", flush=True)

    size = sum(os.path.getsize(path) for path in arguments.text) / 1e6
    rounds = [[ours(arguments.vocabulary, threads, arguments.text) for threads in (1, 2)]
              for _ in range(arguments.rounds)]
    print(f"\n| data/tokenize, {size:.0f} MB | MB/s (wall) |\n| --- | --: |")
    for i in (0, 1):
        print(f"| {i + 1} thread{'s' if i else ''} | {size / min(results[i][2] for results in rounds):.1f} |")
    ratios = [one[2] / two[2] for one, two in rounds]
    print(f"\nTwo threads are {statistics.median(ratios):.2f}x as fast as one: the median over the rounds, "
          f"{', '.join(f'{ratio:.2f}' for ratio in ratios)}.")


main()
