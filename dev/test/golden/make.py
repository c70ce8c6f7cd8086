#!/usr/bin/env python3
"""Makes golden cases: what a model with a wiring computes in float64, by automatic differentiation, in the files that
README.md beside this program describes. It shares nothing with the trainer: K/V of several layers are concatenated,
masks are explicit, every layer projects all that it may, and nothing is fused or left out. Read `Wiring` beside the
README's table of terms.

    dev/test/golden/make.py FOLDER --wiring 'gqa(2) window(8,SL)'   # one case; --help lists the shapes
    dev/test/golden/make.py --all FOLDER                            # a case for every term and some combinations
    dev/test/golden/make.py --check dev/test/golden/*/              # computes cases again and compares all numbers

A new term is a method of `Wiring`, a line in ALL, its tensors in `tensors_of`, and its formula where `Model` uses it.

For development only: it needs PyTorch and NumPy. The trainer's tests do not need it, for they read what is committed.
"""
import argparse
import json
import math
import random
import re
import sys
import time
from pathlib import Path

try:
    import numpy as np
    import torch
    import torch.nn.functional as F
except ImportError as e:
    sys.exit(f"error: make.py needs PyTorch and NumPy: {e}")

SETTINGS = {"learning_rate": 1e-4, "weight_decay": 0.1, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "grad_clip": 1.0}
# What float32, which errs by 2e-7, has to tell apart.
LEAST_SCORE_GAP = 1e-6    # between the scores of the last key that topk keeps and the first that it drops
LEAST_HALTING_GAP = 2e-4  # between the sum of a token's halting probabilities, after any cycle, and 1 - eps
LEAST_HASH_GAP = 3e-5     # between the two largest hash values of a key of lsh, whose norm is 1


def error(what):
    sys.exit(f"error: {what}")


class Wiring:
    """A wiring's text, applied term by term from left to right to plain GPT-2. L layers, h heads, counted from 0."""

    def __init__(self, text, L, h):
        self.L, self.h = L, h
        self.sources = [[[(l, l)] for _ in range(h)] for l in range(L)]  # [l][i]: whose k and whose v head i reads
        self.masks = [[[] for _ in range(h)] for _ in range(L)]     # [l][i]: f(t, j), all true where t may see j <= t
        self.kv_heads = h                                           # of each layer
        self.top = None                                             # keys that each query keeps
        self.documents = False                                      # whether queries see only their own document
        self.map_layer = list(range(L))                             # [l]: the layer whose attention map layer l uses
        self.mix = None                                             # share of the map below: a number, or "gate"
        self.learned = True                                         # positions; with rope and relative there is no wpe
        self.rope_base = None                                       # if set, q and k are rotated
        self.relative = False                                       # whether scores have a term of the distance
        self.memory = 0                                             # positions before a segment that its queries see
        self.cycle = L                                              # stored layers; layer l has l % cycle's weights
        self.steps = False                                          # whether there is wse, a row for each cycle
        self.halting = None                                         # the eps of act
        self.ponder_cost = 0                                        # weight of the mean of N + R in the objective
        self.rmsnorm = False                                        # whether norms take no mean and have no bias
        self.activation = lambda x: F.gelu(x, approximate="tanh")   # of MLPs
        self.gated, self.hidden = 1, lambda C: 4 * C                # of MLPs: products of each hidden unit; the units
        self.qknorm = False
        self.alibi = False
        self.sinks = False
        self.vres = False
        self.route = 0                                              # how probably a training layer reads a lower one's
        self.router = False
        self.depth = False
        self.head = "wte.weight"
        self.cap = lambda logits: logits
        self.dense = False
        self.gru = False                                            # whether sublayers join the stream in gates
        self.reversible = False                                     # whether there are two residual streams
        self.hashes = None                                          # the (buckets, rounds) of lsh
        for name, arguments in re.findall(r"(\w+)(?:\(([^)]*)\))?", text):
            term = getattr(self, "term_" + name, None) or error(f"--wiring {text!r}: no term {name}")
            try:
                term(*[a.strip() for a in arguments.split(",")] if arguments else [])
            except (KeyError, TypeError, ValueError) as e:
                error(f"--wiring {text!r}: {name}({arguments}): {e}")

    def everywhere(self):
        return [(l, i) for l in range(self.L) for i in range(self.h)]

    # ---- whose K/V -----------------------------------------------------------------------------------------------

    def term_plain(self):
        """GPT-2."""

    def at_distance(self, n, k):
        """(l, i) of layers l >= n and of the last k heads, or of heads a to b - 1 where k is a:b."""
        a, b = map(int, k.split(":")) if ":" in k else (self.h - int(k), self.h)
        return [(l, i) for l, i in self.everywhere() if l >= int(n) and a <= i < b]

    def move(self, l, i, source, part):
        """Head i of layer l reads the keys and the values of layer `source`, or those that `part` names alone."""
        if part not in ("k", "v", "kv"):
            raise ValueError("keys are k, values v")
        self.sources[l][i] = sorted({(source if "k" in part else k, source if "v" in part else v)
                                     for k, v in self.sources[l][i]})

    def term_sla(self, n, k, part="kv"):
        """For l >= n the last k heads read the K/V of layer l - n, same head index."""
        for l, i in self.at_distance(n, k):
            self.move(l, i, l - int(n), part)

    def term_also(self, n, k):
        """The K/V of layer l - n beside what the head reads already: one softmax over the keys of all its sources."""
        for l, i in self.at_distance(n, k):
            self.sources[l][i] = sorted({*self.sources[l][i], (l - int(n), l - int(n))})

    def term_share(self, f, part="kv"):
        """All heads read the K/V of the first layer of their group of f."""
        for l, i in self.everywhere():
            self.move(l, i, l - l % int(f), part)

    def term_layers(self, names):
        """All heads of layer l read the K/V of the named layer, which is l or below."""
        named = [int(name) for name in names.split("_")]
        if len(named) != self.L or any(source > l for l, source in enumerate(named)):
            raise ValueError(f"each of {self.L} layers needs a layer at or below it")
        for l, i in self.everywhere():
            self.sources[l][i] = [(named[l], named[l])]

    def term_route(self, p):
        """In an update a layer reads, with probability p, the K/V of a lower layer where it would read its own."""
        self.route = float(p)

    def drawn_sources(self, seed, update):
        """The sources in an update of training: a number of 53 bits, of stream 8, says for each layer whether, and
        which lower one takes its place."""
        layer = np.arange(self.L, dtype=np.uint64)
        words = philox([layer, *np.zeros((3, self.L), np.uint64) + np.array([[0], [update], [8]], np.uint64)],
                       np.array([seed & 2 ** 32 - 1, seed >> 32], np.uint64), 10)
        uniform = (words[0] * 2.0 ** 21 + (words[1] >> np.uint64(11))) * 2.0 ** -53
        drawn = [int(u / self.route * l) if u < self.route and l > 0 else l for l, u in enumerate(uniform)]
        return [[sorted({tuple(drawn[l] if x == l else x for x in kv) for kv in sources}) for sources in heads]
                for l, heads in enumerate(self.sources)]

    def term_gqa(self, k):
        """k K/V heads per layer; query head i reads K/V head i * k / h."""
        self.kv_heads = int(k)
        if self.h % self.kv_heads:
            raise ValueError(f"{k} K/V heads do not divide {self.h} heads")

    # ---- through which mask ----------------------------------------------------------------------------------------

    def term_window(self, w, pattern="S"):
        """Keys t - w < j <= t, in the layers where the pattern, repeated over the layers, says S."""
        w = int(w)
        for l, i in self.everywhere():
            if pattern[l % len(pattern)] == "S":
                self.masks[l][i].append(lambda t, j: j > t - w)

    def sparse(self, how, a1, a2):
        """heads: the first ceil(h/2) heads A1, the others A2; layers: even A1, odd A2; union: A1 or A2."""
        for l, i in self.everywhere():
            self.masks[l][i].append({"heads": a1 if i < (self.h + 1) // 2 else a2,
                                     "layers": a1 if l % 2 == 0 else a2,
                                     "union": lambda t, j: a1(t, j) | a2(t, j)}[how])

    def term_strided(self, s, how="heads"):
        """A1: t - s <= j <= t; A2: (t - j) % s == 0."""
        s = int(s)
        self.sparse(how, lambda t, j: j >= t - s, lambda t, j: (t - j) % s == 0)

    def term_fixed(self, s, c, how="heads"):
        """A1: j / s == t / s in whole numbers; A2: j % s >= s - c."""
        s, c = int(s), int(c)
        self.sparse(how, lambda t, j: j // s == t // s, lambda t, j: j % s >= s - c)

    def term_topk(self, k):
        """Of the keys that a query may see, the k with the highest scores."""
        self.top = int(k)

    def term_sinks(self):
        """Each head's softmax has one more score, of the layer, whose probability goes to no value."""
        self.sinks = True

    def term_documents(self):
        """Keys of the query's own document, which the last `eos_token_id` up to the query begins."""
        self.documents = True

    def term_lsh(self, b, r):
        """k_j = q_j / |q_j|. A query sees earlier positions that are in its bucket, of b, in any of r rounds; itself if
        there are none."""
        self.hashes = int(b), int(r)
        if self.hashes[0] % 2:
            raise ValueError(f"{b} buckets are no pairs")

    # ---- by whose attention map ------------------------------------------------------------------------------------

    def term_reuse(self, g):
        """All layers of a group of g use the attention map of its first layer on their own v."""
        self.map_layer = [l - l % int(g) for l in range(self.L)]

    def term_blend(self, a):
        """P_l = a P_(l-1) + (1 - a) S_l, with P_0 = S_0 and S_l the layer's own map."""
        self.mix = float(a)

    def term_gate(self):
        """P_l as of blend with a = sigmoid(x_t . w + b) for each query, x the layer's LayerNorm'd input."""
        self.mix = "gate"

    # ---- at which position -----------------------------------------------------------------------------------------

    def term_rope(self, b="10000"):
        """No wpe; at position p the pair (x_i, x_(i+hs/2)) of each head's q and k is rotated by p * b^(-2i/hs)."""
        self.learned, self.rope_base = False, float(b)

    def term_relative(self):
        """No wpe; the query at t and the key at j have the score ((q_t + u) . k_j + (q_t + v) . r_(t-j)) / sqrt(hs)."""
        self.learned, self.relative = False, True

    def term_alibi(self):
        """No wpe; the score of the query at t and the key at j gets -m (t - j), m of the head."""
        self.learned, self.alibi = False, True

    def slope(self, i):
        """m of head i, by the authors' rule: the geometric sequence of n heads, n a power of two; heads beyond n have
        every second slope of 2n heads."""
        def of_power(n):
            start = 2 ** (-(2 ** -(math.log2(n) - 3)))
            return [start * start ** k for k in range(n)]
        n = 2 ** math.floor(math.log2(self.h))
        return (of_power(n) + of_power(2 * n)[0::2][:self.h - n])[i]

    def term_memory(self, positions):
        self.memory = int(positions)

    # ---- which layers share their parameters -------------------------------------------------------------------------

    def term_universal(self, k):
        """Layer l has the parameters of layer l % k; before each cycle of k layers its row of wse is added, and wpe."""
        self.cycle, self.steps = int(k), True
        if self.L % self.cycle:
            raise ValueError(f"{k} does not divide {self.L} layers")

    def term_act(self, eps, cost="0.01"):
        """The last norm gets the mean of a token's states after its first N cycles, weighed by their halting
        probabilities, and the last by R, what is left of 1; N is the first cycle whose sum of them is 1 - eps or more.
        cost * (N + R) is minimised too."""
        self.halting, self.ponder_cost = float(eps), float(cost)

    # ---- norms -------------------------------------------------------------------------------------------------------

    def term_rmsnorm(self):
        """x / sqrt(mean(x^2) + eps) * weight."""
        self.rmsnorm = True

    def term_qknorm(self):
        """q and k of each head are divided by sqrt(mean(x^2) + 1e-6)."""
        self.qknorm = True

    def term_vres(self):
        """From layer 1 on v is a v + b v_0, v_0 what layer 0 projected."""
        self.vres = True

    def term_router(self):
        """From layer 1 on head g of k and v is the sum over layers j and heads i of R[g, j, i] times that of layer j,
        head i, normed and rotated."""
        self.router = True

    def term_depth(self):
        """From layer 1 on v is the sum over layers j of softmax_j(q . k_j / sqrt(hs)) v_j, all of one head and token, q
        and k normed and rotated."""
        self.depth = True

    # ---- MLPs and the output head ------------------------------------------------------------------------------------

    def term_relu2(self):
        """relu(x)^2 in place of GELU."""
        self.activation = lambda x: x.relu() ** 2

    def term_silu(self):
        """x sigmoid(x) in place of GELU."""
        self.activation = F.silu

    def term_swiglu(self, units=None):
        """silu(x W_g) * (x W_u), of 8/3 of the channels, up to a multiple of 64, hidden units by default."""
        self.gated, self.hidden = 2, lambda C: int(units) if units else -(-8 * C // 192) * 64
        self.activation = lambda x: F.silu(x.chunk(2, dim=2)[0]) * x.chunk(2, dim=2)[1]

    def term_untied(self):
        """The output head has a weight of its own."""
        self.head = "lm_head.weight"

    def term_softcap(self, c):
        """c tanh(logits / c)."""
        c = float(c)
        self.cap = lambda logits: c * torch.tanh(logits / c)

    # ---- how a sublayer joins the residual stream --------------------------------------------------------------------

    def term_dense(self):
        """The input of a layer, or of ln_f, is a weighted sum of the embeddings and the outputs of all layers below."""
        self.dense = True

    def term_gru(self):
        """GTrXL's gate in place of x + y."""
        self.gru = True

    def term_reversible(self):
        """Two streams: x1 += attention(ln_1(x2)), x2 += mlp(ln_2(x1)); the last norm gets their mean."""
        self.reversible = True


ALL = {  # name: (wiring, options)
    "plain": ("plain", {}),
    "plain_no_bias": ("plain", {"bias": False}),
    "sla": ("sla(3,3)", {}),
    "sla_ranges": ("sla(1,0:2) sla(2,2:4)", {}),
    "also": ("also(1,2) also(2,1)", {}),
    "share": ("share(3)", {}),
    "layers": ("layers(0_0_2_1)", {}),
    "values": ("sla(2,2,v)", {}),
    "keys": ("sla(1,0:3,k) share(2,v)", {"bias": False}),
    "keys_and_values": ("qknorm sla(1,2,v) share(3,k) gqa(2) window(9,SL) rope", {"accumulate": 2}),
    "values_of_memory": ("relative memory(20) also(1,0:2) sla(2,2,v)", {}),
    "gqa": ("gqa(2)", {}),
    "multi_query": ("gqa(1)", {}),
    "window": ("window(5)", {}),
    "window_pattern": ("window(7,SSL)", {}),
    "strided": ("strided(6)", {"heads": 3, "channels": 24}),
    "strided_layers": ("strided(5,layers)", {}),
    "strided_union": ("strided(7,union)", {}),
    "fixed": ("fixed(6,2)", {"heads": 3, "channels": 24}),
    "fixed_layers": ("fixed(5,1,layers)", {}),
    "fixed_union": ("fixed(7,3,union)", {}),
    "strided_and_fixed": ("strided(4) fixed(8,1)", {}),
    "unions_and_window": ("fixed(7,3,union) window(15) strided(4,union)", {}),
    "topk": ("topk(5)", {}),
    "reuse": ("reuse(3)", {}),
    "blend": ("blend(0.3)", {}),
    "gate": ("gate", {}),
    "gate_no_bias": ("gate", {"bias": False, "accumulate": 2}),
    "rope": ("rope", {}),
    "rope_base": ("rope(100) gqa(2) also(2,2)", {}),
    "sources_of_all_kinds": ("share(2) sla(3,1) also(1,2) gqa(2) window(9,SL)", {"accumulate": 2}),
    "highest_of_several_sources": ("also(1,3) topk(6) window(11)", {}),
    "reused_sparse_maps": ("reuse(2) fixed(7,2) gqa(2) topk(3)", {}),
    "relative": ("relative", {}),
    "relative_to_sources": ("relative sla(2,2) also(1,3) gqa(2) window(9,SL)", {"bias": False}),
    "memory": ("memory(20) rope", {}),
    "memory_of_sources": ("memory(7) rope(100) also(1,2) gqa(2) window(11)", {"accumulate": 2}),
    "relative_to_memory": ("memory(20) relative", {}),
    "relative_to_memory_of_sources": ("relative memory(50) sla(2,3) also(1,2) gqa(2) window(60)", {"accumulate": 2}),
    "universal": ("universal(1)", {}),
    "universal_sources": ("universal(2) sla(2,2) also(1,3) gqa(2) window(9,SSL)", {"layers": 6, "bias": False}),
    "universal_share": ("share(2) universal(2) rope gqa(2)", {"accumulate": 2}),
    "universal_relative": ("relative universal(3) layers(0_1_0_2_4_3)", {"layers": 6}),
    "gru": ("gru", {}),
    "gru_no_bias": ("gru gqa(2) sla(1,2) topk(5)", {"bias": False, "accumulate": 2}),
    "gru_of_memory": ("gru memory(20) relative", {}),
    "gru_universal": ("gru universal(2) rope", {}),
    "act": ("universal(1) act(0.1,0.05)", {}),
    "act_cycles_of_two": ("universal(2) act(0.3) rope sla(2,2) window(9,SL)", {"layers": 8, "accumulate": 2}),
    "act_no_bias": ("universal(1) act(0.01,1) relative gru", {"layers": 3, "bias": False}),
    "lsh": ("lsh(4,2)", {}),
    "lsh_no_bias": ("lsh(2,3)", {"bias": False, "accumulate": 2}),
    "lsh_gru": ("lsh(16,1) gru", {}),
    "reversible": ("reversible", {}),
    "reversible_sources": ("reversible sla(2,2) also(1,1) gqa(2) window(9,SL) rope", {"bias": False}),
    "reversible_sparse": ("reversible strided(5,union) fixed(7,3,layers)", {"accumulate": 2}),
    "reversible_lsh": ("reversible lsh(8,2)", {}),
    "gated_masked_maps": ("gqa(2) gate strided(5,union)", {}),
    "documents": ("documents", {}),
    "documents_of_sources": ("also(1,2) documents sla(2,1) gqa(2) window(9,SL) rope", {"accumulate": 2}),
    "documents_sparse": ("documents strided(5,union) fixed(7,3,layers) topk(4)", {}),
    "documents_relative": ("relative documents also(1,1) gru", {"bias": False}),
    "documents_maps": ("gate documents fixed(8,2)", {}),
    "rmsnorm": ("rmsnorm", {}),
    "qknorm": ("qknorm", {}),
    "qknorm_of_memory": ("qknorm memory(20) rope sla(1,2) gqa(2)", {"accumulate": 2}),
    "vres": ("vres", {}),
    "route": ("route(0.6) sla(2,2)", {}),
    "route_of_memory": ("route(0.6) memory(20) rope gqa(2)", {"accumulate": 2}),
    "router": ("router gqa(2)", {}),
    "router_of_normed_keys": ("router qknorm rope sla(2,2) window(9,SL)", {"accumulate": 2}),
    "depth": ("depth rope", {}),
    "depth_of_normed_keys": ("depth qknorm sla(2,2) window(9,SL)", {"accumulate": 2}),
    "vres_of_sources": ("vres rope gqa(2) sla(2,2) also(1,1)", {"accumulate": 2}),
    "dense": ("dense", {}),
    "dense_of_sources": ("dense rope gqa(2) sla(2,2) also(1,1)", {"bias": False, "accumulate": 2}),
    "alibi": ("alibi sla(2,2)", {"heads": 6, "channels": 48}),
    "alibi_of_masks": ("alibi strided(5,union) also(1,2) gqa(2) topk(6)", {"accumulate": 2}),
    "sinks": ("sinks window(8) sla(2,2)", {}),
    "sinks_of_distances": ("sinks relative memory(20) also(1,2)", {"bias": False}),
    "alibi_sinks": ("alibi sinks documents gqa(2) rmsnorm fixed(7,2)", {"accumulate": 2}),
    "relu2": ("relu2", {}),
    "silu": ("silu", {}),
    "swiglu": ("swiglu", {}),
    "softcap": ("softcap(0.5)", {}),
    "untied": ("untied", {}),
    "all_parts": ("rmsnorm qknorm rope swiglu untied softcap(3) gqa(2) sla(2,2)", {"bias": False, "accumulate": 2}),
    "rmsnorm_of_memory": ("rmsnorm memory(20) rope sla(1,2) gru", {"bias": False, "accumulate": 2}),
}


# ---- the model -------------------------------------------------------------------------------------------------------

def widths_of(config, wiring):
    """How many columns of c_attn q, k and v have; with lsh there is no k."""
    C = config["n_embd"]
    kv_width = C // config["n_head"] * wiring.kv_heads
    return [C, 0 if wiring.hashes else kv_width, kv_width]


def tensors_of(config, wiring):
    """[(name, shape, mean, standard deviation)] at the start. Values are larger than GPT-2's: a wrong index shows."""
    C, V, P = (config[key] for key in ("n_embd", "vocab_size", "n_positions"))
    tensors = [("wte.weight", (V, C), 0, 0.08)]
    if wiring.learned:
        tensors.append(("wpe.weight", (P, C), 0, 0.08))
    if wiring.steps:
        tensors.append(("wse.weight", (wiring.L // wiring.cycle, C), 0, 0.08))

    def norm(name):
        tensors.append((name + ".weight", (C,), 1, 0.08))
        if not wiring.rmsnorm:
            tensors.append((name + ".bias", (C,), 0, 0.05))

    def linear(name, inputs, outputs, std):
        tensors.extend([(name + ".weight", (inputs, outputs), 0, std), (name + ".bias", (outputs,), 0, 0.05)])

    def gate(name):
        if wiring.gru:
            tensors.extend([(f"{name}.{of}.weight", (C, n * C), 0, 0.15) for of, n in (("y", 3), ("x", 2), ("rx", 1))])
            tensors.append((name + ".bias", (C,), 0.5, 0.3))

    if wiring.halting is not None:
        linear("halt", C, 1, 0.3)

    for l in range(wiring.cycle):
        norm(f"h.{l}.ln_1")
        linear(f"h.{l}.attn.c_attn", C, sum(widths_of(config, wiring)), 0.15)
        if wiring.hashes:
            buckets, rounds = wiring.hashes
            rotations = (config["n_head"], rounds, C // config["n_head"], buckets // 2)
            tensors.append((f"h.{l}.attn.rotations", rotations, 0, 1))
        if wiring.mix == "gate" and l > 0:
            linear(f"h.{l}.attn.map_gate", C, 1, 0.3)
        if wiring.vres and l > 0:
            tensors.append((f"h.{l}.attn.value_mix", (2,), 0.7, 0.3))
        if wiring.router and l > 0:
            tensors.append((f"h.{l}.attn.router", (wiring.kv_heads**2 * (l + 1),), 0, 0.4))
        if wiring.sinks:
            tensors.append((f"h.{l}.attn.sinks", (config["n_head"],), 0, 1.5))
        if wiring.relative:
            tensors.append((f"h.{l}.attn.relative.weight", (C, C), 0, 0.15))
            of_heads = (config["n_head"], C // config["n_head"])
            tensors.extend([(f"h.{l}.attn.relative.u", of_heads, 0, 0.5), (f"h.{l}.attn.relative.v", of_heads, 0, 0.5)])
        linear(f"h.{l}.attn.c_proj", C, C, 0.08)
        gate(f"h.{l}.gru_1")
        norm(f"h.{l}.ln_2")
        linear(f"h.{l}.mlp.c_fc", C, wiring.gated * wiring.hidden(C), 0.08)
        linear(f"h.{l}.mlp.c_proj", wiring.hidden(C), C, 0.08)
        gate(f"h.{l}.gru_2")
        if wiring.dense:
            tensors.append((f"h.{l}.dense", (l + 2,), 0.4, 0.3))
    norm("ln_f")
    if wiring.head not in dict(t[:2] for t in tensors):
        tensors.append((wiring.head, (V, C), 0, 0.08))
    return tensors


def is_zero(config, name):
    """Whether the tensor is the bias of a linear layer or norm in a model without them; gru has its bias in any."""
    return name.endswith(".bias") and ".gru_" not in name and not config["bias"]


def is_trained(config, name):
    """Whether the tensor has a gradient; the rotations of lsh are constants."""
    return not is_zero(config, name) and not name.endswith(".rotations")


def philox(counter, key, rounds):
    """Philox4x32 (Salmon et al. 2011): four words of a counter and two of a key, uint64 arrays of 32-bit numbers, make
    four such words."""
    low = np.uint64(2 ** 32 - 1)
    for _ in range(rounds):
        a, b = (np.uint64(factor) * x for factor, x in zip((0xD2511F53, 0xCD9E8D57), counter[::2]))
        counter = [b >> np.uint64(32) ^ counter[1] ^ key[0], b & low, a >> np.uint64(32) ^ counter[3] ^ key[1], a & low]
        key = [k + np.uint64(add) & low for k, add in zip(key, (0x9E3779B9, 0xBB67AE85))]
    return counter


class Dropout:
    """What a training pass drops. An element has 16 of the 128 bits that seven rounds of Philox make of its place; the
    key is what ten rounds make of the seed and the number of its sequence in the update."""

    def __init__(self, p, seed, update, sequences):
        words = lambda values: [np.array(v, np.uint64) for v in values]
        halves = lambda x: (x & 2 ** 32 - 1, x >> 32)
        keys = [philox(words([*halves(s), update, 7]), words(halves(seed)), 10) for s in sequences]
        self.p, self.key = p, [np.array([key[i] for key in keys])[:, None, None] for i in (1, 0)]

    def at(self, site, layer, part, row, column, index):
        """What elements are multiplied by (B, rows, columns), 0 or 1 / (1 - p): of a tensor `part`, each one's group of
        eight in a row and a column, and its place among these."""
        place = np.broadcast_arrays(*(np.asarray(x, np.uint64) for x in (column, row, part, layer + site * 2 ** 24)))
        numbers = np.choose(index // 2, philox(place, self.key, 7)) >> (index % 2 * 16).astype(np.uint64)
        kept = (numbers & np.uint64(65535)) >= round(self.p * 65536)
        return torch.tensor(kept / (1 - self.p))

    def channels(self, site, layer, x):
        """x (B, T, C) after dropout: eight neighbouring channels are a group."""
        row, c = np.ogrid[:x.shape[1], :x.shape[2]]
        return x * self.at(site, layer, 0, row, c // 8, c % 8)

    def probabilities(self, layer, head, weights, T):
        """weights (B, queries, sources * T) after dropout. Queries q, q + 8 and keys k, k + 8, k + 16, k + 24 of a
        source are a group."""
        q, key = np.ogrid[:weights.shape[1], :weights.shape[2]]
        k = key % T
        return weights * self.at(1, layer, key // T * 65536 + head, q // 16 * 8 + q % 8, k // 32 * 8 + k % 8,
                                 q // 8 % 2 * 4 + k // 8 % 4)


EMBEDDINGS, ATTENTION_OUTPUT, MLP_OUTPUT = 0, 2, 3  # where channels are dropped; 1: attention's probabilities


class Model:
    """GPT-2 with a wiring. w: {name: float64 tensor}; those of two or more dimensions are (in, out)."""

    def __init__(self, config, wiring, w):
        self.config, self.wiring, self.w = config, wiring, w
        self.least_gap = float("inf")  # of a choice of topk, act or lsh so far, as a share of what it has to be
        self.remembered = None         # of each layer: its input at the last positions (B, up to wiring.memory, C)
        self.penalty = 0               # what is minimised beside the mean of the last losses

    def losses(self, tokens, targets, dropout=None, sources=None):
        """(B, T) whole numbers, twice -> (B, T): the cross-entropy of each token. With memory the rows are the next
        segments of their streams. dropout: of a training pass, and with route its sources."""
        T = tokens.shape[1]
        self.sources = sources or self.wiring.sources
        self.dropout, drop = dropout, dropout.channels if dropout else lambda site, l, x: x
        self.document = (tokens == self.config.get("eos_token_id", -1)).cumsum(1)  # (B, T): which
        x1 = x2 = self.w["wte.weight"][tokens]  # the residual stream, or the two of reversible
        self.k, self.v, self.maps = [], [], []  # of the layers so far
        self.projected = []                     # of router and depth: (k, v) of each as it was projected
        states = []                             # (B, T, C) after each cycle
        before, self.remembered = self.remembered, []
        for l in range(self.config["n_layer"]):
            if l % self.wiring.cycle == 0:
                x1 = x2 = x2 + self.coordinates(l // self.wiring.cycle, T)
            if l == 0:
                x1 = x2 = drop(EMBEDDINGS, l, x2)
                outputs = [x2]
            extended = x2 if before is None else torch.cat([before[l], x2], dim=1)
            if self.wiring.memory > 0:
                self.remembered.append(extended[:, -self.wiring.memory:].detach())
            out = drop(ATTENTION_OUTPUT, l, self.attention(l, self.norm(self.of_layer(l, "ln_1"), extended), T))
            x1 = self.join(l, "gru_1", x1, out)
            joined = x2 if self.wiring.reversible else x1
            out = drop(MLP_OUTPUT, l, self.mlp(l, self.norm(self.of_layer(l, "ln_2"), x1)))
            x2 = self.join(l, "gru_2", joined, out)
            if self.wiring.dense:
                outputs.append(x2)
                x2 = torch.einsum("i,i...->...", self.w[self.of_layer(l, "dense")], torch.stack(outputs))
            if not self.wiring.reversible:
                x1 = x2
            if (l + 1) % self.wiring.cycle == 0:
                states.append(x2)
        x = (x1 + x2) / 2
        if self.wiring.halting is not None:
            x = self.halted(torch.stack(states))
        if self.wiring.memory == 0:
            self.remembered = None
        logits = self.wiring.cap(self.norm("ln_f", x) @ self.w[self.wiring.head].T)
        return F.cross_entropy(logits.transpose(1, 2), targets, reduction="none")

    def coordinates(self, cycle, T):
        """What the residual stream gets before a cycle: (T, C), (C) or 0."""
        step = self.w["wse.weight"][cycle] if self.wiring.steps else 0
        return step + self.w["wpe.weight"][:T] if self.wiring.learned else step

    def join(self, l, gate, x, y):
        """The residual stream x and the output y of a sublayer, (B, T, C) each -> the stream after it."""
        if not self.wiring.gru:
            return x + y
        weights = lambda of: self.w[self.of_layer(l, f"{gate}.{of}.weight")]
        y = y.relu()
        (y_r, y_z, y_g), (x_r, x_z) = (y @ weights("y")).chunk(3, dim=2), (x @ weights("x")).chunk(2, dim=2)
        r = torch.sigmoid(y_r + x_r)
        z = torch.sigmoid(y_z + x_z - self.w[self.of_layer(l, gate + ".bias")])
        return (1 - z) * x + z * torch.tanh(y_g + (r * x) @ weights("rx"))

    def halted(self, states):
        """The residual stream after each cycle (cycles, B, T, C) -> what the last norm gets (B, T, C): it is weighed
        by p_1, ..., p_(N-1) and R."""
        p = torch.sigmoid(self.linear("halt", states)).squeeze(3)
        sums, enough = p.detach().cumsum(0), 1 - self.wiring.halting
        gaps = (sums[:-1] - enough).abs()  # the last cycle is the last whatever its sum
        self.least_gap = min([self.least_gap, *(gaps / LEAST_HALTING_GAP).flatten().tolist()])
        before_last = (sums < enough)[:-1]  # falling: a token that has halted stays so
        p = torch.where(before_last, p[:-1], 0)
        remainder = 1 - p.sum(0)
        cycles = 1 + before_last.sum(0)
        self.penalty = self.wiring.ponder_cost * (cycles + remainder).mean()
        is_last = cycles - 1 == torch.arange(len(states))[:, None, None]
        weights = torch.cat([p, torch.zeros_like(p[:1])]) + is_last * remainder
        return (weights[..., None] * states).sum(0)

    def of_layer(self, l, name):
        """The name of that parameter of layer l."""
        return f"h.{l % self.wiring.cycle}.{name}"

    def norm(self, name, x):
        if self.wiring.rmsnorm:
            return x / torch.sqrt((x**2).mean(-1, keepdim=True) + self.config["layer_norm_epsilon"]) \
                * self.w[name + ".weight"]
        return F.layer_norm(x, x.shape[-1:], self.w[name + ".weight"], self.w[name + ".bias"],
                            self.config["layer_norm_epsilon"])

    def linear(self, name, x):
        return x @ self.w[name + ".weight"] + self.w[name + ".bias"]

    def mlp(self, l, x):
        hidden = self.wiring.activation(self.linear(self.of_layer(l, "mlp.c_fc"), x))
        return self.linear(self.of_layer(l, "mlp.c_proj"), hidden)

    def attention(self, l, x, queries):
        """x (B, T, C), LayerNorm'd; the last `queries` positions have queries -> (B, queries, C). The layer's
        K/V and attention maps are appended to the lists of all layers so far."""
        wiring, (B, T, C), h = self.wiring, x.shape, self.config["n_head"]
        hs = C // h
        q, k, v = self.linear(self.of_layer(l, "attn.c_attn"), x).split(widths_of(self.config, wiring), dim=2)
        q, k, v = (y.view(B, T, -1, hs).transpose(1, 2) for y in (q, k, v))  # (B, heads, T, hs)
        if wiring.qknorm:
            q, k = (y / torch.sqrt((y**2).mean(-1, keepdim=True) + 1e-6) for y in (q, k))
        if wiring.rope_base is not None:
            q, k = self.rotate(q), self.rotate(k)
        if wiring.hashes:
            k = q / q.norm(dim=3, keepdim=True)
        if wiring.vres and l > 0:
            a, b = self.w[self.of_layer(l, "attn.value_mix")]
            v = a * v + b * self.v[0]
        if wiring.router or wiring.depth:
            self.projected.append((k, v))
        if wiring.router and l > 0:
            heads = k.shape[1]
            weights = self.w[self.of_layer(l, "attn.router")].view(heads, l + 1, heads)
            k, v = (torch.einsum("gji,jbitc->bgtc", weights, torch.stack(part)) for part in zip(*self.projected))
        if wiring.depth and l > 0:
            keys, values = (torch.stack(part) for part in zip(*self.projected))
            weights = torch.softmax((q * keys).sum(-1, keepdim=True) / hs**0.5, dim=0)
            v = (weights * values).sum(0)
        self.k.append(k)
        self.v.append(v)
        own = [self.own_map(l, i, q[:, i, -queries:]) for i in range(h)]
        self.maps.append(self.map_of(l, x, own))
        drop = self.dropout.probabilities if self.dropout else lambda l, i, weights, T: weights
        out = [drop(l, i, self.maps[l][i], T) @ self.concatenate(1, l, i) for i in range(h)]
        return self.linear(self.of_layer(l, "attn.c_proj"), torch.cat(out, dim=2))

    def rotate(self, x):
        """x (B, heads, T, hs): the pair (x_i, x_(i+hs/2)) is turned by position * base^(-2i/hs)."""
        T, half = x.shape[2], x.shape[3] // 2
        angle = torch.outer(torch.arange(T).double(), self.wiring.rope_base ** (-torch.arange(half).double() / half))
        a, b = x[..., :half], x[..., half:]
        return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], dim=3)

    def concatenate(self, part, l, i):
        """Query head i of layer l: the k (part 0) or v (1) of all its sources in a row (B, sources * T, hs)."""
        kv = (self.k, self.v)[part]
        kv_head = i * self.wiring.kv_heads // self.config["n_head"]
        return torch.cat([kv[source[part]][:, kv_head] for source in self.sources[l][i]], dim=1)

    def own_map(self, l, i, q):
        """q (B, queries, hs) of head i of layer l -> its attention map (B, queries, sources * T), zeros where no key is
        visible."""
        T, (queries, hs) = self.k[l].shape[2], q.shape[1:]
        t, j = torch.arange(T - queries, T)[:, None], torch.arange(T)[None, :]
        visible = j <= t
        for mask in self.wiring.masks[l][i]:
            visible = visible & mask(t, j)
        if self.wiring.documents:
            visible = visible & (self.document[:, :, None] == self.document[:, None, :])
        if self.wiring.hashes:
            visible = self.meets(l, i)
        k, sources = self.concatenate(0, l, i).transpose(1, 2), len(self.sources[l][i])
        if self.wiring.relative:
            u, v = (self.w[self.of_layer(l, f"attn.relative.{name}")][i] for name in "uv")
            scores = (q + u) @ k + self.of_distances(q + v, t - j, self.distances(l, i, T)).repeat(1, 1, sources)
        else:
            scores = q @ k
        if self.wiring.alibi:
            scores = scores - (self.wiring.slope(i) * hs ** 0.5 * (t - j).double()).repeat(1, sources)
        visible = torch.cat([visible] * sources, dim=-1)
        scores = (scores / hs ** 0.5).masked_fill(~visible, -float("inf"))
        if self.wiring.top is not None:
            scores = self.keep_highest(scores)
        if self.wiring.sinks:
            sink = self.w[self.of_layer(l, "attn.sinks")][i].expand(*scores.shape[:2], 1)
            return torch.cat([scores, sink], dim=2).softmax(dim=2)[..., :-1]
        highest = scores.detach().amax(2, keepdim=True)
        weights = (scores - highest.masked_fill(highest.isinf(), 0)).exp()
        total = weights.sum(2, keepdim=True)
        return weights / total.masked_fill(total == 0, 1)

    def meets(self, l, i):
        """Head i of layer l: whether the query at t sees the key at j (B, t, j). In each round a position's bucket is
        the argmax of [k R, -k R], which k has in common with q."""
        rotated = self.k[l].detach()[:, i, None] @ self.w[self.of_layer(l, "attn.rotations")][i]  # (B, rounds, T, b/2)
        values = torch.cat([rotated, -rotated], dim=3)
        largest, second = values.topk(2, dim=3).values.unbind(dim=3)
        self.least_gap = min(self.least_gap, (largest - second).min().item() / LEAST_HASH_GAP)
        bucket = values.argmax(dim=3)
        earlier = (bucket[:, :, :, None] == bucket[:, :, None, :]).any(dim=1).tril(-1)
        alone = ~earlier.any(dim=2, keepdim=True)
        return earlier | alone & torch.eye(earlier.shape[1], dtype=torch.bool)

    def distances(self, l, i, T):
        """r_0 to r_(T-1) of head i of layer l (T, hs): r_d = s_d W, the head's columns; s_d, of as many channels as the
        model, are the sines of d * 10000^(-2i/C) and then the cosines."""
        C, hs = self.config["n_embd"], self.config["n_embd"] // self.config["n_head"]
        angle = torch.outer(torch.arange(T).double(), 10000 ** (-torch.arange(0, C, 2).double() / C))
        weight = self.w[self.of_layer(l, "attn.relative.weight")][:, i * hs:][:, :hs]
        return torch.cat([angle.sin(), angle.cos()], dim=1) @ weight

    def of_distances(self, q, distance, r):
        """q (B, queries, hs), distance (queries, T), r (T, hs) -> (B, queries, T): q[b, t] . r[distance[t, j]], with
        any number where the distance is negative: no query sees such a key."""
        return (q @ r.T).gather(2, distance.clamp(min=0).expand(len(q), -1, -1))

    def keep_highest(self, scores):
        """The highest scores of each query, of equal ones the first; -inf in place of the others."""
        top = self.wiring.top
        ordered, index = scores.detach().sort(dim=2, descending=True, stable=True)
        if top < ordered.shape[2]:
            gaps = ordered[..., top - 1] - ordered[..., top]  # inf or nan where fewer keys are visible
            self.least_gap = min([self.least_gap, *(gaps[gaps.isfinite()] / LEAST_SCORE_GAP).tolist()])
        dropped = torch.ones_like(scores, dtype=torch.bool).scatter(2, index[..., :top], False)
        return scores.masked_fill(dropped, -float("inf"))

    def map_of(self, l, x, own):
        """The attention maps of all heads of layer l, given its own."""
        if self.wiring.map_layer[l] != l:
            return self.maps[self.wiring.map_layer[l]]
        if self.wiring.mix is None or l == 0:
            return own
        if self.wiring.mix == "gate":
            a = torch.sigmoid(self.linear(self.of_layer(l, "attn.map_gate"), x))
        else:
            a = self.wiring.mix
        return [a * below + (1 - a) * mine for below, mine in zip(self.maps[l - 1], own)]


# ---- training --------------------------------------------------------------------------------------------------------

def micro_batch(tokens, s, B, T, segments=None):
    """Inputs and targets (B, T) of micro-batch s: row b has the T + 1 tokens from (s * B + b) * T on, or, where rows
    are streams of so many segments, from (b * segments + s) * T on."""
    first = lambda b: s * B + b if segments is None else b * segments + s
    rows = torch.stack([tokens[first(b) * T:][:T + 1] for b in range(B)])
    return rows[:, :-1], rows[:, 1:]


def compute(config, weights, tokens, run):
    """What a case's files hold of a model that trains: ({key of expected.json: numbers}, {name: gradient of step 1},
    the losses of micro-batch 0 (B, T)), and the model's least gap. weights: {name: float32 array}; run: the other keys
    of expected.json. Gradients and token losses are float32."""
    run = {"dropout": 0, **run}
    B, T, accumulate, steps = (run[key] for key in ("batch_size", "seq_len", "grad_accum_steps", "steps"))
    wiring = Wiring(wiring_text(config), config["n_layer"], config["n_head"])
    w = {name: torch.tensor(value, dtype=torch.float64) for name, value in weights.items()}
    trained = {name: p.requires_grad_() for name, p in w.items() if is_trained(config, name)}
    model = Model(config, wiring, w)
    segments = steps * accumulate if wiring.memory > 0 else None
    losses_of = lambda s, *drawn: model.losses(*micro_batch(tokens, s, B, T, segments), *drawn)
    with torch.no_grad():
        val_loss = sum(losses_of(s).mean().item() for s in range(steps * accumulate)) / (steps * accumulate)

    model.remembered = None
    optimizer = torch.optim.AdamW(
        [{"params": [p for p in trained.values() if p.dim() >= 2], "weight_decay": run["weight_decay"]},
         {"params": [p for p in trained.values() if p.dim() < 2], "weight_decay": 0}],
        lr=run["learning_rate"], betas=(run["beta1"], run["beta2"]), eps=run["eps"])
    losses, norms, grads = [], [], {}
    for step in range(steps):
        optimizer.zero_grad()
        losses.append(0)
        sources = wiring.drawn_sources(run["seed"], step + 1) if wiring.route > 0 else None
        for s in range(accumulate):
            dropout = run["dropout"] and Dropout(run["dropout"], run["seed"], step + 1, range(s * B, (s + 1) * B))
            each = losses_of(step * accumulate + s, dropout, sources)
            if step == s == 0:
                token_losses = each.detach()
            mean = each.mean()
            ((mean + model.penalty) / accumulate).backward()
            losses[-1] += mean.item() / accumulate
        if step == 0:
            grads = {name: p.grad.float().numpy() for name, p in trained.items()}
        norms.append(torch.nn.utils.clip_grad_norm_(trained.values(), run["grad_clip"]).item())
        optimizer.step()
    numbers = {"val_loss": val_loss, "losses": losses, "grad_norms": norms}
    return numbers, grads, token_losses.float().numpy(), model.least_gap


# ---- the files -------------------------------------------------------------------------------------------------------

def wiring_text(config):
    if "wiring" in config:
        return config["wiring"]
    return f"sla({config['num_skip_layer']},{config['num_skip_head']})" if config["num_skip_head"] else "plain"


def save_tensors(path, arrays):
    header, end = {}, 0
    for name, array in arrays.items():
        header[name] = {"dtype": "F32", "shape": list(array.shape), "data_offsets": [end, end + 4 * array.size]}
        end += 4 * array.size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    data = b"".join(array.astype("<f4").tobytes() for array in arrays.values())
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def load_tensors(path):
    data = path.read_bytes()
    begin = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:begin])
    return {name: np.frombuffer(data[begin:][slice(*t["data_offsets"])], "<f4").reshape(t["shape"])
            for name, t in header.items() if name != "__metadata__"}


def save_tokens(path, tokens):
    header = np.zeros(256, "<i4")
    header[:3] = 20240520, 1, len(tokens)
    path.write_bytes(header.tobytes() + tokens.astype("<u2").tobytes())


def load_tokens(path):
    return torch.tensor(np.frombuffer(path.read_bytes()[1024:], "<u2").astype(np.int64))


def random_weights(config, wiring, generator):
    """{name: float32 array}; zeros are the biases of a model without them."""
    weights = {}
    for name, shape, mean, std in tensors_of(config, wiring):
        values = generator.normal(mean, std, shape)
        weights[name] = (np.zeros(shape) if is_zero(config, name) else values).astype(np.float32)
    return weights


# The options of a case beside its wiring and its seed.
DEFAULTS = {"layers": 4, "heads": 4, "channels": 32, "vocab": 97, "positions": 32, "batch": 2, "length": 24,
            "steps": 10, "accumulate": 1, "bias": True, "dropout": 0}


def make_case(folder, wiring_text, seed, **options):
    """Writes a case with this seed, or, where a choice of topk, act or lsh is too narrow for float32, with the next
    seed that will do. Options that are not given are as in DEFAULTS."""
    began = time.monotonic()
    o = argparse.Namespace(**{**DEFAULTS, **options}, wiring=wiring_text, seed=seed)
    wiring = Wiring(o.wiring, o.layers, o.heads)
    if o.channels % o.heads or o.length > o.positions:
        error(f"{o.heads} heads must divide {o.channels} channels, and {o.length} tokens fit {o.positions} positions")
    if wiring.rope_base and o.channels // o.heads % 2:
        error(f"{o.wiring}: it rotates pairs of channels; a head has {o.channels // o.heads}")
    if wiring.relative and o.channels % 2:
        error(f"{o.wiring}: half of the channels are sines, half cosines, but {o.channels} is odd")
    config = {"model_type": "gpt2", "n_layer": o.layers, "n_head": o.heads, "n_embd": o.channels,
              "n_positions": o.positions, "vocab_size": o.vocab, "layer_norm_epsilon": 1e-5,
              "activation_function": "gelu_new", "bias": o.bias, "wiring": o.wiring}
    if wiring.documents:
        config["eos_token_id"] = o.vocab - 1
    run = {"batch_size": o.batch, "seq_len": o.length, "grad_accum_steps": o.accumulate, "steps": o.steps, **SETTINGS}
    if o.dropout > 0:
        run.update(dropout=o.dropout)
    if o.dropout > 0 or wiring.route > 0:
        run.update(seed=o.seed)
    seed, gap = o.seed - 1, 0
    while gap < 1:
        seed += 1
        generator = np.random.default_rng(seed)
        weights = random_weights(config, wiring, generator)
        tokens = generator.integers(o.vocab, size=o.steps * o.accumulate * o.batch * o.length + 1)
        if wiring.documents:
            tokens[generator.random(len(tokens)) < 0.1] = config["eos_token_id"]
        expected, grads, token_losses, gap = compute(config, weights, torch.tensor(tokens), run)

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    save_tensors(folder / "model.safetensors", weights)
    save_tokens(folder / "tokens.bin", tokens)
    (folder / "expected.json").write_text(json.dumps({**run, **expected}, indent=1))
    save_tensors(folder / "grads.safetensors", grads)
    save_tensors(folder / "token_losses.safetensors", {"losses": token_losses})
    print(f"{folder}: {o.wiring}, seed {seed}, loss {expected['losses'][0]:.6f} -> {expected['losses'][-1]:.6f}, "
          f"{time.monotonic() - began:.1f} s", flush=True)


def relative_error(a, b):
    """The norm of a - b over b's; infinite if their shapes differ."""
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    if a.shape != b.shape:
        return float("inf")
    difference = np.linalg.norm(a - b)
    return difference / np.linalg.norm(b) if np.any(b) else difference


def check_case(folder):
    """Computes a case again: (the largest relative error of its float64 numbers, that of its float32 tensors)."""
    config, expected = (json.loads((folder / name).read_text()) for name in ("config.json", "expected.json"))
    weights = load_tensors(folder / "model.safetensors")
    tensors = tensors_of(config, Wiring(wiring_text(config), config["n_layer"], config["n_head"]))
    if {name: value.shape for name, value in weights.items()} != {name: shape for name, shape, *_ in tensors}:
        error(f"{folder}/model.safetensors: not the tensors that {wiring_text(config)} has")
    numbers, grads, token_losses, _ = compute(config, weights, load_tokens(folder / "tokens.bin"), expected)
    saved = load_tensors(folder / "grads.safetensors")
    if saved.keys() != grads.keys():
        error(f"{folder}/grads.safetensors: not the gradients of the model's tensors")
    doubles = [relative_error(value, expected[key]) for key, value in numbers.items()]
    floats = [relative_error(grads[name], saved[name]) for name in grads]
    floats.append(relative_error(token_losses, load_tensors(folder / "token_losses.safetensors")["losses"]))
    return max(doubles), max(floats)


def check(folders):
    """Exits with 1 if a case differs by more than rounding."""
    worst = np.zeros(2)
    for folder in folders:
        errors = check_case(folder)
        worst = np.maximum(worst, errors)
        print(f"{folder}: losses and norms {errors[0]:.1e}, gradients and token losses {errors[1]:.1e}", flush=True)
    ok = worst[0] < 1e-12 and worst[1] < 1e-7
    print(f"{len(folders)} cases, largest relative error: losses and norms (float64) {worst[0]:.1e}, gradients and "
          f"token losses (float32) {worst[1]:.1e}: {'they agree' if ok else 'they differ'}")
    sys.exit(0 if ok else 1)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("folder", nargs="+", type=Path, help="where the case goes; with --check, cases")
    p.add_argument("--wiring", default="plain")
    p.add_argument("--all", action="store_true", help="a case for every term, each in a folder in FOLDER")
    p.add_argument("--check", action="store_true", help="compute the cases again and compare")
    for name, default in DEFAULTS.items():
        if name not in ("bias", "dropout"):
            p.add_argument("--" + name, type=int, default=default, help=f"default {default}")
    p.add_argument("--no-bias", dest="bias", action="store_false")
    p.add_argument("--dropout", type=float, default=0, help="the share of elements that training drops")
    p.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10 ** 6), help="default: a random one")
    o = p.parse_args()
    torch.set_num_threads(1)
    if o.check:
        check(o.folder)
    if len(o.folder) > 1:
        error(f"{o.folder[1]}: one folder at a time is made")
    cases = ALL if o.all else {"": (o.wiring, {})}
    for number, (name, (wiring, options)) in enumerate(cases.items()):
        seed = o.seed + 100 * number  # leaves seeds to try between
        given = {name: getattr(o, name) for name in DEFAULTS}
        make_case(o.folder[0] / name, wiring, seed, **{**given, **options})


if __name__ == "__main__":
    try:
        main()
    except OSError as e:
        error(f"{e.filename}: {e.strerror}")
