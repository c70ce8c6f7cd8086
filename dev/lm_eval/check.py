#!/usr/bin/env python3
"""Does lm-evaluation-harness find the same through dev/lm_eval/gpt2_sla.py as through transformers? Small models are
trained here, of several wirings, and evaluated on small tasks of every kind by both: each likelihood, each generated
text and each score is compared.

    make train_gpt2_sla_cpu evaluate_gpt2_sla_cpu data/tokenize PRECISION=FP32 && python3 dev/lm_eval/check.py

For development only: it needs PyTorch, transformers and lm_eval, and fetches nothing.
"""
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1")
try:
    import torch
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
    from transformers.utils import logging
    from gpt2_sla import Gpt2Sla, ROOT
except ImportError as e:
    sys.exit(f"error: check.py needs PyTorch, transformers and lm_eval: {e}")

WIRINGS = ["plain", "sla(3, 3)", "gqa(2) window(24, SL)"]
BOUND = 1e-4  # of the relative difference of log-likelihoods
TASKS = {
    "check_choice": """
output_type: multiple_choice
doc_to_text: "{{begin}}"
doc_to_choice: "{{[end, other, end + ' ' + other]}}"
doc_to_target: "{{label}}"
metric_list: [{metric: acc}, {metric: acc_norm}, {metric: acc_bytes}]""",
    "check_last_word": """
output_type: loglikelihood
doc_to_text: "{{text.split(' ')[:-1]|join(' ')}}"
doc_to_target: "{{' ' + text.split(' ')[-1]}}"
metric_list: [{metric: acc}, {metric: perplexity}]""",
    "check_perplexity": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{long}}"
metric_list: [{metric: word_perplexity}, {metric: byte_perplexity}, {metric: bits_per_byte}]""",
    "check_generation": """
output_type: generate_until
doc_to_text: "{{text}}"
doc_to_target: "{{end}}"
generation_kwargs: {until: ["\\n", ". "], max_gen_toks: 24, do_sample: false, temperature: 0.0}
metric_list: [{metric: exact_match}]""",
}


def run(*command):
    done = subprocess.run([str(part) for part in command], cwd=ROOT, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"error: {' '.join(map(str, command))}: {done.stderr}")
    return done.stdout


def write_tasks(folder):
    """Of the words of this project's README."""
    words = re.findall(r"\S+", (ROOT / "README.md").read_text())
    docs = []
    for i in range(40):
        at = i * 20 % (len(words) - 200)
        docs.append({"begin": " ".join(words[at:at + 5]), "end": " ".join(words[at + 5:at + 7]),
                     "other": words[at + 60], "label": i % 3,
                     "text": " ".join(words[at:at + 8 + i % 20]), "long": " ".join(words[at:at + 10 + 4 * i])})
    (folder / "docs.jsonl").write_text("".join(json.dumps(doc) + "\n" for doc in docs))
    for name, text in TASKS.items():
        head = (f"task: {name}\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {folder}/docs.jsonl}}}}\n"
                "test_split: test")
        (folder / f"{name}.yaml").write_text(head + text + "\n")


def train(folder, wiring):
    """A model of 64 tokens' context, trained for a few seconds on the README, with the vocabulary of the tests."""
    tokens, out = folder / "tokens", folder / re.sub(r"\W+", "_", wiring)
    if not tokens.exists():
        run("data/tokenize", "--tokenizer", "dev/test/tokenizer/small.tiktoken", "--out", tokens, "README.md",
            "data/README.md", "dev/README.md", "scripts/README.md", "llmc/README.md")
    run("./train_gpt2_sla_cpu", "-i", tokens / "train_*.bin", "--layers", 4, "--heads", 4, "--channels", 64,
        "--vocab-size", 657, "--max-seq-len", 64, "-t", 64, "-b", 8, "-x", 300, "-l", 2e-3, "-v", 0, "--shuffle",
        "--wiring", wiring, "-o", out)
    return out / "step_00000300"


def evaluate(lm, folder):
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    return simple_evaluate(model=lm, tasks=list(TASKS), task_manager=manager, cache_requests=False, bootstrap_iters=0)


def same(ours, theirs):
    """Whether answers and scores agree: numbers to BOUND, all else exactly."""
    if isinstance(ours, (list, tuple)):
        return len(ours) == len(theirs) and all(same(a, b) for a, b in zip(ours, theirs))
    if isinstance(ours, float):
        return abs(ours - theirs) <= BOUND * max(1.0, abs(theirs))
    return ours == theirs


def check_wiring(wiring, folder):
    model = train(folder, wiring)
    ours = evaluate(Gpt2Sla(model, ROOT / "evaluate_gpt2_sla_cpu"), folder)
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(model / "tokenizer.json"), eos_token="<|endoftext|>",
                                        pad_token="<|endoftext|>")
    peer = AutoModelForCausalLM.from_pretrained(model, trust_remote_code=True, dtype=torch.float32)
    theirs = evaluate(HFLM(pretrained=peer, tokenizer=tokenizer, batch_size=4, device="cpu"), folder)
    failures, answers = [], 0
    for task in TASKS:
        for a, b in zip(ours["samples"][task], theirs["samples"][task], strict=True):
            answers += len(a["filtered_resps"])
            if not same(a["filtered_resps"], b["filtered_resps"]):
                failures.append(f"{task}, document {a['doc_id']}: {a['filtered_resps']} and {b['filtered_resps']}")
        scores = {key.split(",")[0]: value for key, value in ours["results"][task].items() if isinstance(value, float)}
        peers = {key.split(",")[0]: value for key, value in theirs["results"][task].items() if isinstance(value, float)}
        print(f"  {task}: " + ", ".join(f"{key} {value:.5g}" for key, value in scores.items()))
        failures += [f"{task}: {key} {value} and {peers.get(key)}" for key, value in scores.items()
                     if not same(value, peers.get(key, float('nan')))]
    print(f"{wiring}: {answers} answers, {'; '.join(failures) or 'the same'}", flush=True)
    return not failures


def main():
    logging.set_verbosity_error()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_tasks(folder)
        good = sum([check_wiring(wiring, folder) for wiring in WIRINGS])
    print(f"{good} of {len(WIRINGS)} models are the same")
    return 0 if good == len(WIRINGS) else 1


if __name__ == "__main__":
    sys.exit(main())
