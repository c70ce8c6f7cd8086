#!/usr/bin/env python3
"""A model that nanoGPT trained, as a folder for -e: config.json and model.safetensors, in Hugging Face's format.

    data/nanogpt.py out/ckpt.pt models/mine

Weights become float32 and linear ones (in, out). The head is wte's, as in nanoGPT. A model with bias=False has zeros
for biases, and trains on without any. Of a vocabulary of 50304, which is GPT-2's padded to a multiple of 64, the 50257
tokens are kept.

It needs PyTorch and safetensors, and nothing else in this project needs Python.
"""
import argparse
import json
import os
import shutil
import sys

try:
    import torch
    from safetensors.torch import save_file
except ImportError as e:
    sys.exit(f"error: data/nanogpt.py needs PyTorch and safetensors: {e}")

GPT2_TOKENS, PADDED_TOKENS = 50257, 50304
LINEAR = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")  # (out, in) in nanoGPT


class BadFile(Exception):
    pass


def read_checkpoint(path):
    """(its model_args, {name: tensor} without the prefixes of torch.compile and of the module)"""
    try:
        file = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as e:
        raise BadFile(f"{path}: cannot be read as a file of PyTorch ({type(e).__name__}: {str(e).splitlines()[0]})")
    if not isinstance(file, dict) or not all(isinstance(file.get(key), dict) for key in ("model", "model_args")):
        raise BadFile(f"{path}: has no \"model\" and \"model_args\", which a ckpt.pt of nanoGPT has")
    args = file["model_args"]
    missing = [k for k in ("n_layer", "n_head", "n_embd", "block_size", "vocab_size") if k not in args]
    if missing:
        raise BadFile(f"{path}: model_args has no {', '.join(missing)}")
    without_prefixes = lambda name: name.removeprefix("_orig_mod.").removeprefix("transformer.")
    return args, {without_prefixes(name): tensor for name, tensor in file["model"].items()}


def expected_shapes(args):
    """{name: shape in nanoGPT}, without biases."""
    C = args["n_embd"]
    shapes = {"wte.weight": (args["vocab_size"], C), "wpe.weight": (args["block_size"], C), "ln_f.weight": (C,)}
    for l in range(args["n_layer"]):
        of_layer = {"ln_1": (C,), "attn.c_attn": (3 * C, C), "attn.c_proj": (C, C), "ln_2": (C,),
                    "mlp.c_fc": (4 * C, C), "mlp.c_proj": (C, 4 * C)}
        shapes.update({f"h.{l}.{name}.weight": shape for name, shape in of_layer.items()})
    return shapes


def take(path, tensors, name, shape):
    if name not in tensors:
        raise BadFile(f"{path}: has no tensor {name}")
    tensor = tensors.pop(name).to(torch.float32)
    if tuple(tensor.shape) != shape:
        raise BadFile(f"{path}: tensor {name} has shape {tuple(tensor.shape)}; by its model_args it is {shape}")
    return tensor


def convert(path, args, tensors):
    """The tensors as GPT-2's files have them."""
    # ".attn.bias" are causal masks of older versions.
    tensors = {name: tensor for name, tensor in tensors.items() if not name.endswith(".attn.bias")}
    bias, out = args.get("bias", True), {}
    for name, shape in expected_shapes(args).items():
        weight = take(path, tensors, name, shape)
        is_linear = name.removesuffix(".weight").endswith(LINEAR)
        out[name] = (weight.T if is_linear else weight).contiguous()
        if name not in ("wte.weight", "wpe.weight"):
            of_bias = name.removesuffix("weight") + "bias"
            out[of_bias] = take(path, tensors, of_bias, shape[:1]) if bias else torch.zeros(shape[0])
    head = tensors.pop("lm_head.weight", None)
    if head is not None and not torch.equal(head.to(torch.float32), out["wte.weight"]):
        raise BadFile(f"{path}: lm_head.weight is not wte.weight; only a tied head is known")
    if tensors:
        raise BadFile(f"{path}: tensor {next(iter(tensors))} is no part of nanoGPT's model")
    if args["vocab_size"] == PADDED_TOKENS:
        out["wte.weight"] = out["wte.weight"][:GPT2_TOKENS].clone()
    return out


def config_of(args, tensors):
    vocab_size = len(tensors["wte.weight"])
    # None: the vocabulary is not known, and transformers would take GPT-2's.
    end_of_text = GPT2_TOKENS - 1 if vocab_size == GPT2_TOKENS else None
    return {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "activation_function": "gelu_new",
            "tie_word_embeddings": True, "n_layer": args["n_layer"], "n_head": args["n_head"], "n_embd": args["n_embd"],
            "vocab_size": vocab_size, "n_positions": args["block_size"], "layer_norm_epsilon": 1e-5,
            "bias": args.get("bias", True), "wiring": "plain", "bos_token_id": end_of_text, "eos_token_id": end_of_text}


def write_folder(folder, config, tensors):
    """Under another name first: a folder of this name is complete."""
    temporary = folder + ".tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    os.makedirs(temporary)
    save_file(tensors, os.path.join(temporary, "model.safetensors"), metadata={"format": "pt"})
    with open(os.path.join(temporary, "config.json"), "w") as f:
        f.write(json.dumps(config, indent=1) + "\n")
    os.rename(temporary, folder)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ckpt", help="nanoGPT's ckpt.pt")
    parser.add_argument("out", help="the folder to write; must not exist")
    options = parser.parse_args()
    out = options.out.rstrip("/")
    try:
        if os.path.exists(out):
            raise BadFile(f"{out}: exists already; remove it, or choose another name")
        args, in_file = read_checkpoint(options.ckpt)
        tensors = convert(options.ckpt, args, in_file)
        config = config_of(args, tensors)
        write_folder(out, config, tensors)
    except (BadFile, OSError) as e:
        sys.exit(f"error: {e}")
    vocab_size = config["vocab_size"]
    print(f"{out}: {config['n_layer']} layers, {config['n_head']} heads, {config['n_embd']} channels, "
          f"vocabulary {vocab_size}, context length {config['n_positions']}, "
          f"{'biases' if config['bias'] else 'no biases (zeros in the file)'}")
    if args["vocab_size"] == PADDED_TOKENS:
        print(f"vocabulary: cut from {PADDED_TOKENS} to GPT-2's {GPT2_TOKENS} tokens; the others never occur in text")
    if vocab_size == GPT2_TOKENS:
        print("vocabulary: the folder has none; name GPT-2's with --tokenizer")
    else:
        print("vocabulary: the folder has none. If meta.pkl numbers characters, train and validate on the train.bin "
              "and val.bin beside it; samples are numbers")
    print("warning: nanoGPT computes GELU exactly, by erf; here it is GPT-2's approximation by tanh, which differs by "
          "up to 5e-4. Losses differ slightly; training on adapts the weights")


if __name__ == "__main__":
    main()
