#!/usr/bin/env python3
"""Compares the tokenizer with tiktoken, token for token, and the vocabularies that data/tokenize learns with those of
Hugging Face's tokenizers; writes the fixtures of dev/test/test_tokenizer.cpp and test_vocabulary.cpp.

    pip install tiktoken tokenizers
    make build/encode_records data/tokenize
    dev/tokenizer_compare.py check --vocabulary gpt2.tiktoken [--random 10000000] [TEXT ...]
    dev/tokenizer_compare.py train [--size 8192] TEXT ...
    dev/tokenizer_compare.py fixture

`check` needs GPT-2's ranks in tiktoken's format (r50k_base.tiktoken). It compares every code point alone and between
letters, digits, spaces and newlines; random byte strings; pieces of up to a megabyte; and the texts, in documents of 8
MB. encode_records itself checks that bytes come back from their tokens. `train` learns a
vocabulary by both programs from the texts, of which each file is a document, and says how long each took.
"""
import argparse
import base64
import json
import os
import random
import re
import struct
import subprocess
import sys
import tempfile
import time
import tiktoken

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
FIXTURE = os.path.join(ROOT, "dev/test/tokenizer")
# GPT-2's pattern as tiktoken 0.14 has it; tiktoken.get_encoding("gpt2") would fetch its own files.
PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""
END_OF_TEXT = "<|endoftext|>"


def load_ranks(path):
    with open(path, "rb") as f:
        return {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in f if line.strip())}


def encoding_of(ranks):
    used = set(ranks.values())
    free = next(i for i in range(len(ranks) + 1) if i not in used)
    return tiktoken.Encoding("gpt2", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={END_OF_TEXT: free})


def ours(vocabulary, records):
    """[(replaced sequences, ids)] of each record of bytes."""
    data = b"".join(struct.pack("<I", len(r)) + r for r in records)
    out = subprocess.run([os.path.join(ROOT, "build/encode_records"), vocabulary], input=data, stdout=subprocess.PIPE,
                         check=True).stdout
    words, at, found = memoryview(out).cast("I"), 0, []
    for _ in records:
        replaced, count = words[at], words[at + 1]
        found.append((replaced, words[at + 2:at + 2 + count].tolist()))
        at += 2 + count
    assert at == len(words)
    return found


def theirs(encoding, record):
    return encoding.encode_ordinary(record.decode("utf-8", errors="replace"))


def compare(what, vocabulary, encoding, records):
    start, tokens, valid = time.time(), 0, 0
    for record, (replaced, ids) in zip(records, ours(vocabulary, records)):
        expected = theirs(encoding, record)
        try:
            record.decode("utf-8")
            is_valid = True
        except UnicodeDecodeError:
            is_valid = False
        if ids != expected or (replaced == 0) != is_valid:
            sys.exit(f"DIFFERS: {what}: {record[:200]!r}: {ids[:50]} and tiktoken's {expected[:50]}")
        tokens += len(ids)
        valid += is_valid
    print(f"same: {what}: {len(records):,} texts, {valid:,} of them valid UTF-8, {tokens:,} tokens, "
          f"{time.time() - start:.0f} s", flush=True)


def code_point_texts():
    around = ["{}", "a{}", "{}a", "1{}", "{}1", " {}", "{} ", "\n{}", "{}\n", "'{}", "{}'s", "  {}a", "a{} {}1"]
    for c in range(0x110000):
        if not 0xD800 <= c < 0xE000:
            for template in around:
                yield template.replace("{}", chr(c)).encode()


# What random strings are made of beside bytes: the pattern's special characters, pieces of characters, and classes'
# first and last members.
ATOMS = [b"'", b"'s", b"'re", b"'ll", b"'ve", b"'LL", b" ", b"  ", b"\n", b"\r\n", b"\t", b"a", b"the", b" of", b"Z",
         b"0", b"12", b".", b"--", b"\0", b"\xc2\xa0", b"\xc2\x85", b"\xe3\x80\x80", b"\xe2\x80\x83", b"\xe2\x80\xa8",
         b"\xe2\x80\x8b", b"\xc3\xa9", b"\xce\xb1", b"\xd7\xa9", b"\xe4\xb8\xad\xe6\x96\x87",
         b"\xf0\x9f\x98\x80", b"\xc2\xb2", b"\xd9\xa3", b"\xe2\x85\xa7", b"\xf0\x9d\x9f\x98", b"\xf0\x90\xb5\x80",
         b"\xc3", b"\xe2\x82", b"\xf0\x9f\x98", b"\x80", b"\xbf\xbf", b"\xed\xa0\x80",
         b"\xc0\xaf", b"\xe0\x80\xaf", b"\xf4\x90\x80\x80", b"\xff", b"\xef\xbf\xbd",
         b"<|endoftext|>"]


def random_record(rng):
    kind = rng.random()
    if kind < 0.25:
        return rng.randbytes(rng.randrange(17))
    if kind < 0.5:  # one code point in two from the first planes, spaces between some
        code_point = lambda: rng.choice((rng.randrange(0x250), rng.randrange(0x3000), rng.randrange(0x20000), 0x20))
        code_points = (code_point() for _ in range(rng.randrange(12)))
        return "".join(chr(c) for c in code_points if not 0xD800 <= c < 0xE000).encode()
    atoms = ATOMS[:36] if kind < 0.75 else ATOMS
    return b"".join(rng.choices(atoms, k=rng.randrange(13)))


def check(arguments):
    encoding = encoding_of(load_ranks(arguments.vocabulary))
    batch = []
    number = 0
    for text in code_point_texts():
        batch.append(text)
        if len(batch) == 2_000_000:
            compare(f"code points, part {(number := number + 1)}", arguments.vocabulary, encoding, batch)
            batch = []
    compare(f"code points, part {number + 1}", arguments.vocabulary, encoding, batch)
    rng = random.Random(1)
    for begin in range(0, arguments.random, 500_000):
        count = min(500_000, arguments.random - begin)
        compare(f"random strings from {begin:,}", arguments.vocabulary, encoding,
                [random_record(rng) for _ in range(count)])
    for length in (129, 1000, 30_000, 1_000_000):
        for alphabet in ("a", "ab", "abcdefghijklmnopqrstuvwxyz", "0123456789", "-=", " ", "\u4e2d\u6587\u5b57"):
            compare(f"one piece of {length:,} characters of {len(alphabet)}", arguments.vocabulary, encoding,
                    ["".join(rng.choices(alphabet, k=length)).encode()])
    for path in arguments.text:
        with open(path, "rb") as f:
            lines_together = 8 << 20  # bytes: tiktoken's ids of a whole large text are gigabytes in Python
            for number, document in enumerate(iter(lambda: f.read(lines_together) + f.readline(), b"")):
                compare(f"{path}, part {number + 1}", arguments.vocabulary, encoding, [document])


# ----------------------------------------------------------------------------
# Learning a vocabulary

def files_of(paths):
    for path in paths:
        if os.path.isfile(path):
            yield path
        for folder, _, names in os.walk(path):
            yield from (os.path.join(folder, name) for name in names)


def learned_by_tokenizers(size, paths):
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(vocab_size=size, min_frequency=2, show_progress=False, special_tokens=[END_OF_TEXT],
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    texts = [open(path, "rb").read().decode("utf-8", errors="replace") for path in files_of(paths)]
    start = time.time()
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer, time.time() - start


def train(arguments):
    with tempfile.TemporaryDirectory() as folder:
        out = os.path.join(folder, "out")
        said = subprocess.run([os.path.join(ROOT, "data/tokenize"), "--train-vocabulary", str(arguments.size), "--out",
                               out, *arguments.text], stdout=subprocess.PIPE, text=True, check=True).stdout
        ours = json.load(open(os.path.join(out, "tokenizer.json")))["model"]
    seconds = float(re.search(r"^learned .*, ([0-9.]+) s$", said, re.MULTILINE)[1])
    tokenizer, their_seconds = learned_by_tokenizers(arguments.size, arguments.text)
    theirs = json.loads(tokenizer.to_str())["model"]
    for number, (our, their) in enumerate(zip(ours["merges"], map(" ".join, theirs["merges"]))):
        if our != their:
            sys.exit(f"DIFFERS: merge {number} is {our!r}, and tokenizers' {their!r}")
    if ours["vocab"] != theirs["vocab"] or len(ours["merges"]) != len(theirs["merges"]):
        sys.exit(f"DIFFERS: {len(ours['vocab'])} tokens, and tokenizers' {len(theirs['vocab'])}")
    print(f"same: {len(ours['vocab']):,} tokens, {len(ours['merges']):,} merges; data/tokenize learned them in "
          f"{seconds:.1f} s, tokenizers in {their_seconds:.1f} s")


# ----------------------------------------------------------------------------
# The fixture: a small vocabulary in each format, and texts with tiktoken's ids.

def train_small_vocabulary():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=256 + 400, show_progress=False,
                                  initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()))
    texts = [open(os.path.join(ROOT, name), encoding="utf-8").read()
             for name in ("README.md", "dev/emu/README.md", "train_gpt2_sla.cu")]
    texts += ["h\u00e9l\u00e8ne na\u00efve \u00fcber \u0433\u043e\u0434 \u0433\u043e\u0434\u0430 \u4e2d\u6587 "
              "\u4e2d\u56fd \U0001f600 \U0001f600 " * 200, "=" * 64 + "-" * 64 + " " * 64]
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([END_OF_TEXT])
    return tokenizer


def byte_of_character():
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    return {**{chr(b): b for b in printable}, **{chr(256 + i): b for i, b in enumerate(others)}}


def fixture_texts():
    texts = ["", " ", "  ", "a", " a", "  a", "   a", "a ", "a  ", "a\n", "a\n\nb", "a \n b", "\n\n\n", "\t\ta",
             " \u3000a", "\u00a0a", "a\u00a0 b", "\u2003\u2003x",
             "I'm you're we've he'll she'd it's don't", "I'M YOU'RE 'S 'Ll '", "'", "''s", "x's's", "'re've'll",
             "x'r'v'l", "x'ra'va'la'lx", "'RE", "'", "a'", "' s", " 's", "1's",
             "abc123def", "3.14159", "x=y+1;", "(a)", "a_b", "\u00b2\u00b3", "\u2167\u2168 \u0663\u0664",
             "caf\u00e9 na\u00efve", "\u0433\u043e\u0434 \u4e2d\u6587\u3002\u4e2d",
             "\U0001f600\U0001f600 \U0001f600", "e\u0301", "\u200b \u200ba", "\ufeffa", "\0\0a\0", "<|endoftext|>",
             "a<|endoftext|>b<|endoftext|>",
             "\U00010d40\U00010d41 \U00010d50a \u1c89 \ua7cb",  # numbers and letters that Unicode 16 added
             "\U0001ccf0\U0001ccf9 \U00016d40a", "\u0378a \ue000 1\U0010ffff", "the " * 40, "=" * 200, "-=" * 100,
             "ab" * 300, "12" * 80 + " x", " " * 300 + "y", "\u4e2d\u6587" * 70]
    rng = random.Random(2)
    return [t.encode() for t in texts] + [random_record(rng) for _ in range(300)] + [
        "".join(rng.choices("aeinorst", k=k)).encode() for k in (15, 16, 17, 127, 128, 129, 130, 700)]


def fixture():
    os.makedirs(FIXTURE, exist_ok=True)
    tokenizer = train_small_vocabulary()
    tokenizer.save(os.path.join(FIXTURE, "tokenizer.json"), pretty=False)
    model = json.loads(tokenizer.to_str())["model"]
    byte_of = byte_of_character()
    ranks = {bytes(byte_of[c] for c in token): rank for token, rank in model["vocab"].items()}
    with open(os.path.join(FIXTURE, "small.tiktoken"), "wb") as f:
        for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
            f.write(base64.b64encode(token) + b" %d\n" % rank)
    with open(os.path.join(FIXTURE, "encoder.json"), "w") as f:
        json.dump({**dict(sorted(model["vocab"].items(), key=lambda item: item[1])), END_OF_TEXT: len(ranks)}, f)
    with open(os.path.join(FIXTURE, "vocab.bpe"), "w", encoding="utf-8") as f:
        f.write("#version: 0.2\n" + "".join(" ".join(merge) + "\n" for merge in model["merges"]))
    learned, _ = learned_by_tokenizers(700, [os.path.join(FIXTURE, "scripts")])
    learned.save(os.path.join(FIXTURE, "scripts.json"), pretty=False)
    encoding = encoding_of(ranks)
    with open(os.path.join(FIXTURE, "cases.txt"), "w") as f:
        f.write("# A text in hexadecimal, and tiktoken's ids of it with the vocabulary small.tiktoken. "
                "Written by dev/tokenizer_compare.py fixture.\n")
        for text in fixture_texts():
            ids = theirs(encoding, text)
            valid = text.decode("utf-8", errors="replace")
            may_differ = END_OF_TEXT in valid or "\U00010d40" in valid or any(ord(c) > 0x2FF for c in valid)
            assert may_differ or tokenizer.encode(valid).ids == ids, valid
            f.write(f"{text.hex()}:{' '.join(map(str, ids))}\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("fixture")
    checking = commands.add_parser("check")
    checking.add_argument("--vocabulary", required=True, help="GPT-2's ranks in tiktoken's format")
    checking.add_argument("--random", type=int, default=100_000, help="random byte strings")
    checking.add_argument("text", nargs="*", help="files, each one document")
    training = commands.add_parser("train")
    training.add_argument("--size", type=int, default=8192, help="tokens of the vocabulary")
    training.add_argument("text", nargs="+", help="files and folders")
    arguments = parser.parse_args()
    if arguments.command == "fixture":
        fixture()
    elif arguments.command == "train":
        train(arguments)
    else:
        check(arguments)


main()
