"""GPT-2 with any wiring of its attention, in PyTorch: the wiring's text, and the model as modules whose parameters have
the names and the shapes of GPT-2's files. Every layer projects all of its q, k and v, also those that no head uses:
files hold zeros there.

Skip-layer attention is the paper's listing: heads attend to keys and values that another layer projected, concatenated
with the layer's own along the heads. Wirings with masks, several sources a head or other layers' attention maps are
written to be right, not fast: masks and maps are whole matrices. With a cache (transformers' Cache, or any with
update() and get_seq_length()) only new positions are computed.
"""
import math
import re

import torch
import torch.nn.functional as F
from torch import nn

# ----------------------------------------------------------------------------
# The wiring


# The number of arguments of each term, at least and at most.
TERMS = {"plain": (0, 0), "sla": (2, 3), "also": (2, 2), "share": (1, 2), "layers": (1, 1), "gqa": (1, 1),
         "window": (1, 2), "strided": (1, 2), "fixed": (2, 3), "topk": (1, 1), "sinks": (0, 0), "documents": (0, 0),
         "reuse": (1, 1), "blend": (1, 1), "gate": (0, 0), "rope": (0, 1), "relative": (0, 0), "alibi": (0, 0),
         "memory": (1, 1), "universal": (1, 1), "act": (1, 2), "rmsnorm": (0, 0), "qknorm": (0, 0), "route": (1, 1),
         "vres": (0, 0), "router": (0, 0), "depth": (0, 0), "relu2": (0, 0), "silu": (0, 0), "swiglu": (0, 1),
         "softcap": (1, 1), "untied": (0, 0), "dense": (0, 0), "gru": (0, 0), "lsh": (2, 2), "reversible": (0, 0)}
# Terms that a wiring has or has not: attributes of the same name.
FLAGS = ("sinks", "documents", "gate", "alibi", "rmsnorm", "qknorm", "vres", "router", "depth", "untied", "dense",
         "gru", "reversible")


def term_of(text, term):
    """(name, arguments) of one term."""
    match = re.fullmatch(r"(\w+)(?:\(([^()]*)\))?", term)
    arguments = [a.strip() for a in (match[2] or "").split(",")] if match and match[2] is not None else []
    if match is None or match[1] not in TERMS or not TERMS[match[1]][0] <= len(arguments) <= TERMS[match[1]][1]:
        raise ValueError(f"wiring {text!r}: {term!r} is no term; they are {', '.join(TERMS)}")
    return match[1], arguments


class Wiring:
    """What a text of terms says, of L layers and h heads; llmc/wiring/terms of gpt2-sla describes them. It is
    read without checks of what the trainer refuses. `segment`: the context length, which `memory` needs: a text is one
    sequence here, in which queries see no key from before their segment's memory."""

    def __init__(self, text, L, h, segment=None):
        self.text, self.num_layers, self.num_heads, self.num_kv_heads, self.segment = text, L, h, h, segment
        # Of each layer and head: pairs of the layer whose keys it attends to and the one whose values are theirs.
        self.sources = [[{(l, l)} for _ in range(h)] for l in range(L)]
        self.masks = []                                             # f(layer, whether a head of the first half, t, j)
        self.topk, self.blend, self.maps_in_group = None, None, 1
        self.learned, self.rope, self.relative = True, None, False  # positions: wpe; else the base of rope, or relative
        self.memory = None
        self.cycle = None  # of universal: the layers that are stored, which repeat until L layers have run
        self.halting, self.ponder_cost = None, 0.0  # of act: eps, and what the mean of N + R costs beside the loss
        self.activation, self.hidden_units, self.softcap = "gelu", None, None  # hidden_units: of swiglu
        self.hashes = None  # of lsh: (buckets, rounds)
        for flag in FLAGS:
            setattr(self, flag, False)
        try:
            self.terms = [term_of(text, term) for term in re.findall(r"[^\s()]+(?:\([^()]*\))?|\S+", text)]
            for name, arguments in self.terms:
                self.apply(name, arguments)
        except IndexError as e:
            raise ValueError(f"wiring {text!r}, of {L} layers and {h} heads: {e}") from e

    def apply(self, name, arguments):
        L, h = self.num_layers, self.num_heads
        is_whole = arguments and name not in ("layers", "blend", "rope", "route", "act", "softcap")
        n = int(arguments[0]) if is_whole else None
        if name in ("sla", "also"):
            first, end = map(int, arguments[1].split(":")) if ":" in arguments[1] else (h - int(arguments[1]), h)
            for l in range(n, L):
                for head in range(first, end):
                    if name == "also":
                        self.sources[l][head].add((l - n, l - n))
                    else:
                        self.move(l, head, l - n, arguments[2:])
        elif name == "share":
            for l in range(L):
                for head in range(h):
                    self.move(l, head, l - l % n, arguments[1:])
        elif name == "layers":
            self.sources = [[{(int(source), int(source))} for _ in range(h)] for source in arguments[0].split("_")]
            if len(self.sources) != L:
                raise ValueError(f"wiring {self.text!r} names {len(self.sources)} layers of {L}")
        elif name == "gqa":
            self.num_kv_heads = n
        elif name == "window":
            pattern = arguments[1] if len(arguments) > 1 else "S"
            self.masks.append(lambda l, first, t, j: (t - j < n) | (pattern[l % len(pattern)] == "L"))
        elif name == "strided":
            self.add_sparse(arguments[1:], lambda t, j: t - j <= n, lambda t, j: (t - j) % n == 0)
        elif name == "fixed":
            c = int(arguments[1])
            self.add_sparse(arguments[2:], lambda t, j: t // n == j // n, lambda t, j: j % n >= n - c)
        elif name == "topk":
            self.topk = n
        elif name == "reuse":
            self.maps_in_group = n
        elif name == "blend":
            self.blend = float(arguments[0])
        elif name == "rope":
            self.learned, self.rope = False, float(arguments[0]) if arguments else 10000.0
        elif name == "relative":
            self.learned, self.relative = False, True
        elif name == "memory":
            if self.segment is None:
                raise ValueError(f"wiring {self.text!r}: memory needs the context length")
            self.memory = n
            self.masks.append(lambda l, first, t, j: j >= t // self.segment * self.segment - n)
        elif name == "universal":
            if L % n != 0:
                raise ValueError(f"wiring {self.text!r}: cycles of {n} layers do not make {L} layers")
            self.cycle = n
        elif name == "act":
            self.halting, self.ponder_cost = float(arguments[0]), float(arguments[1]) if len(arguments) > 1 else 0.01
        elif name in ("relu2", "silu"):
            self.activation = name
        elif name == "swiglu":
            self.activation, self.hidden_units = "swiglu", n
        elif name == "softcap":
            self.softcap = float(arguments[0])
        elif name == "lsh":
            if n % 2 != 0:
                raise ValueError(f"wiring {self.text!r}: {n} buckets; they are pairs")
            self.hashes = n, int(arguments[1])
        elif name in FLAGS:
            setattr(self, name, True)
            self.learned = self.learned and name != "alibi"

    def move(self, l, head, source, part):
        """The head attends to K/V of layer `source`; with a part ("k" or "v") to its keys or its values alone."""
        if part and part[0] not in ("k", "v"):
            raise ValueError(f"wiring {self.text!r}: {part[0]!r} is neither k nor v")
        moves_k, moves_v = "v" not in part, "k" not in part
        self.sources[l][head] = {(source if moves_k else k, source if moves_v else v)
                                 for k, v in self.sources[l][head]}

    def add_sparse(self, how, a1, a2):
        how = how[0] if how else "heads"
        if how not in ("heads", "layers", "union"):
            raise ValueError(f"wiring {self.text!r}: {how!r} is not heads, layers or union")

        def mask(l, first, t, j):
            if how == "union":
                return a1(t, j) | a2(t, j)
            return a1(t, j) if (first if how == "heads" else l % 2 == 0) else a2(t, j)
        self.masks.append(mask)

    def in_first_half(self, head):
        return head < math.ceil(self.num_heads / 2)

    def visible(self, l, head, t, j):
        """Whether the queries at positions t may see the keys at positions j, tensors that are broadcast."""
        visible = j <= t
        for mask in self.masks:
            visible = visible & mask(l, self.in_first_half(head), t, j)
        return visible

    def slope(self, head):
        """`alibi`: by how much a score falls with each position between the query and the key."""
        n = 2 ** (self.num_heads.bit_length() - 1)
        return 2 ** (-8 * (head + 1) / n if head < n else -4 * (2 * (head - n) + 1) / n)

    def stored_layers(self):
        """Layer l has the parameters of layer l mod this many."""
        return self.cycle or self.num_layers

    def map_layer(self, l):
        """The layer whose attention map layer l uses."""
        return l - l % self.maps_in_group

    def mixes_maps(self):
        return self.gate or self.blend is not None

    def needs_maps(self):
        """Whether scaled_dot_product_attention with a causal mask will not do."""
        return bool(self.masks or self.topk or self.sinks or self.alibi or self.relative or self.hashes or
                    self.mixes_maps() or self.maps_in_group > 1 or
                    any(len(sources) > 1 for layer in self.sources for sources in layer))

    def is_plain(self):
        return all(name == "plain" for name, _ in self.terms)


# ----------------------------------------------------------------------------
# The model


class Positions:
    """Of the T new tokens and of all S keys, cached ones first. `attention_mask` (B, S), as transformers has it: 0
    where a key is padding, which no query sees and which takes no position; None: there is none. `documents` (B, S):
    which one each key is of; None: all are of one."""

    def __init__(self, past, T, attention_mask, documents, device):
        S = past + T
        self.keys, self.valid = torch.arange(S, device=device)[None], None          # (1 or B, S)
        if attention_mask is not None and not bool(attention_mask.all()):
            self.valid = attention_mask.bool()
            self.keys = (attention_mask.long().cumsum(1) - 1).clamp(min=0)
        self.queries = self.keys[:, past:]                                          # (1 or B, T)
        self.documents = documents
        self.is_causal = past == 0 and self.valid is None and documents is None

    def distances(self):
        """(1 or B, T, S): of each query to each key; 0 to a later one, which it does not see."""
        return (self.queries[:, :, None] - self.keys[:, None, :]).clamp(min=0)

    def own(self):
        """(T, S): whether the key is that of the query's token."""
        order = torch.arange(self.keys.shape[1], device=self.keys.device)
        return order[None, :] == order[-self.queries.shape[1]:, None]

    def visible(self, wiring, l, head):
        """(1 or B, T, S)"""
        visible = wiring.visible(l, head, self.queries[:, :, None], self.keys[:, None, :])
        if self.documents is not None:
            of_queries = self.documents[:, -self.queries.shape[1]:]
            visible = visible & (of_queries[:, :, None] == self.documents[:, None, :])
        if self.valid is None:
            return visible
        # A row of padding would see nothing; its own key keeps it finite, and nobody reads it.
        order = torch.arange(self.keys.shape[1], device=visible.device)
        before = order[None, :] <= order[-self.queries.shape[1]:, None]
        return visible & self.valid[:, None, :] & before | self.own() & ~self.valid[:, None, :]


def rotated(x, positions, base):
    """x (B, h, T, hs) with the pairs (x_i, x_(i+hs/2)) rotated by position * base^(-2i/hs); positions (1 or B, T)."""
    half = x.shape[3] // 2
    frequencies = base ** (-2 * torch.arange(half, device=x.device, dtype=torch.float64) / x.shape[3])
    angles = positions[:, None, :, None].double() * frequencies
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=3)


class RelativePositions(nn.Module):
    """Transformer-XL's: the query at t and the key at j have the score (q_t + u) . k_j + (q_t + v) . r_(t-j) before it
    is scaled. r_d = s_d weight, of which each head takes its columns; s_d: the C/2 sines of d * 10000^(-2i/C), then the
    cosines."""

    def __init__(self, heads, channels):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, channels))
        self.u = nn.Parameter(torch.empty(heads, channels // heads))
        self.v = nn.Parameter(torch.empty(heads, channels // heads))

    def rows(self, count):
        """r_0 to r_(count - 1), by head: (h, count, hs)"""
        C, device = self.weight.shape[0], self.weight.device
        frequencies = 10000 ** (-torch.arange(0, C, 2, device=device, dtype=torch.float64) / C)
        angles = torch.arange(count, device=device)[:, None] * frequencies
        sines = torch.cat((angles.sin(), angles.cos()), dim=1).to(self.weight.dtype)
        return (sines @ self.weight).view(count, *self.u.shape).transpose(0, 1)

    def scores(self, head, q, k, r, distances):
        """One head's q (B, T, hs), k (B, n * S, hs) of n sources, r (S, hs) and distances (1 or B, T, S) ->
        (B, T, n * S)."""
        S = distances.shape[2]
        of_distances = ((q + self.v[head]) @ r.t()).gather(2, distances.expand(q.shape[0], -1, -1))
        return (q + self.u[head]) @ k.transpose(1, 2) + of_distances.repeat(1, 1, k.shape[1] // S)


class LayerNorm(nn.Module):
    def __init__(self, channels, bias, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels)) if bias else None
        self.eps = eps

    def forward(self, x):
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


def by_root_mean_square(x, eps):
    """x by the root of the mean of its squares over the last dimension, which float16 has no room for."""
    wide = x.float() if x.element_size() < 4 else x
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


class RMSNorm(nn.Module):
    def __init__(self, channels, eps):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(channels)), eps

    def forward(self, x):
        return by_root_mean_square(x, self.eps) * self.weight


def norm_of(wiring, channels, bias, eps):
    return RMSNorm(channels, eps) if wiring.rmsnorm else LayerNorm(channels, bias, eps)


class Conv1D(nn.Module):
    """A linear layer whose weight is (in, out), as GPT-2's files have it."""

    def __init__(self, inputs, outputs, bias):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(inputs, outputs))
        self.bias = nn.Parameter(torch.zeros(outputs)) if bias else None

    def forward(self, x):
        return F.linear(x, self.weight.t(), self.bias)


class Attention(nn.Module):
    """With `universal` several layers have these parameters; the `layer` of its methods is the one that runs."""

    def __init__(self, wiring, stored_layer, channels, bias):
        super().__init__()
        self.wiring, self.heads = wiring, wiring.num_heads
        self.head_size = channels // self.heads
        kv_channels = wiring.num_kv_heads * self.head_size
        self.widths = (channels, kv_channels) if wiring.hashes else (channels, kv_channels, kv_channels)
        self.c_attn = Conv1D(channels, sum(self.widths), bias)
        self.c_proj = Conv1D(channels, channels, bias)
        self.map_gate = Conv1D(channels, 1, bias) if wiring.gate and stored_layer > 0 else None
        self.value_mix = nn.Parameter(torch.tensor([1.0, 0.0])) if wiring.vres and stored_layer > 0 else None
        if wiring.router and stored_layer > 0:
            kv = wiring.num_kv_heads
            identity = F.pad(torch.eye(kv)[:, None], (0, 0, stored_layer, 0))  # (kv, layers, kv)
            self.router = nn.Parameter(identity.flatten())
        self.sinks = nn.Parameter(torch.zeros(self.heads)) if wiring.sinks else None
        self.relative = RelativePositions(self.heads, channels) if wiring.relative else None
        if wiring.hashes:
            buckets, rounds = wiring.hashes
            self.register_buffer("rotations", torch.randn(self.heads, rounds, self.head_size, buckets // 2))
        self.sources = [[sorted(sources) for sources in of_heads] for of_heads in wiring.sources]  # by layer, by head

    def forward(self, layer, x, projected, maps, positions, cache=None):
        """x (B, T, C) -> (B, T, C). `projected` has the (k, v) of each layer below, (B, h, S, hs), and what was
        projected for the T tokens, `maps` the attention maps of their heads; this one appends its own."""
        B, T, C = x.shape
        parts = self.c_attn(x).split(self.widths, dim=2)
        q, *k, v = (y.view(B, T, -1, self.head_size).transpose(1, 2) for y in parts)
        k = k[0] if k else q / q.norm(dim=3, keepdim=True)
        if self.wiring.qknorm:
            q, k = (by_root_mean_square(y, 1e-6) for y in (q, k))
        if self.wiring.rope is not None:
            q, k = (rotated(y, positions.queries, self.wiring.rope) for y in (q, k))
        if self.value_mix is not None:
            first = projected[0][1][:, ::self.heads // self.wiring.num_kv_heads, -T:]
            v = self.value_mix[0] * v + self.value_mix[1] * first
        own = (k, v)
        if self.wiring.router and layer > 0:
            k, v = self.routed([*(of_layer[2] for of_layer in projected), own])
        if self.wiring.depth and layer > 0:
            keys, values = (torch.stack(part) for part in zip(*(of_layer[2] for of_layer in projected), own))
            weights = ((q * keys).sum(-1, keepdim=True) / math.sqrt(self.head_size)).softmax(0)
            v = (weights * values).sum(0)
        if cache is not None:
            k, v = cache.update(k, v, layer)
            if k.shape[2] != positions.keys.shape[1]:
                raise ValueError(f"{type(cache).__name__} has {k.shape[2]} keys of {positions.keys.shape[1]} tokens; "
                                 "all of them are needed, in their order")
        if self.wiring.num_kv_heads < self.heads:
            k, v = (y.repeat_interleave(self.heads // self.wiring.num_kv_heads, dim=1) for y in (k, v))
        projected.append((k, v, own))
        if self.wiring.needs_maps():
            maps.append(self.own_maps(layer, x, q, projected, maps, positions))
            y = torch.stack([maps[-1][head] @ self.of_sources(layer, projected, 1, head) for head in range(self.heads)],
                            dim=1)
        else:
            k, v = (self.by_head(layer, projected, which) for which in (0, 1))
            visible = None if positions.is_causal else positions.visible(self.wiring, layer, 0)[:, None]
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=visible, is_causal=positions.is_causal)
        return self.c_proj(y.transpose(1, 2).reshape(B, T, C))

    def routed(self, layers):
        """The (k, v) that each layer up to this one has projected, (B, kv, T, hs), -> this layer's sums of them."""
        kv = self.wiring.num_kv_heads
        weights = self.router.view(kv, len(layers), kv)
        return (torch.einsum("gji,jbitc->bgtc", weights, torch.stack(part)) for part in zip(*layers))

    def by_head(self, layer, projected, which):
        """(B, h, S, hs): each head's k or v, from its one source; neighbouring heads with the same are one slice."""
        parts, first = [], 0
        sources = self.sources[layer]
        for head in range(1, self.heads + 1):
            if head == self.heads or sources[head][0][which] != sources[first][0][which]:
                parts.append(projected[sources[first][0][which]][which][:, first:head])
                first = head
        return torch.cat(parts, dim=1) if len(parts) > 1 else parts[0]

    def of_sources(self, layer, projected, which, head):
        """(B, n * S, hs): the k or v of all of a head's n sources, the lowest layer's first."""
        return torch.cat([projected[source[which]][which][:, head] for source in self.sources[layer][head]], dim=1)

    def own_maps(self, layer, x, q, projected, maps, positions):
        """The layer's attention map of each head, (B, T, n * S)."""
        if self.wiring.map_layer(layer) != layer:
            return maps[self.wiring.map_layer(layer)]
        visible, own = {}, []
        if self.relative is not None or self.wiring.alibi:
            distances = positions.distances()
        if self.relative is not None:
            rows = self.relative.rows(positions.keys.shape[1])
        for head in range(self.heads):
            half = self.wiring.in_first_half(head)
            if half not in visible:
                visible[half] = positions.visible(self.wiring, layer, head)
            k, seen = self.of_sources(layer, projected, 0, head), visible[half]
            if self.wiring.hashes:
                seen = self.in_shared_buckets(head, k, seen, positions.own())
            if self.relative is None:
                scores = q[:, head] @ k.transpose(1, 2)
            else:
                scores = self.relative.scores(head, q[:, head], k, rows[head], distances)
            scores = scores / math.sqrt(self.head_size)
            if self.wiring.alibi:
                lowered = self.wiring.slope(head) * distances.to(scores.dtype)
                scores = scores - lowered.repeat(1, 1, scores.shape[2] // lowered.shape[2])
            own.append(self.softmax_of_visible(scores, seen, None if self.sinks is None else self.sinks[head]))
        if layer == 0 or not self.wiring.mixes_maps():
            return own
        a = torch.sigmoid(self.map_gate(x)) if self.wiring.gate else self.wiring.blend
        return [a * below + (1 - a) * mine for below, mine in zip(maps[layer - 1], own)]

    def in_shared_buckets(self, head, k, visible, own):
        """`lsh`: of the keys k (B, S, hs) that are visible (1 or B, T, S), the earlier ones in the query's bucket in
        some round, or its own (T, S) if there are none: (B, T, S). k is q / |q|, so both are in the same bucket."""
        values = k[:, None] @ self.rotations[head]  # (B, rounds, S, buckets / 2)
        bucket = torch.cat((values, -values), dim=3).argmax(dim=3)
        of_query = bucket[:, :, -visible.shape[1]:]
        shared = (of_query[:, :, :, None] == bucket[:, :, None, :]).any(dim=1)
        earlier = visible & shared & ~own
        return earlier | own & ~earlier.any(dim=2, keepdim=True)

    def softmax_of_visible(self, scores, visible, sink):
        """A row without a visible key is zero. sink: one more score, whose probability is dropped, or None."""
        visible = visible.repeat(1, 1, scores.shape[2] // visible.shape[2]).expand_as(scores)
        if self.wiring.topk is not None:
            best = scores.masked_fill(~visible, -math.inf).sort(dim=2, descending=True, stable=True).indices
            visible = visible & torch.zeros_like(visible).scatter(2, best[:, :, :self.wiring.topk], True)
        lowest = torch.finfo(scores.dtype).min  # not infinite: the softmax of a row without a visible key would be NaN
        scores = scores.masked_fill(~visible, lowest)
        if sink is not None:
            scores = torch.cat((scores, sink.to(scores.dtype).expand(*scores.shape[:2], 1)), dim=2)
        return scores.softmax(dim=2)[..., :visible.shape[2]].masked_fill(~visible, 0)


class MLP(nn.Module):
    def __init__(self, wiring, channels, bias):
        super().__init__()
        self.activation = wiring.activation
        gated = self.activation == "swiglu"
        hidden = wiring.hidden_units or (math.ceil(channels / 24) * 64 if gated else 4 * channels)
        self.c_fc = Conv1D(channels, 2 * hidden if gated else hidden, bias)
        self.c_proj = Conv1D(hidden, channels, bias)

    def forward(self, x):
        x = self.c_fc(x)
        if self.activation == "swiglu":
            gate, x = x.chunk(2, dim=-1)
            return self.c_proj(F.silu(gate) * x)
        return self.c_proj(F.relu(x).square() if self.activation == "relu2" else
                           F.silu(x) if self.activation == "silu" else F.gelu(x, approximate="tanh"))


class Gate(nn.Module):
    """GTrXL's, in which the output y of attention or MLP joins the residual stream x, (B, T, C) each. It has a bias in
    models without biases too."""

    def __init__(self, channels):
        super().__init__()
        self.y, self.x, self.rx = (Conv1D(channels, n * channels, bias=False) for n in (3, 2, 1))
        self.bias = nn.Parameter(torch.full((channels,), 2.0))

    def forward(self, x, y):
        y = F.relu(y)
        (y_r, y_z, y_g), (x_r, x_z) = self.y(y).chunk(3, dim=-1), self.x(x).chunk(2, dim=-1)
        r, z = torch.sigmoid(y_r + x_r), torch.sigmoid(y_z + x_z - self.bias)
        return (1 - z) * x + z * torch.tanh(y_g + self.rx(r * x))


class Block(nn.Module):
    def __init__(self, wiring, stored_layer, channels, bias, eps):
        super().__init__()
        self.reversible = wiring.reversible
        self.ln_1, self.attn = norm_of(wiring, channels, bias, eps), Attention(wiring, stored_layer, channels, bias)
        self.gru_1 = Gate(channels) if wiring.gru else torch.add
        self.ln_2, self.mlp = norm_of(wiring, channels, bias, eps), MLP(wiring, channels, bias)
        self.gru_2 = Gate(channels) if wiring.gru else torch.add
        # Of the embeddings and the layers' outputs, in the sum that comes after this one.
        self.dense = nn.Parameter(torch.eye(stored_layer + 2)[-1].clone()) if wiring.dense else None

    def forward(self, layer, streams, projected, maps, positions, cache):
        """The residual stream twice or, with `reversible`, the two streams, (B, T, C) each -> those after the layer."""
        x1, x2 = streams
        x1 = self.gru_1(x1, self.attn(layer, self.ln_1(x2), projected, maps, positions, cache))
        x2 = self.gru_2(x2 if self.reversible else x1, self.mlp(self.ln_2(x1)))
        return (x1 if self.reversible else x2), x2


def halting_weights(p, eps):
    """p (cycles, ...), the probabilities that tokens halt after each cycle -> (w, n): w (cycles, ...), the weights of
    the states after the cycles, which sum to 1, and n (...), N + R: the number of cycles with a weight and the last of
    these weights."""
    goes_on = p.detach().cumsum(0) < 1 - eps
    goes_on[-1] = False
    reached = torch.cat((torch.ones_like(goes_on[:1]), goes_on[:-1]))
    before_last = torch.where(goes_on, p, 0)
    remainder = 1 - before_last.sum(0)
    return torch.where(reached & ~goes_on, remainder, before_last), reached.sum(0) + remainder


class GPT2(nn.Module):
    """num_embeddings: rows of wte, at least the vocabulary's. end_of_text: the token that begins a document."""

    def __init__(self, wiring, channels, num_embeddings, max_seq_len, bias=True, layer_norm_eps=1e-5, end_of_text=None):
        super().__init__()
        if channels % wiring.num_heads != 0:
            raise ValueError(f"{wiring.num_heads} heads do not divide {channels} channels")
        if wiring.documents and end_of_text is None:
            raise ValueError(f"wiring {wiring.text!r}: documents begin at eos_token_id, which is not given")
        self.wiring, self.max_seq_len, self.end_of_text = wiring, max_seq_len, end_of_text
        self.wte = nn.Embedding(num_embeddings, channels)
        self.wpe = nn.Embedding(max_seq_len, channels) if wiring.learned else None
        self.wse = nn.Embedding(wiring.num_layers // wiring.cycle, channels) if wiring.cycle else None
        self.halt = Conv1D(channels, 1, bias) if wiring.halting is not None else None
        if wiring.halting is not None and bias:
            nn.init.ones_(self.halt.bias)
        self.h = nn.ModuleList(Block(wiring, layer, channels, bias, layer_norm_eps)
                               for layer in range(wiring.stored_layers()))
        self.ln_f = norm_of(wiring, channels, bias, layer_norm_eps)
        self.lm_head = nn.Linear(channels, num_embeddings, bias=False) if wiring.untied else None

    def initialise(self, module=None):
        """GPT-2's: normal(0, 0.02), the projections into the residual stream scaled by 1 / sqrt(2 L). With `module`
        that one's own parameters alone."""
        projections = {block.attn.c_proj for block in self.h} | {block.mlp.c_proj for block in self.h}
        for m in self.modules() if module is None else [module]:
            scale = math.sqrt(2 * self.wiring.num_layers) if m in projections else 1
            for p in m.parameters(recurse=False):
                if p.dim() >= 2:
                    nn.init.normal_(p, std=0.02 / scale)

    def with_coordinates(self, x, cycle, positions):
        """The residual stream (B, T, C) at the beginning of a cycle, of which there is one without `universal`."""
        if self.wpe is not None:
            x = x + self.wpe(positions.queries)
        return x if self.wse is None else x + self.wse.weight[cycle]

    def halted(self, states):
        """Of each cycle the residual stream after it, (B, T, C) -> the mean of them that each token's halting
        probabilities make, (B, T, C), and the mean of N + R."""
        states = torch.stack(states)
        w, n = halting_weights(torch.sigmoid(self.halt(states)), self.wiring.halting)
        return (w * states).sum(0), n.mean()

    def documents(self, tokens, past, cache):
        """(B, S): which document each token is of, counted from a row's first; None without `documents`. The cache
        keeps that of its tokens."""
        if not self.wiring.documents:
            return None
        documents, before = (tokens == self.end_of_text).cumsum(1), getattr(cache, "documents", None)
        if past > 0:
            if before is None or before.shape[0] != tokens.shape[0] or before.shape[1] < past:
                raise ValueError("documents of the cache's tokens are not known; take a cache that this model filled")
            before = before[:, :past]  # of a cache that was cropped after a rejected draft it has more
            documents = torch.cat((before, before[:, -1:] + documents), dim=1)
        if cache is not None:
            cache.documents = documents
        return documents

    def logits(self, x):
        """Final hidden states (..., C) -> logits (..., V)."""
        head, cap = self.lm_head if self.wiring.untied else self.wte, self.wiring.softcap
        logits = F.linear(x, head.weight)
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def forward(self, tokens, attention_mask=None, cache=None):
        """tokens (B, T), new ones -> final hidden states (B, T, C), and with `act` the mean of N + R, else 0.
        attention_mask: (B, S), of the cached ones too."""
        T, past = tokens.shape[1], cache.get_seq_length() if cache is not None else 0
        if past + T > self.max_seq_len and self.wiring.memory is None:
            raise ValueError(f"{past + T} tokens, but the context length is {self.max_seq_len}")
        if attention_mask is not None and attention_mask.shape != (tokens.shape[0], past + T):
            raise ValueError(f"attention_mask is {tuple(attention_mask.shape)}, but cached and new tokens are "
                             f"{(tokens.shape[0], past + T)}")
        positions = Positions(past, T, attention_mask, self.documents(tokens, past, cache), tokens.device)
        x, projected, maps, states, ponder = self.wte(tokens), [], [], [], 0
        for layer in range(self.wiring.num_layers):
            cycle, stored_layer = divmod(layer, len(self.h))
            if stored_layer == 0:
                x = self.with_coordinates(x, cycle, positions)
                streams, outputs = (x, x), [x]
            streams = self.h[stored_layer](layer, streams, projected, maps, positions, cache)
            x = streams[1]
            if self.wiring.dense:
                outputs.append(x)
                x = sum(weight * y for weight, y in zip(self.h[layer].dense, outputs))
                streams = x, x
            if self.halt is not None and stored_layer + 1 == len(self.h):
                states.append(x)
        if self.wiring.reversible:
            x = (streams[0] + streams[1]) / 2
        if self.halt is not None:
            x, ponder = self.halted(states)
        return self.ln_f(x), ponder
