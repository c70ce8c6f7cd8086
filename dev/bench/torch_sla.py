#!/usr/bin/env python3
"""The peer that the trainer's speed is compared with: GPT-2 with any wiring of its attention in PyTorch 2.

Skip-layer attention is the paper's listing: layers l >= n_l concatenate, along the heads, the keys and values of their
own first h - n_h heads with those that layer l - n_l projected for its last n_h. Every layer projects all of its q, k
and v, also those that no head uses. Otherwise it is the usual way to train GPT-2: torch.compile,
scaled_dot_product_attention, bf16 autocast over fp32 weights, fused AdamW. Wirings with masks, several sources a head
or other layers' attention maps are written to be right, not fast: masks and maps are whole matrices.

    torch_sla.py check dev/test/golden          does it compute the same as the trainer? on the CPU, in float64
    torch_sla.py train --model d12 --wiring plain --wiring 'sla(9,9)' --seq-len 1024,16384 --micro-batch 32,2
    torch_sla.py attention --head-size 64 --heads 12 --seq-lens 1024,4096,16384 --tokens 32768

--json FILE keeps the figures. --ours FILE, the JSON of bench_gpu from the same GPU, adds the trainer's figures and
their ratio to these.
For development only: it needs PyTorch 2.5 or later, and nothing else in this project needs Python.
"""
import argparse
import contextlib
import json
import math
import statistics
import struct
import sys
import time
import warnings
from pathlib import Path

try:
    import torch
    import torch.nn.functional as F
    from torch.nn.attention import SDPBackend, sdpa_kernel
except ImportError as e:
    sys.exit(f"error: torch_sla.py needs PyTorch 2.5 or later: {e}")
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "llmc/formats/huggingface"))
from gpt2_sla import GPT2, Wiring


class UserError(Exception):
    """Something that the caller can put right; the message says how."""


# ----------------------------------------------------------------------------
# The model, which checkpoints carry for transformers


def rows_in_use(wiring):
    """How many of the heads' q, k and v, of all layers that run, some head uses, be it in another layer with the same
    parameters."""
    q, k, v = set(), set(), set()
    for l in range(wiring.num_layers):
        for head in range(wiring.num_heads):
            kv_head = head * wiring.num_kv_heads // wiring.num_heads
            v |= {(source, kv_head) for _, source in wiring.sources[l][head]}
            if wiring.map_layer(l) == l:
                q.add((l, head))
                if not wiring.hashes:
                    k |= {(source, kv_head) for source, _ in wiring.sources[l][head]}
    stored = wiring.stored_layers()
    return sum(len({(l % stored, head) for l, head in used}) for used in (q, k, v)) * (wiring.num_layers // stored)


def pairs(wiring, T):
    """(scored, multiplied): pairs of a query and a key that see each other, of all attentions. With `topk` fewer values
    are multiplied than scores computed; a mixed map is the attention of each layer below and the own, over the same
    values. With `lsh`, which keys queries see depends on their values; here all pairs of a causal mask count."""
    scored = multiplied = 0
    t = torch.arange(T)
    for l in range(wiring.num_layers):
        for map_layer in range(l + 1) if wiring.mixes_maps() else [wiring.map_layer(l)]:
            for head in range(wiring.num_heads):
                seen = wiring.visible(map_layer, head, t[:, None], t[None, :]).sum(dim=1) if wiring.masks else t + 1
                seen = seen * len(wiring.sources[l][head])
                scored += int(seen.sum())
                multiplied += int((seen if wiring.topk is None else seen.clamp(max=wiring.topk)).sum())
    return scored, multiplied


class Config:
    """vocab_size is the text's; num_embeddings the rows of wte, more where that makes the head's matmul faster."""

    def __init__(self, num_layers, num_heads, channels, vocab_size, max_seq_len, wiring, bias=True, layer_norm_eps=1e-5,
                 num_embeddings=None):
        self.num_layers, self.num_heads, self.channels = num_layers, num_heads, channels
        self.vocab_size, self.max_seq_len, self.bias = vocab_size, max_seq_len, bias
        self.wiring, self.layer_norm_eps = Wiring(wiring, num_layers, num_heads), layer_norm_eps
        self.num_embeddings = num_embeddings or vocab_size

    def flops_per_token(self, T):
        """Forward and backward, as llmc/model/flops.h counts what the model needs: without unused q, k and v."""
        L, C, hs = self.num_layers, self.channels, self.channels // self.num_heads
        of_attention = rows_in_use(self.wiring) * hs * C + (L - 1) * C * self.wiring.gate
        of_gates = 12 * L * C * C * self.wiring.gru
        of_dense = L * (L + 3) // 2 * C * self.wiring.dense
        of_halting = L // self.wiring.stored_layers() * C * (self.wiring.halting is not None)
        weights = self.vocab_size * C + 9 * L * C * C + of_attention + of_gates + of_dense + of_halting
        scored, multiplied = pairs(self.wiring, T)
        of_multiplied = 10 if self.wiring.relative else 6
        return 6 * weights + 2 * hs * (of_multiplied * multiplied + scored) / T


class GPT(GPT2):
    """tokens, targets (B, T) -> losses (B, T), in nats, and what training minimises beside their mean: 0, or with `act`
    the cost of the mean of N + R."""

    def __init__(self, config):
        super().__init__(config.wiring, config.channels, config.num_embeddings, config.max_seq_len, config.bias,
                         config.layer_norm_eps)
        self.initialise()

    def forward(self, tokens, targets):
        B, T = tokens.shape
        x, ponder = super().forward(tokens)
        logits = F.linear(x, self.wte.weight)
        losses = F.cross_entropy(logits.view(B * T, -1), targets.reshape(B * T), reduction="none").view(B, T)
        return losses, self.wiring.ponder_cost * ponder


def make_optimizer(model, learning_rate, betas, eps, weight_decay):
    parameters = list(model.parameters())
    groups = [{"params": [p for p in parameters if p.dim() >= 2], "weight_decay": weight_decay},
              {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=learning_rate, betas=betas, eps=eps, fused=True)


def mean_loss_and_gradients(model, batches, autocast):
    """p.grad = the gradients of what training minimises, the mean over `batches`, (tokens, targets) each. Returns the
    mean loss, on the device."""
    model.zero_grad(set_to_none=True)
    total = 0
    for tokens, targets in batches:
        with autocast:
            losses, penalty = model(tokens, targets)
            loss = losses.mean() / len(batches)
        (loss + penalty / len(batches)).backward()
        total = total + loss.detach()
    return total


# ----------------------------------------------------------------------------
# check: the golden cases, in float64


def read_safetensors(path):
    """Name -> tensor in float64. A file is the length of its JSON header, the header, then the tensors' bytes."""
    data = path.read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    tensors = {}
    for name, entry in json.loads(data[8:8 + length]).items():
        if name == "__metadata__":
            continue
        if entry["dtype"] != "F32":
            raise UserError(f"{path}: {name} is {entry['dtype']}; golden cases are F32")
        begin, end = (8 + length + offset for offset in entry["data_offsets"])
        tensors[name] = torch.frombuffer(bytearray(data[begin:end]), dtype=torch.float32).double().view(entry["shape"])
    return tensors


def read_shard(path):
    """llm.c's: an int32[256] header, which begins with 20240520, 1, the number of tokens; then uint16."""
    data = path.read_bytes()
    magic, version, count = struct.unpack_from("<3i", data)
    if (magic, version) != (20240520, 1) or len(data) != 1024 + 2 * count:
        raise UserError(f"{path}: not a token shard")
    return torch.tensor(struct.unpack_from(f"<{count}H", data, 1024))


def relative_error(x, expected):
    """||x - expected|| / ||expected||, of tensors or numbers; infinite if only one is zero or a shape differs."""
    x, expected = torch.as_tensor(x, dtype=torch.float64), torch.as_tensor(expected, dtype=torch.float64)
    if x.shape != expected.shape:
        return math.inf
    error, norm = (x - expected).norm().item(), expected.norm().item()
    if not math.isfinite(error):
        return math.inf
    return error / norm if norm > 0 else (0.0 if error == 0 else math.inf)


# Both sides compute in float64 and start from the same float32 weights. What is stored as float32 is rounded to 6e-8.
NUMBER_BOUND, TENSOR_BOUND = 1e-9, 1e-6


def wiring_text(hf):
    """Of a config.json."""
    if "wiring" in hf:
        return hf["wiring"]
    return f"sla({hf['num_skip_layer']},{hf['num_skip_head']})" if hf["num_skip_head"] > 0 else "plain"


def trains_on_streams(folder):
    """Whether the case has memory, whose gradients end at the segment: here a text is one sequence."""
    return "memory" in wiring_text(json.loads((folder / "config.json").read_text()))


def check_case(folder):
    """The worst relative errors: {what: (error, bound)}."""
    hf, expected = json.loads((folder / "config.json").read_text()), json.loads((folder / "expected.json").read_text())
    config = Config(hf["n_layer"], hf["n_head"], hf["n_embd"], hf["vocab_size"], hf["n_positions"], wiring_text(hf),
                    hf["bias"], hf["layer_norm_epsilon"])
    weights, grads = read_safetensors(folder / "model.safetensors"), read_safetensors(folder / "grads.safetensors")
    tokens = read_shard(folder / "tokens.bin")
    B, T, accumulation = expected["batch_size"], expected["seq_len"], expected["grad_accum_steps"]

    def micro_batch(s):
        first = s * B * T
        return tokens[first:first + B * T].view(B, T), tokens[first + 1:first + B * T + 1].view(B, T)

    model = GPT(config).double()
    parameters = dict(model.named_parameters())
    if set(parameters) != set(grads):
        raise UserError(f"{folder}: grads.safetensors and the model differ in {sorted(set(parameters) ^ set(grads))}")
    with torch.no_grad():
        for name, p in [*model.named_parameters(), *model.named_buffers()]:
            p.copy_(weights[name])
        all_batches = [micro_batch(s) for s in range(expected["steps"] * accumulation)]
        val_loss = torch.stack([model(*batch)[0].mean() for batch in all_batches]).mean()
        token_losses, _ = model(*all_batches[0])
    expected_losses = read_safetensors(folder / "token_losses.safetensors")["losses"]
    errors = {"val loss": (relative_error(val_loss, expected["val_loss"]), NUMBER_BOUND),
              "token losses": (relative_error(token_losses, expected_losses), TENSOR_BOUND)}

    optimizer = make_optimizer(model, expected["learning_rate"], (expected["beta1"], expected["beta2"]),
                               expected["eps"], expected["weight_decay"])
    loss_errors, norm_errors = [], []
    for step in range(expected["steps"]):
        batches = all_batches[step * accumulation:(step + 1) * accumulation]
        loss = mean_loss_and_gradients(model, batches, contextlib.nullcontext())
        if step == 0:
            by_tensor = {name: relative_error(p.grad, grads[name])
                         for name, p in parameters.items()}
            worst = max(by_tensor, key=by_tensor.get)
            errors[f"{len(by_tensor)} gradients, the worst {worst}"] = (by_tensor[worst], TENSOR_BOUND)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), expected["grad_clip"])
        optimizer.step()
        loss_errors.append(relative_error(loss, expected["losses"][step]))
        norm_errors.append(relative_error(norm, expected["grad_norms"][step]))
    errors[f"losses of {expected['steps']} steps"] = (max(loss_errors), NUMBER_BOUND)
    errors["gradient norms"] = (max(norm_errors), NUMBER_BOUND)
    return errors


def check(args):
    root = Path(args.golden_dir)
    found = sorted(f.parent for f in root.glob("**/expected.json"))
    folders = [folder for folder in found if not trains_on_streams(folder)]
    if not folders:
        raise UserError(f"{root}: no golden case in it (a folder with expected.json) without memory")
    print(f"PyTorch {torch.__version__}, float64 on the CPU\n\n| case | what | relative error | bound | |\n"
          "| --- | --- | --: | --: | --- |")
    failed = 0
    for folder in folders:
        for what, (error, bound) in check_case(folder).items():
            good = error <= bound  # False for NaN too
            failed += not good
            print(f"| {folder.name} | {what} | {error:.1e} | {bound:.0e} | {'' if good else 'DIFFERS'} |")
    print(f"\n{len(folders)} cases, " + ("all the same function." if failed == 0 else f"{failed} figures differ."))
    if len(found) > len(folders):
        print(f"{len(found) - len(folders)} cases with memory were left out.")
    return 1 if failed else 0


# ----------------------------------------------------------------------------
# Time and space on the device


def the_device(name):
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: PyTorch sees no GPU")
    device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    return device, torch.cuda.get_device_name() if device.type == "cuda" else "CPU"


def wait(device):
    if device.type == "cuda":
        torch.cuda.synchronize()


# As in gpu_time.h: a launch takes the host some microseconds, more from Python, which is noise in so much work.
LEAST_QUEUED_SECONDS, MOST_QUEUED_RUNS = 1e-3, 4096


def seconds_of(run, device, runs):
    """Seconds that `runs` runs take, queued one after the other: on a GPU by its own clock."""
    if device.type == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(runs):
            run()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e-3
    begin = time.perf_counter()
    for _ in range(runs):
        run()
    return time.perf_counter() - begin


def time_of(run, device, seconds, at_least=3):
    """Seconds that `run` takes: the median of batches that fill about `seconds`, after two runs and some batches that
    are not counted. A batch is as many runs as take a GPU LEAST_QUEUED_SECONDS, as bench_gpu's; on a CPU one run."""
    for _ in range(2):
        run()
    wait(device)
    runs = 1
    if device.type == "cuda":
        while seconds_of(run, device, runs) < LEAST_QUEUED_SECONDS and runs < MOST_QUEUED_RUNS:
            runs *= 2
    batches = []
    while len(batches) < at_least or sum(batches) < seconds:
        batches.append(seconds_of(run, device, runs))
    return statistics.median(batches) / runs


def gemm_rate(device):
    """FLOP/s of a bf16 matmul that is large enough to show the device's best."""
    n = 8192 if device.type == "cuda" else 512
    a, b = (torch.randn(n, n, device=device, dtype=torch.bfloat16) for _ in range(2))
    return 2 * n ** 3 / time_of(lambda: a @ b, device, 0.3)


def bytes_text(n):
    return f"{n * 1e-9:.2f} GB" if n >= 1e9 else f"{n * 1e-6:.1f} MB"


def read_ours(path, key):
    """The rows of bench_gpu's JSON; none without --ours."""
    if path is None:
        return []
    try:
        return json.loads(Path(path).read_text())[key]
    except (OSError, ValueError, KeyError) as e:
        raise UserError(f"--ours {path}: not what bench_gpu --json writes ({type(e).__name__}: {e})") from e


def write_json(path, args, device_name, rows):
    if path is not None:
        figures = {"torch": torch.__version__, "device": device_name, args.command: rows}
        Path(path).write_text(json.dumps(figures, indent=2) + "\n")


def print_row(*cells):
    print("| " + " | ".join(str(cell) for cell in cells) + " |", flush=True)


# ----------------------------------------------------------------------------
# train: whole steps

PRESETS = {"d12": (12, 12, 768), "d24": (24, 16, 1024), "d36": (36, 20, 1280), "d48": (48, 25, 1600),
           "tiny": (4, 4, 32)}
BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION,
            "efficient": SDPBackend.EFFICIENT_ATTENTION}


def train_once(args, config, B, T, device):
    """A row of the table: B sequences of T random tokens, --accumulation times a step."""
    torch.manual_seed(1)
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    plain = GPT(config).to(device)
    model = torch.compile(plain, dynamic=False) if args.compile else plain
    optimizer = make_optimizer(plain, 1e-5, (0.9, 0.95), 1e-8, 0.1)
    autocast = torch.autocast(device.type, dtype=torch.bfloat16)
    on_host = [torch.randint(config.vocab_size, (B, T)) for _ in range(args.accumulation)]
    losses = []

    def step():
        tokens = [t.to(device, non_blocking=True) for t in on_host]
        loss = mean_loss_and_gradients(model, [(t, t) for t in tokens], autocast)
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())

    seconds = time_of(step, device, 0, at_least=args.steps)
    if not math.isfinite(losses[-1]):
        raise UserError(f"the loss became {losses[-1]}")
    rate = B * T * args.accumulation / seconds
    cuda = device.type == "cuda"
    return {"B": B, "T": T, "attention": config.wiring.text, "seconds_per_step": seconds, "tokens_per_second": rate,
            "flops": rate * config.flops_per_token(T), "first_loss": losses[0], "last_loss": losses[-1],
            "peak_bytes": torch.cuda.max_memory_allocated() if cuda else None,
            "reserved_bytes": torch.cuda.max_memory_reserved() if cuda else None}


def serve_steps(args):
    """What bench_cpu runs: for each line on stdin, a number of seconds, trains so long and prints a step's median
    time."""
    config = Config(args.layers, args.heads, args.channels, args.vocab_size, args.T, args.wiring,
                    num_embeddings=(args.vocab_size + 63) // 64 * 64)
    torch.manual_seed(1)
    plain = GPT(config)
    model = torch.compile(plain, dynamic=False) if args.compile else plain
    optimizer = make_optimizer(plain, 1e-4, (0.9, 0.95), 1e-8, 0.1)
    autocast = torch.autocast("cpu", dtype=torch.bfloat16) if args.precision == "bf16" else contextlib.nullcontext()
    tokens = torch.randint(config.vocab_size, (args.B, args.T))

    def step():
        loss = mean_loss_and_gradients(model, [(tokens, tokens)], autocast)
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    for line in sys.stdin:
        print(f"{time_of(step, torch.device('cpu'), float(line)):.6f}", flush=True)


def train(args):
    if len(args.seq_len) != len(args.micro_batch):
        raise UserError(f"--seq-len has {len(args.seq_len)} values and --micro-batch {len(args.micro_batch)}; "
                        "each length needs one")
    ours = {(r["B"], r["T"], r["attention"]): r for r in read_ours(args.ours, "training")}
    L, h, C = PRESETS[args.model]
    vocab = 257 if args.model == "tiny" else 50257
    # As nanoGPT does, the vocabulary is rounded up to a multiple of 64.
    configs = [[Config(L, h, C, vocab, T, wiring, num_embeddings=(vocab + 63) // 64 * 64)
                for wiring in args.wiring or [f"sla({L * 3 // 4},{h * 3 // 4})"]] for T in args.seq_len]
    device, device_name = the_device(args.device)
    torch.set_float32_matmul_precision("high")
    gemm = gemm_rate(device)
    print(f"PyTorch {torch.__version__}, {device_name}, {args.model}, bf16 autocast, "
          f"{'compiled' if args.compile else 'not compiled'}, attention by {args.backend or 'its own choice'}. "
          f"GEMM {gemm * 1e-12:.1f} TFLOP/s. \"used\" is the most that tensors took.\n")
    print_row("B", "T", "attention", "ms/step", "tokens/s", "TFLOP/s", "share of GEMM", "/ plain", "planned", "used",
              *(["ours, tokens/s", "ours / PyTorch"] if args.ours else []))
    print_row("--:", "--:", "---", *["--:"] * (9 if args.ours else 7))
    rows = []
    for B, of_wirings in zip(args.micro_batch, configs):
        plain_rate = None
        for config in of_wirings:
            T = config.max_seq_len
            torch._dynamo.reset()
            with sdpa_kernel(BACKENDS[args.backend]) if args.backend else contextlib.nullcontext():
                row = train_once(args, config, B, T, device)
            rate = row["tokens_per_second"]
            if config.wiring.is_plain():
                plain_rate = rate
            own = ours.get((B, T, row["attention"]))
            our_rate = own["tokens_per_second"] if own else None
            compared = [f"{our_rate:.0f}", f"{our_rate / rate:.3f}"] if own else ["", ""]
            print_row(B, T, row["attention"], f"{row['seconds_per_step'] * 1e3:.1f}", f"{rate:.0f}",
                      f"{row['flops'] * 1e-12:.1f}", f"{100 * row['flops'] / gemm:.1f} %",
                      f"{rate / plain_rate:.3f}" if plain_rate and not config.wiring.is_plain() else "", "",
                      "" if row["peak_bytes"] is None else bytes_text(row["peak_bytes"]),
                      *(compared if args.ours else []))
            rows.append(row)
    write_json(args.json, args, device_name, rows)
    return 0


# ----------------------------------------------------------------------------
# attention: the back ends one by one


def sdpa(q, k, v):
    return F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True).transpose(1, 2)


def attention_functions():
    """Name -> (a function (q, k, v) -> out, each (B, T, h, hs), the context to call it in); or why there is none."""
    functions = {name: (sdpa, sdpa_kernel(backend)) for name, backend in BACKENDS.items()}
    for name, module in (("flash_attn", "flash_attn"), ("flash-attn-3", "flash_attn_interface")):
        try:
            flash = __import__(module).flash_attn_func
        except Exception as e:  # a broken build raises all kinds of errors
            functions[name] = f"{type(e).__name__}: {e}"
            continue

        def attention_by_library(q, k, v, flash=flash):
            out = flash(q, k, v, causal=True)
            return out[0] if isinstance(out, tuple) else out
        functions[name] = (attention_by_library, contextlib.nullcontext())
    return functions


def time_attention(attention, B, T, heads, head_size, device):
    """(seconds forward, seconds forward and backward), in bf16."""
    q, k, v, dout = (torch.randn(B, T, heads, head_size, device=device, dtype=torch.bfloat16) for _ in range(4))

    def forward():
        with torch.no_grad():
            attention(q, k, v)

    def forward_backward():
        torch.autograd.grad(attention(q, k, v), (q, k, v), dout)

    seconds = time_of(forward, device, 0.2)
    for x in (q, k, v):
        x.requires_grad_()
    return seconds, time_of(forward_backward, device, 0.2)


def attention(args):
    ours = {}  # the fastest of the kernels
    for r in read_ours(args.ours, "attention"):
        if r["attention"].split(",")[0] == "plain":
            best = ours.setdefault((r["B"], r["T"], r["heads"], r["head_size"]), {})
            for key in "forward_flops", "forward_backward_flops":
                best[key] = max(best.get(key, 0), r[key])
    for T in args.seq_lens:
        if args.tokens % T != 0:
            raise UserError(f"--tokens {args.tokens} is not a multiple of the length {T}")
    device, device_name = the_device(args.device)
    print(f"PyTorch {torch.__version__}, {device_name}, bf16, causal, {args.heads} heads of {args.head_size}\n")
    print_row("B", "T", "back end", "forward, us", "TFLOP/s", "forward + backward, us", "TFLOP/s",
              *(["ours / it, forward", "ours / it, forward + backward"] if args.ours else []))
    print_row("--:", "--:", "---", *["--:"] * (6 if args.ours else 4))
    rows, reasons = [], {}
    for T in args.seq_lens:
        B = args.tokens // T
        # q k^T and p v, below the diagonal; the backward pass has 5 of these.
        flops = 2 * B * T * T * args.heads * args.head_size
        for name, function in attention_functions().items():
            if isinstance(function, str):
                reasons[name] = function
                continue
            function, context = function
            with warnings.catch_warnings(record=True) as said:  # where PyTorch says why a back end will not do
                warnings.simplefilter("always")
                try:
                    with context:
                        forward, both = time_attention(function, B, T, args.heads, args.head_size, device)
                except Exception as e:  # each library has its own
                    why = [str(w.message).splitlines()[0] for w in said]
                    what = f"{type(e).__name__}: {str(e).splitlines()[0] if str(e) else ''}"
                    reasons[f"{name}, T {T}"] = "; ".join([what] + why)
                    continue
            rates = flops / forward, 3.5 * flops / both
            own = ours.get((B, T, args.heads, args.head_size))
            ratios = [f"{own[key] / rate:.3f}" if own else ""
                      for key, rate in zip(("forward_flops", "forward_backward_flops"), rates)]
            print_row(B, T, name, f"{forward * 1e6:.1f}", f"{rates[0] * 1e-12:.1f}", f"{both * 1e6:.1f}",
                      f"{rates[1] * 1e-12:.1f}", *(ratios if args.ours else []))
            rows.append({"B": B, "T": T, "heads": args.heads, "head_size": args.head_size, "backend": name,
                         "forward_seconds": forward, "forward_flops": rates[0],
                         "forward_backward_seconds": both, "forward_backward_flops": rates[1]})
    if reasons:
        print("\nNot timed:\n")
        for what, why in reasons.items():
            print(f"- {what}: {why}")
    write_json(args.json, args, device_name, rows)
    return 0 if rows else 1


# ----------------------------------------------------------------------------
# Command line


def positive(text):
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return value


def list_of(kind):
    return lambda text: [kind(part) for part in text.split(",")]


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    p = commands.add_parser("check", help="compare with golden cases; exits with 1 if a figure differs")
    p.add_argument("golden_dir")
    p.set_defaults(run=check)

    p = commands.add_parser("train", help="time whole training steps")
    p.add_argument("--model", choices=PRESETS, default="d12")
    p.add_argument("--wiring", action="append", metavar="TEXT", help="as the trainer's; more than once for more than "
                   "one; sla(3/4 of the layers,3/4 of the heads)")
    p.add_argument("--seq-len", type=list_of(positive), required=True, metavar="T,...")
    p.add_argument("--micro-batch", type=list_of(positive), required=True, metavar="B,...", help="as many as lengths")
    p.add_argument("--accumulation", type=positive, default=1, help="micro-batches a step; 1")
    p.add_argument("--steps", type=positive, default=10, help="that are timed, after two that are not; 10")
    p.add_argument("--backend", choices=BACKENDS, help="of scaled_dot_product_attention; PyTorch's choice")
    p.add_argument("--no-compile", dest="compile", action="store_false")
    p.set_defaults(run=train)

    p3 = commands.add_parser("steps", help="time training steps on the CPU when told to on stdin, for bench_cpu")
    for name in ("layers", "heads", "channels", "vocab_size", "T", "B"):
        p3.add_argument(name, type=positive)
    p3.add_argument("wiring")
    p3.add_argument("--precision", choices=["bf16", "fp32"], required=True)
    p3.add_argument("--compile", action="store_true")
    p3.set_defaults(run=serve_steps)

    p2 = commands.add_parser("attention", help="time causal attention, by each back end")
    p2.add_argument("--head-size", type=positive, default=64)
    p2.add_argument("--heads", type=positive, default=12)
    p2.add_argument("--seq-lens", type=list_of(positive), default=[1024, 4096, 16384], metavar="T,...")
    p2.add_argument("--tokens", type=positive, default=32768, help="B * T")
    p2.set_defaults(run=attention)
    for timed in (p, p2):
        timed.add_argument("--device", choices=["cuda", "cpu"], help="a GPU if there is one")
        timed.add_argument("--json", metavar="FILE")
        timed.add_argument("--ours", metavar="FILE", help="what bench_gpu --json wrote on this GPU")
    return parser.parse_args()


if __name__ == "__main__":
    arguments = parse_arguments()
    try:
        sys.exit(arguments.run(arguments))
    except (UserError, ValueError) as e:
        sys.exit(f"error: {e}")
