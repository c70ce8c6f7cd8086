#!/usr/bin/env python3
"""Do models go to transformers and come back? For every golden case, and one for each term that they lack, data/convert
makes a folder of it, which transformers loads: its losses are the case's, computed whole, in chunks through the K/V
cache, and with padding; it generates the same with a cache as without one, greedily, in a padded batch and with beams;
what transformers saves again has the same validation loss in the trainer; and both continue a prompt with the same
tokens, greedily. What the module for transformers does not know it refuses, generation ends at an end of text, and
AutoTokenizer and Trainer work as a user types them.

    make build/fp32/train_gpt2_sla_cpu data/convert && python3 dev/huggingface_check.py [MODEL ...]

Of each MODEL, a folder, the greedy tokens are compared until its context is full, or for three segments with memory.
dev/transformers_venv.sh makes a Python for it.

For development only: it needs PyTorch and transformers, and nothing else in this project needs Python.
"""
import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

modules = tempfile.TemporaryDirectory()  # where transformers copies a model's modules, which may change between runs
os.environ.update(HF_HOME=modules.name, HF_HUB_OFFLINE="1")
try:
    import torch
    import torch.nn.functional as F
    import transformers
    from transformers import (AutoConfig, AutoModelForCausalLM, AutoTokenizer, DataCollatorForLanguageModeling,
                              DynamicCache, StaticCache, Trainer, TrainingArguments)
    from transformers.modeling_outputs import CausalLMOutputWithPast
    from transformers.utils import logging
except ImportError as e:
    sys.exit(f"error: huggingface_check.py needs PyTorch and transformers: {e}")

ROOT = Path(__file__).resolve().parent.parent
sys.path += [str(ROOT / "dev/bench"), str(ROOT / "dev/test/golden"), str(ROOT / "llmc/formats/huggingface")]
import make
from gpt2_sla import TERMS
from torch_sla import read_shard
# What this transformers calls a cache, as an argument and in outputs.
CACHE = "cache" if "cache" in {f.name for f in dataclasses.fields(CausalLMOutputWithPast)} else "past_key_values"
NO_TOKEN = [-1]  # an end of text that no model has
BOUND = {torch.float64: 1e-9, torch.float32: 1e-4}  # of the largest difference of logits, or of a relative loss


def run(*command):
    done = subprocess.run([str(part) for part in command], cwd=ROOT, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"error: {' '.join(map(str, command))}: {done.stderr}")
    return done.stdout


def load(folder, dtype):
    # The other kernels of transformers' own GPT-2 are not for float64.
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, attn_implementation="eager")
    return model.to(dtype).eval()


def has_memory(model):
    return "memory" in getattr(model.config, "wiring", "")


def positions(model, mask):
    """transformers' own GPT-2 wants them beside the mask."""
    return {"position_ids": (mask.cumsum(1) - 1).clamp(min=0)} if model.config.model_type == "gpt2" else {}


def worst_differences(model, tokens, expected, dtype):
    """{what: the difference} of a model in transformers to the golden case."""
    B, T, steps = expected["batch_size"], expected["seq_len"], expected["steps"] * expected["grad_accum_steps"]
    if has_memory(model):  # rows are streams, and each is one text here
        T, steps = T * steps, 1
    losses = []
    for s in range(steps):
        x, y = (tokens[s * B * T + shift:][:B * T].view(B, T) for shift in (0, 1))
        losses.append(F.cross_entropy(model(x).logits.reshape(B * T, -1), y.reshape(-1)).item())
    whole = model(x).logits
    cache, chunks = None, []
    for begin, end in ((0, 5), (5, 6), (6, T // 2), (T // 2, T)):
        out = model(x[:, begin:end], **{CACHE: cache}, use_cache=True)
        cache, chunks = out[CACHE], chunks + [out.logits]
    differences = {"loss": abs(sum(losses) / steps / expected["val_loss"] - 1),
                   "cache": (torch.cat(chunks, dim=1) - whole).abs().max().item()}
    padding = 3
    for side, places in ("left", slice(padding, T)), ("right", slice(0, T - padding)):
        padded, mask = x.clone(), torch.ones(B, T, dtype=torch.long)
        padded[0], mask[0] = 0, 0
        padded[0, places], mask[0, places] = x[0, :T - padding], 1
        logits = model(padded, attention_mask=mask, **positions(model, mask)).logits
        differences[f"padding on the {side}"] = max((logits[0, places] - whole[0, :T - padding]).abs().max().item(),
                                                    (logits[1:] - whole[1:]).abs().max().item())
    return differences


def generation_failures(model, tokens):
    """What differs between what `generate` makes with a cache and without one, in a padded batch and alone."""
    failures, prompts = [], tokens[:12].view(2, 6)
    alone, mask = prompts[1:, 3:], torch.ones(2, 6, dtype=torch.long)
    padded, mask_of_padded = prompts.clone(), mask.clone()
    padded[1, :3], mask_of_padded[1, :3] = 0, 0

    def generate(prompts, mask, length, **options):
        out = model.generate(prompts, attention_mask=mask, do_sample=False, max_new_tokens=length, pad_token_id=0,
                             eos_token_id=NO_TOKEN, **options)
        return out[:, prompts.shape[1]:].tolist()

    length = model.config.n_positions * (2 if has_memory(model) else 1) - 6
    whole = generate(prompts, mask, length, use_cache=False)
    by_itself = generate(alone, mask[1:, 3:], length, use_cache=False)
    if generate(prompts, mask, length) != whole:
        failures.append("generated with a cache")
    if generate(padded, mask_of_padded, length) != whole[:1] + by_itself:
        failures.append("generated with a cache and padding")
    beams = lambda: [generate(padded, mask_of_padded, 6, num_beams=3, use_cache=cached) for cached in (True, False)]
    with_cache, without = beams()
    if with_cache != without:
        failures.append("generated by beams with a cache")
    if generate(prompts[:1], mask[:1], length, prompt_lookup_num_tokens=2) != whole[:1]:
        failures.append("generated with guesses, which cut the cache")
    if "documents" in getattr(model.config, "wiring", ""):  # a beam goes on after the end of a document
        end = model.transformer.end_of_text
        for model.transformer.end_of_text in set(sum(without, [])):
            with_cache, without = beams()
            if with_cache != without:
                failures.append(f"generated by beams with a cache, documents begin at {model.transformer.end_of_text}")
        model.transformer.end_of_text = end
    return failures


def interface_failures(model):
    """Of a model that has our module: what it takes that it does not know, or does not return."""
    x, failures = torch.arange(6)[None], []
    whole = model(x).logits[:, 4:]
    for given in ("cache", "past_key_values"):
        cache = DynamicCache()
        for tokens in (x[:, :4], x[:, 4:]):
            out = model(tokens, **{given: cache})
        if out.cache is not cache or out.past_key_values is not cache or not torch.allclose(out.logits, whole):
            failures.append(f"a cache as {given}")

    def refuse(what, names, call):
        try:
            call()
            failures.append(f"{what} is taken")
        except (TypeError, ValueError) as e:
            if names not in str(e).lower():
                failures.append(f"{what}: {e}")

    mask = torch.ones(1, 6, dtype=torch.long)
    generate = lambda **options: model.generate(x, attention_mask=mask, max_new_tokens=2, **options)
    refuse("a static cache", "static", lambda: generate(cache_implementation="static"))
    if CACHE == "cache":
        refuse("a StaticCache", "staticcache", lambda: model(x, cache=StaticCache(model.config, max_cache_len=6)))
        sliding = DynamicCache()
        sliding.layers = [transformers.cache_utils.DynamicSlidingWindowLayer(4) for _ in range(model.config.n_layer)]
        model(x, cache=sliding)
        refuse("a sliding cache", "keys", lambda: model(x[:, :1], cache=sliding))
    refuse("a tuple", "tuple", lambda: model(x, past_key_values=()))
    refuse("two caches", "two", lambda: model(x, cache=DynamicCache(), past_key_values=DynamicCache()))
    refuse("an unknown keyword", "nonsense", lambda: model(x, nonsense=1))
    refuse("token types", "token_type_ids", lambda: model(x, token_type_ids=torch.zeros_like(x)))
    refuse("position_ids", "position_ids", lambda: model(x, position_ids=x))
    refuse("output_attentions", "output_attentions", lambda: model(x, output_attentions=True))
    refuse("a mask of a wrong length", "attention_mask", lambda: model(x, attention_mask=mask[:, 1:]))
    return failures


def resized_failures(model, modules, folder):
    """Of a model that has our modules, which lie in the folder `modules`: whether it has logits of tokens that are
    added, also once it is saved; and of its last norm in float16, which has no room for the squares."""
    x, vocabulary, failures = torch.arange(6)[None], model.config.vocab_size, []
    logits = model(x).logits
    model.resize_token_embeddings(vocabulary + 3)
    model.save_pretrained(folder)
    for module in modules.glob("*.py"):  # transformers 4 saves none
        shutil.copy(module, folder)
    for what, resized in ("resized", model), ("resized, and loaded again", load(folder, torch.float32)):
        found = resized(x).logits
        if found.shape[-1] != vocabulary + 3 or not torch.allclose(found[..., :vocabulary], logits):
            failures.append(f"{what}: {tuple(found.shape)} logits")
    wide = 300 * torch.ones(model.config.n_embd)
    half = model.transformer.ln_f.half()(wide.half()).float()
    if not torch.allclose(half, model.transformer.ln_f.float()(wide), rtol=1e-2, atol=1e-2):
        failures.append("its last norm in float16")
    return failures


def end_failures(folder):
    """Of a model of 257 tokens, which are bytes and an end of text: whether generation ends there by itself."""
    model, failures = load(folder, torch.float32), []
    for config in (model.config, model.generation_config):
        if (config.bos_token_id, config.eos_token_id) != (256, 256):
            failures.append(f"{type(config).__name__}: begin and end {config.bos_token_id} and {config.eos_token_id}")
    prompts = torch.arange(257)[:, None]
    options = {"attention_mask": torch.ones_like(prompts), "do_sample": False, "max_new_tokens": 20, "pad_token_id": 0}
    endless = model.generate(prompts, **options, eos_token_id=NO_TOKEN)[:, 1:].tolist()
    row = next(row for row, tokens in enumerate(endless) if 256 in tokens)
    options["attention_mask"] = options["attention_mask"][:1]
    ended = model.generate(prompts[row:row + 1], **options)[0, 1:].tolist()
    if ended != endless[row][:endless[row].index(256) + 1]:
        failures.append(f"no end: {ended}")
    return failures


def start_failures(folder):
    """Whether a new model of the folder's shape begins with GPT-2's weights, normal(0, 0.02), and those of projections
    into the residual stream divided by sqrt(2 L)."""
    config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
    model, failures = AutoModelForCausalLM.from_config(config, trust_remote_code=True), []
    for name, p in model.named_parameters():
        std = 0.02 / (2 * config.n_layer) ** 0.5 if name.endswith("c_proj.weight") else 0.02
        if p.dim() == 2 and p.numel() > 1000 and not abs(p.std().item() / std - 1) <= 0.1:
            failures.append(f"{name} begins with a standard deviation of {p.std().item():.4f}")
    return failures


@torch.enable_grad()
def trained(model, tokenizer, folder, batch, accumulated):
    """The model's parameters after three updates of four texts of different lengths by transformers' Trainer."""
    texts = ["one", "a longer text than the others", "two texts", "x"] * 3
    arguments = TrainingArguments(folder, max_steps=3, per_device_train_batch_size=batch, learning_rate=0.1,
                                  gradient_accumulation_steps=accumulated, optim="sgd", max_grad_norm=0, use_cpu=True,
                                  lr_scheduler_type="constant", report_to="none", disable_tqdm=True, save_strategy="no")
    Trainer(model, arguments, train_dataset=[tokenizer(text) for text in texts],
            data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False)).train()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def typed_failures(folder, work):
    """What of transformers' usual lines fails with a folder of bytes: a tokenizer, a padded batch, Trainer."""
    tokenizer, failures = AutoTokenizer.from_pretrained(folder, trust_remote_code=True), []
    if {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id} != {256}:
        failures.append(f"begin, end, padding {tokenizer.bos_token} {tokenizer.eos_token} {tokenizer.pad_token}")
    batch = tokenizer(["a text", "b"], return_tensors="pt", padding=True, padding_side="left")
    model = load(folder, torch.float32)
    if batch["input_ids"].tolist() != [list(b"a text"), [256] * 5 + list(b"b")]:
        failures.append(f"batch {batch['input_ids'].tolist()}")
    texts = tokenizer.batch_decode(model.generate(**batch, max_new_tokens=4, do_sample=False))
    if not texts[0].startswith("a text"):
        failures.append(f"generated {texts}")
    if model.config.model_type == "gpt2_sla":  # how transformers' own models weigh tokens is theirs
        whole, parts = (trained(load(folder, torch.float32), tokenizer, work, *sizes) for sizes in ((4, 1), (1, 4)))
        start = torch.cat([p.detach().flatten() for p in model.parameters()])
        if not (whole - parts).norm() <= 1e-3 * (whole - start).norm():
            failures.append(f"accumulated updates differ by {(whole - parts).norm() / (whole - start).norm():.1e}")
    else:
        trained(model, tokenizer, work, 2, 1)
    return failures


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
    theirs = peer.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=len(ours), do_sample=False,
                           pad_token_id=0, eos_token_id=NO_TOKEN)[0, 1:].tolist()
    return "" if ours == theirs else f"greedy tokens: {ours} and {theirs}"


def check_case(case, folder):
    expected = json.loads((case / "expected.json").read_text())
    tokens, failures = read_shard(case / "tokens.bin"), []
    model = folder / case.name
    run("data/convert", case, model)
    with torch.no_grad():
        for dtype in (torch.float64, torch.float32):
            peer = load(model, dtype)
            for what, difference in worst_differences(peer, tokens, expected, dtype).items():
                if not difference <= BOUND[dtype]:
                    failures.append(f"{what} in {dtype}: {difference:.1e}")
            if dtype == torch.float64:
                failures += generation_failures(peer, tokens)
                if peer.config.model_type == "gpt2_sla":
                    failures += interface_failures(peer)
        saved = folder / (case.name + "_saved")
        peer.save_pretrained(saved)
        difference = abs(val_loss(saved, case, expected) / expected["val_loss"] - 1)
        if not difference <= 1e-5:
            failures.append(f"loss of what transformers saved: {difference:.1e}")
        if peer.config.model_type == "gpt2_sla":
            failures += resized_failures(peer, model, folder / (case.name + "_resized"))
        failures += filter(None, [greedy_failure(model)])
        if case.name in ("baseline", "paper_default"):
            failures += end_failures(model)
            failures += typed_failures(model, folder / "trainer")
        if case.name == "paper_default":
            failures += start_failures(model)
    print(f"{case.name}: {'; '.join(failures) or 'the same'}", flush=True)
    return not failures


def llama_failures(folder):
    """What differs between a random LlamaForCausalLM, our model of it, and what that becomes as LlamaForCausalLM."""
    failures = []
    for kv_heads, tied in ((4, False), (2, False), (2, True)):
        config = transformers.LlamaConfig(
            vocab_size=97, hidden_size=32, intermediate_size=56, num_hidden_layers=3, num_attention_heads=4,
            num_key_value_heads=kv_heads, max_position_embeddings=40, tie_word_embeddings=tied, initializer_range=0.2,
            bos_token_id=None, eos_token_id=None, attn_implementation="eager")
        theirs, names = transformers.LlamaForCausalLM(config), [folder / f"{kv_heads}{tied}{n}" for n in range(3)]
        theirs.save_pretrained(names[0])
        run("data/convert", names[0], names[1])
        run("data/convert", "--llama", names[1], names[2])
        x = torch.arange(80).view(2, 40) * 31 % 97
        with torch.no_grad():
            logits = [load(name, torch.float64)(x).logits for name in names]
        loss, ours = (F.cross_entropy(y[:, :-1].reshape(-1, 97), x[:, 1:].reshape(-1)).item() for y in logits[:2])
        if not abs(ours / loss - 1) <= 1e-6:  # LlamaForCausalLM has angles in float32, whatever it computes in
            failures.append(f"loss, {kv_heads} K/V heads: {ours} and {loss}")
        if not torch.equal(logits[2], logits[0]):
            failures.append(f"what came back, {kv_heads} K/V heads")
        failures += filter(None, [greedy_failure(name) for name in names[1:2]])
        peer, ours = load(names[2], torch.float32), greedy_sample(names[1], 40)
        prompt = torch.tensor([[96]])
        if peer.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=len(ours), do_sample=False,
                         pad_token_id=0, eos_token_id=NO_TOKEN)[0, 1:].tolist() != ours:
            failures.append(f"greedy tokens, {kv_heads} K/V heads")
    print(f"LlamaForCausalLM: {'; '.join(failures) or 'the same'}", flush=True)
    return failures


def terms_of(case):
    return {term for term in TERMS if re.search(rf"\b{term}\b", make.wiring_text(json.loads(
        (case / "config.json").read_text())))}


def all_cases(folder):
    """The golden cases, and one that is made in the folder for each term that they lack, and for terms that meet in
    the module alone."""
    cases = sorted(path.parent for path in (ROOT / "dev/test/golden").glob("*/expected.json"))
    for term in sorted(set(TERMS) - set().union(*map(terms_of, cases))):
        case, (wiring, options) = folder / "made" / term, make.ALL[term]
        make.make_case(case, wiring, 1, **{"steps": 2, **options})
        cases.append(case)
    cases.append(folder / "made" / "vres_gqa")
    make.make_case(cases[-1], "vres gqa(2)", 1, steps=2)
    return cases


def main():
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        cases = all_cases(Path(folder))
        same = sum([check_case(case, Path(folder)) for case in cases])
        same -= bool(llama_failures(Path(folder)))
    print(f"{same} of {len(cases)} cases are the same with transformers {transformers.__version__}")
    for model in map(Path, sys.argv[1:]):
        failure = greedy_failure(model.resolve())
        print(f"{model}: {failure or 'the same greedy tokens'}")
        same -= failure != ""
    return 0 if same == len(cases) else 1


if __name__ == "__main__":
    sys.exit(main())
