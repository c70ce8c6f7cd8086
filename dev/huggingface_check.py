#!/usr/bin/env python3
"""Do models go to transformers and come back? For every golden case, data/convert makes a folder of it, which
transformers loads: its losses are the case's, computed whole, in chunks through the K/V cache, and with padding; what
transformers saves again has the same validation loss in the trainer; and both continue a prompt with the same tokens,
greedily.

    make build/fp32/train_gpt2_sla_cpu data/convert && python3 dev/huggingface_check.py [MODEL ...]

Of each MODEL, a folder, the greedy tokens are compared until its context is full, or for three segments with memory.

For development only: it needs PyTorch and transformers, and nothing else in this project needs Python.
"""
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

try:
    import torch
    import torch.nn.functional as F
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging
except ImportError as e:
    sys.exit(f"error: huggingface_check.py needs PyTorch and transformers: {e}")

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "dev/bench"))
from torch_sla import read_shard
BOUND = {torch.float64: 1e-9, torch.float32: 1e-4}  # of the largest difference of logits, or of a relative loss


def run(*command):
    done = subprocess.run([str(part) for part in command], cwd=ROOT, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"error: {' '.join(map(str, command))}: {done.stderr}")
    return done.stdout


def load(folder, dtype):
    return AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype=dtype).eval()


def has_memory(model):
    return "memory" in getattr(model.config, "wiring", "")


def worst_differences(model, tokens, expected, dtype):
    """{what: the difference} of a model in transformers to the golden case."""
    B, T, steps = expected["batch_size"], expected["seq_len"], expected["steps"] * expected["grad_accum_steps"]
    if has_memory(model):  # rows are streams, each of which is one text here
        T, steps = T * steps, 1
    losses = []
    for s in range(steps):
        x, y = (tokens[s * B * T + shift:][:B * T].view(B, T) for shift in (0, 1))
        losses.append(F.cross_entropy(model(x).logits.reshape(B * T, -1), y.reshape(-1)).item())
    whole = model(x).logits
    cache, chunks = None, []
    for begin, end in ((0, 5), (5, 6), (6, T // 2), (T // 2, T)):
        out = model(x[:, begin:end], past_key_values=cache, use_cache=True)
        cache, chunks = out.past_key_values, chunks + [out.logits]
    padded, mask, padding = x.clone(), torch.ones(B, T, dtype=torch.long), 3
    padded[0], mask[0, :padding] = torch.cat([torch.zeros(padding, dtype=torch.long), x[0, :T - padding]]), 0
    # transformers' own GPT-2 wants positions beside the mask.
    shifted = model(padded, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0)).logits[0, padding:]
    return {"loss": abs(sum(losses) / steps / expected["val_loss"] - 1),
            "cache": (torch.cat(chunks, dim=1) - whole).abs().max().item(),
            "padding": (shifted - whole[0, :T - padding]).abs().max().item()}


def trainer(folder, *options):
    return run("build/fp32/train_gpt2_sla_cpu", "-e", folder, "-x", 0, *options)


def val_loss(folder, case, expected):
    out = trainer(folder, "-j", case / "tokens.bin", "-b", expected["batch_size"], "-t", expected["seq_len"],
                  "-m", 100000)
    return float(re.search(r"val loss ([0-9.]+)", out)[1])


def greedy_sample(folder, length):
    """The trainer's: the likeliest tokens after the vocabulary's last one, with which its samples begin."""
    out = trainer(folder, "-s", 1, "--temperature", 0, "-g", length, "--tokenizer", "none", "-b", 1)
    return [int(token) for token in re.search(r"--- sample .*\n([\d ]+)\n---", out)[1].split()]


def greedy_failure(folder):
    """What differs between our greedy tokens and `generate`'s in fp32, up to the context length, or with memory in
    three segments; "" if nothing does."""
    peer = load(folder, torch.float32)
    ours = greedy_sample(folder, peer.config.n_positions * (3 if has_memory(peer) else 1))
    prompt = torch.tensor([[peer.config.vocab_size - 1]])
    theirs = peer.generate(prompt, max_new_tokens=len(ours), do_sample=False, pad_token_id=0)[0, 1:].tolist()
    return "" if ours == theirs else f"greedy tokens: {ours} and {theirs}"


def check_case(case, folder):
    expected = json.loads((case / "expected.json").read_text())
    tokens, failures = read_shard(case / "tokens.bin"), []
    model = folder / case.name
    run("data/convert", case, model)
    with torch.no_grad():
        for dtype in (torch.float64, torch.float32):
            for what, difference in worst_differences(load(model, dtype), tokens, expected, dtype).items():
                if not difference <= BOUND[dtype]:
                    failures.append(f"{what} in {dtype}: {difference:.1e}")
        peer = load(model, torch.float32)
        saved = folder / (case.name + "_saved")
        peer.save_pretrained(saved)
        difference = abs(val_loss(saved, case, expected) / expected["val_loss"] - 1)
        if not difference <= 1e-5:
            failures.append(f"loss of what transformers saved: {difference:.1e}")
        failures += filter(None, [greedy_failure(model)])
    print(f"{case.name}: {'; '.join(failures) or 'the same'}", flush=True)
    return not failures


def main():
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    cases = sorted(path.parent for path in (ROOT / "dev/test/golden").glob("*/expected.json"))
    with tempfile.TemporaryDirectory() as folder:
        same = sum([check_case(case, Path(folder)) for case in cases])
    print(f"{same} of {len(cases)} cases are the same")
    for model in map(Path, sys.argv[1:]):
        failure = greedy_failure(model.resolve())
        print(f"{model}: {failure or 'the same greedy tokens'}")
        same -= failure != ""
    return 0 if same == len(cases) else 1


if __name__ == "__main__":
    sys.exit(main())
