#!/usr/bin/env python3
"""Do nanoGPT's checkpoints arrive? Small models with random weights and its names are saved as it saves them;
data/nanogpt.py makes folders of them, whose logits in transformers and validation loss in the trainer must be the
model's, where it computes GELU by tanh. Says how far they are apart where it computes GELU by erf, as nanoGPT does.

    make build/fp32/train_gpt2_sla_cpu && python3 dev/nanogpt_check.py

For development only: it needs PyTorch, transformers and safetensors.
"""
import struct
import sys
import tempfile
from pathlib import Path

from huggingface_check import load, run, val_loss

import torch
import torch.nn as nn
import torch.nn.functional as F
from transformers.utils import logging

B, T = 4, 24
LOGITS = {"tanh": 1e-4, "none": 3e-3}  # the largest difference; by erf ("none") GELU's values differ by up to 4.8e-4
LOSS = 1e-5                            # relative


class Layer(nn.Module):
    def __init__(self, C, heads, bias, gelu):
        super().__init__()
        self.heads, self.gelu = heads, gelu
        self.ln_1, self.ln_2 = nn.LayerNorm(C, bias=bias), nn.LayerNorm(C, bias=bias)
        self.attn = nn.ModuleDict({"c_attn": nn.Linear(C, 3 * C, bias), "c_proj": nn.Linear(C, C, bias)})
        self.mlp = nn.ModuleDict({"c_fc": nn.Linear(C, 4 * C, bias), "c_proj": nn.Linear(4 * C, C, bias)})

    def forward(self, x):
        parts = self.attn["c_attn"](self.ln_1(x)).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        x = x + self.attn["c_proj"](F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp["c_proj"](F.gelu(self.mlp["c_fc"](self.ln_2(x)), approximate=self.gelu))


class Model(nn.Module):
    def __init__(self, n_layer, n_head, n_embd, block_size, bias, vocab_size, gelu):
        super().__init__()
        self.transformer = nn.ModuleDict({
            "wte": nn.Embedding(vocab_size, n_embd), "wpe": nn.Embedding(block_size, n_embd),
            "h": nn.ModuleList(Layer(n_embd, n_head, bias, gelu) for _ in range(n_layer)),
            "ln_f": nn.LayerNorm(n_embd, bias=bias)})
        self.lm_head = nn.Linear(n_embd, vocab_size, bias=False)
        self.lm_head.weight = self.transformer["wte"].weight
        for name, p in self.named_parameters():
            nn.init.normal_(p, float("ln_" in name and "weight" in name), 0.1)

    def forward(self, tokens):
        t = self.transformer
        x = t["wte"](tokens) + t["wpe"](torch.arange(tokens.shape[1]))
        for layer in t["h"]:
            x = layer(x)
        return self.lm_head(t["ln_f"](x))


def write_tokens(path, tokens):
    header = struct.pack("<256i", 20240520, 1, len(tokens), *[0] * 253)
    path.write_bytes(header + struct.pack(f"<{len(tokens)}H", *tokens))


def check(name, folder, gelu, bias, vocab_size, compiled):
    args = {"n_layer": 3, "n_head": 4, "n_embd": 32, "block_size": T + 3, "bias": bias, "vocab_size": vocab_size}
    torch.manual_seed(1)
    model = Model(**args, gelu=gelu).eval()
    state = {("_orig_mod." if compiled else "") + key: value for key, value in model.state_dict().items()}
    if not compiled:  # as versions before PyTorch 2 have it
        state["transformer.h.0.attn.bias"] = torch.ones(T, T).tril()
    torch.save({"model": state, "model_args": {**args, "dropout": 0.0}, "optimizer": {}, "iter_num": 7,
                "config": {"wandb_log": False}, "best_val_loss": torch.tensor(3.5)}, folder / "ckpt.pt")
    out = folder / name
    said = run(sys.executable, "data/nanogpt.py", folder / "ckpt.pt", out)
    kept = min(vocab_size, 50257)
    tokens = torch.randint(kept, (B * T + 1,))
    write_tokens(folder / "tokens.bin", tokens.tolist())
    x, y = tokens[:-1].view(B, T), tokens[1:].view(B, T)
    with torch.no_grad():
        logits = model(x)[..., :kept]
        loss = F.cross_entropy(logits.flatten(0, 1), y.flatten()).item()
        of_logits = (load(out, torch.float32)(x).logits - logits).abs().max().item()
    of_loss = abs(val_loss(out, folder, {"batch_size": B, "seq_len": T}) / loss - 1)
    says_so = "by erf" in said and ("cut from" in said) == (kept < vocab_size)
    good = of_logits <= LOGITS[gelu] and of_loss <= LOSS and says_so
    print(f"{name}: logits differ by up to {of_logits:.1e}, losses by {of_loss:.1e}: {'good' if good else 'BAD'}",
          flush=True)
    return good


def main():
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    cases = [(f"{gelu}, {'biases' if bias else 'no biases'}, vocabulary {vocab}", gelu, bias, vocab, compiled)
             for gelu in ("tanh", "none")
             for bias, vocab, compiled in ((True, 65, True), (False, 50304, False), (True, 50257, False))]
    good = 0
    for name, *case in cases:
        with tempfile.TemporaryDirectory() as folder:
            good += check(name.replace("none", "erf"), Path(folder), *case)
    print(f"{good} of {len(cases)} models are as they should be")
    return 0 if good == len(cases) else 1


if __name__ == "__main__":
    sys.exit(main())
