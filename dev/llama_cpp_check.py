#!/usr/bin/env python3
"""Are the models that data/convert writes for llama.cpp the ones that it was given? For a plain GPT-2 and random models
of Llama's architecture NAME.gguf is read by gguf, which is llama.cpp's own reader: names, shapes and values of all
tensors, the metadata and the vocabulary, in fp32 and bf16. Where llama.cpp's Python package is installed it runs them:
logits must be transformers', greedy tokens the trainer's, and texts become the same tokens.

    make build/fp32/train_gpt2_sla_cpu data/convert data/tokenize && python3 dev/llama_cpp_check.py

dev/transformers_venv.sh makes a Python for it, but for llama.cpp: that is `pip install llama-cpp-python`, which is
compiled for a quarter of an hour on two busy cores.

For development only: it needs PyTorch, transformers and gguf, and nothing else in this project needs Python.
"""
import json
import sys
import tempfile
from pathlib import Path

import huggingface_check as check
import torch
import transformers
from huggingface_check import ROOT, run
from torch_sla import read_shard
try:
    import gguf
except ImportError as e:
    sys.exit(f"error: llama_cpp_check.py needs gguf: {e}")
try:
    import llama_cpp
except ImportError:
    llama_cpp = None

CONTEXT = 64
# Vocabularies whose last token is the end of a text: GPT-2's models have bytes, and one of Llama's has merged bytes.
BYTES, MERGED = "bytes", ROOT / "dev/test/tokenizer/tokenizer.json"
# Bounds the largest difference of logits, as a share of the largest logit. llama.cpp looks GELU up in a table of half
# precision: with such a GELU in transformers the first token's difference is 3e-6, and not 2e-4.
BOUND = {"llama": 1e-5, "gpt2": 1e-3}


# ----------------------------------------------------------------------------
# Models

def random_llama(path, kv_heads, tied):
    config = transformers.LlamaConfig(
        vocab_size=657, hidden_size=64, intermediate_size=104, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=kv_heads, max_position_embeddings=CONTEXT, tie_word_embeddings=tied, initializer_range=0.2,
        rms_norm_eps=3e-3, bos_token_id=None, eos_token_id=None,
        rope_parameters={"rope_type": "default", "rope_theta": 300.0})
    model = transformers.LlamaForCausalLM(config)
    for name, weight in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(weight, 0.5, 1.5)
    model.save_pretrained(path)


def make_models(folder):
    """{a name: (our folder of a model, the folder that transformers loads without our module, its vocabulary)}"""
    torch.manual_seed(1)
    gpt2 = folder / "gpt2"
    run("data/convert", ROOT / "dev/test/golden/baseline", gpt2, "--tokenizer", BYTES)
    models = {"gpt2": (gpt2, gpt2, BYTES)}
    for kv_heads, tied in (4, False), (2, False), (2, True):
        name = f"llama_{kv_heads}_{'tied' if tied else 'untied'}"
        first, ours, back = (folder / f"{name}_{part}" for part in ("first", "ours", "back"))
        random_llama(first, kv_heads, tied)
        run("data/convert", first, ours, "--tokenizer", MERGED)
        run("data/convert", "--llama", ours, back)
        models[name] = ours, back, MERGED
    return models


# ----------------------------------------------------------------------------
# What gguf reads

def with_pairs_together(weight, heads):
    """Rows of q or k as llama.cpp's own converter orders them: two that are rotated together lie beside each other."""
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).transpose(1, 2).reshape(rows, columns)


def expected_tensors(peer):
    """{a name of llama.cpp's, by gguf's table of names: the values} of a model of transformers."""
    config, tensors = peer.config, {}
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[config.model_type.upper()], config.num_hidden_layers)
    for name, weight in peer.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if config.model_type == "gpt2" and ".h." in name and weight.dim() == 2:
            weight = weight.T  # GPT-2's are (in, out)
        if "q_proj" in name:
            weight = with_pairs_together(weight, config.num_attention_heads)
        if "k_proj" in name:
            weight = with_pairs_together(weight, config.num_key_value_heads)
        tensors[names.get_name(name, (".weight", ".bias"))] = weight
    return tensors


def expected_metadata(config):
    """{a key: the value}, by gguf's names of keys."""
    keys, a = gguf.Keys, config.model_type
    values = {keys.LLM.CONTEXT_LENGTH: config.max_position_embeddings, keys.LLM.EMBEDDING_LENGTH: config.hidden_size,
              keys.LLM.BLOCK_COUNT: config.num_hidden_layers, keys.LLM.VOCAB_SIZE: config.vocab_size,
              keys.Attention.HEAD_COUNT: config.num_attention_heads}
    if a == "gpt2":
        values |= {keys.LLM.FEED_FORWARD_LENGTH: 4 * config.hidden_size,
                   keys.Attention.LAYERNORM_EPS: config.layer_norm_epsilon}
    else:
        values |= {keys.LLM.FEED_FORWARD_LENGTH: config.intermediate_size,
                   keys.Attention.HEAD_COUNT_KV: config.num_key_value_heads,
                   keys.Attention.LAYERNORM_RMS_EPS: config.rms_norm_eps, keys.Rope.DIMENSION_COUNT: config.head_dim,
                   keys.Rope.FREQ_BASE: config.rope_parameters["rope_theta"]}
    return {key.format(arch=a): value for key, value in values.items()} | {
        "general.architecture": a, "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.add_bos_token": False} | {
        f"tokenizer.ggml.{end}_token_id": config.vocab_size - 1 for end in ("bos", "eos")}


def reading_failures(path, peer, ours, is_bf16):
    file, failures = gguf.GGUFReader(path), []
    read = {tensor.name: tensor for tensor in file.tensors}
    expected = expected_tensors(peer)
    if read.keys() != expected.keys():
        failures.append(f"tensors {sorted(read.keys() ^ expected.keys())}")
    for name in read.keys() & expected.keys():
        values, weight = torch.tensor(gguf.quants.dequantize(read[name].data, read[name].tensor_type)), expected[name]
        is_rounded = read[name].tensor_type == gguf.GGMLQuantizationType.BF16
        if is_rounded != (is_bf16 and weight.dim() == 2 and name != "position_embd.weight"):
            failures.append(f"{name} is of type {read[name].tensor_type.name}")
        if not torch.equal(values, weight.bfloat16().float() if is_rounded else weight):
            failures.append(f"{name} has other values, or {list(values.shape)} and not {list(weight.shape)}")
    metadata = {key: field.contents() for key, field in file.fields.items()}
    for key, value in expected_metadata(peer.config).items():
        found = metadata.get(key)
        if found != (torch.tensor(value).item() if isinstance(value, float) else value):
            failures.append(f"{key} is {found}, and not {value}")
    vocabulary = json.loads((ours / "tokenizer.json").read_text())
    ids = vocabulary["model"]["vocab"] | {token["content"]: token["id"] for token in vocabulary["added_tokens"]}
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in vocabulary["model"]["merges"]]
    for key, value in ("tokens", sorted(ids, key=ids.get)), ("merges", merges):
        if metadata.get("tokenizer.ggml." + key) != value:
            failures.append(f"other {key}")
    return failures


# ----------------------------------------------------------------------------
# What llama.cpp computes

TEXTS = ["Skip, n. 1. A light leap or bound.", " two  spaces\n\n\tand\r\n ends ", "naïve Σ 漢字 🙂 é, it's 12"]


def vocabulary_failures(llama, vocabulary, folder):
    failures = []
    for text in TEXTS:
        with tempfile.TemporaryDirectory(dir=folder) as name:
            # With few documents a piece of one would be validation data.
            Path(name, "texts.jsonl").write_text(200 * (json.dumps({"text": text}) + "\n"))
            run("data/tokenize", "--tokenizer", vocabulary, "--field", "text", "--out", f"{name}/out",
                f"{name}/texts.jsonl")
            tokens = read_shard(Path(name, "out/train_000000.bin")).tolist()
        ours, theirs = tokens[1:tokens.index(tokens[0], 1)], llama.tokenize(text.encode(), add_bos=False)
        if ours != theirs:
            failures.append(f"tokens of {text!r}: {ours} and {theirs}")
        if llama.detokenize(theirs) != text.encode():
            failures.append(f"{text!r} comes back as {llama.detokenize(theirs)}")
    return failures


@torch.no_grad()
def running_failures(path, peer, ours, vocabulary, folder):
    """What differs in llama.cpp, and the largest difference of logits, as a share of the largest."""
    # Its K/V cache has half precision by default.
    llama = llama_cpp.Llama(str(path), n_ctx=CONTEXT, logits_all=True, verbose=False, n_threads=1, flash_attn=False,
                            type_k=llama_cpp.GGML_TYPE_F32, type_v=llama_cpp.GGML_TYPE_F32)
    failures = vocabulary_failures(llama, vocabulary, folder)
    length, size = peer.config.max_position_embeddings, peer.config.vocab_size
    x = (torch.arange(length) * 31 + 7) % size
    llama.eval(x.tolist())
    expected, logits = peer(x[None]).logits[0], torch.tensor(llama.scores[:length])
    difference = ((logits - expected).abs().max() / expected.abs().max()).item()
    if not difference <= BOUND[peer.config.model_type]:
        failures.append(f"logits differ by {difference:.1e} of the largest")
    sample, token, theirs = check.greedy_sample(ours, length - 1), size - 1, []
    llama.reset()
    for n in range(len(sample)):
        llama.eval([token])
        token = int(llama.scores[n].argmax())
        theirs.append(token)
    if theirs != sample:
        failures.append(f"greedy tokens: {theirs} and the trainer's {sample}")
    return failures, difference


def main():
    check.logging.set_verbosity_error()
    check.logging.disable_progress_bar()
    torch.set_num_threads(1)
    status = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for model, (ours, back, vocabulary) in make_models(folder).items():
            peer, failures, said = check.load(back, torch.float32), [], ""
            for kind in "fp32", "bf16":
                path = folder / f"{model}_{kind}.gguf"
                run("data/convert", ours, path, "--type", kind)
                failures += [f"{kind}: {failure}" for failure in reading_failures(path, peer, ours, kind == "bf16")]
            if llama_cpp:
                found, difference = running_failures(folder / f"{model}_fp32.gguf", peer, ours, vocabulary,
                                                     folder)
                failures, said = failures + found, f", logits of llama.cpp within {difference:.1e} of the largest"
            print(f"{model}: {'; '.join(failures) or 'the same'}{said}", flush=True)
            status |= bool(failures)
    print(f"llama.cpp: {'llama_cpp ' + llama_cpp.__version__ if llama_cpp else 'skipped, there is no llama_cpp'}")
    return status


if __name__ == "__main__":
    sys.exit(main())
