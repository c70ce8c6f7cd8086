#!/usr/bin/env python3
"""Are `relative` and `memory` what Transformer-XL has? Models with random weights, and the golden case of both terms,
are trained in float64 as dev/test/golden/make.py trains them, once with its attention and once with the one in
transformers 4.30, the last release that has RelPartialLearnableMultiHeadAttn, which gets each layer's remembered
inputs as its `mems`. Losses, norms and gradients, also of u, v and W, must be the same: losses and norms
differed by at most 4e-16 of themselves.

    pip install 'transformers==4.30.2' && python3 dev/transformer_xl_check.py

For development only: it needs PyTorch, NumPy and that transformers.
"""
import contextlib
import json
import sys
import tempfile
from pathlib import Path
from unittest import mock

try:
    import torch
    from torch.func import functional_call
    from transformers.models.transfo_xl.modeling_transfo_xl import PositionalEmbedding, RelPartialLearnableMultiHeadAttn
except ImportError as e:
    sys.exit(f"error: transformer_xl_check.py needs PyTorch and transformers 4.30: {e}")

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "dev/test/golden"))
import make

WIRINGS = ("relative", "relative memory(5)", "relative memory(24)", "memory(100) relative")
BOUNDS = 1e-12, 1e-7  # relative, of losses and norms (float64), and of gradients and token losses (float32)


class WithTheirAttention(make.Model):
    def attention(self, l, x, queries):
        """As make.Model's: x (B, T, C), LayerNorm'd; the first positions are the memory's."""
        (_, T, C), h = x.shape, self.config["n_head"]
        module = RelPartialLearnableMultiHeadAttn(h, C, C // h, dropout=0).double()
        module.qkv_net, module.o_net = torch.nn.Linear(C, 3 * C).double(), torch.nn.Linear(C, C).double()  # with biases
        module.layer_norm = torch.nn.Identity()
        of = lambda name: self.w[f"h.{l}.attn.{name}"]
        weights = {"qkv_net.weight": of("c_attn.weight").T, "qkv_net.bias": of("c_attn.bias"),
                   "o_net.weight": of("c_proj.weight").T, "o_net.bias": of("c_proj.bias"),
                   "r_net.weight": of("relative.weight").T, "r_w_bias": of("relative.u"), "r_r_bias": of("relative.v")}
        rows = x.transpose(0, 1)
        memory, segment = rows[:T - queries], rows[T - queries:]
        # As TransfoXLModel.forward has it: distances from T - 1 down to 0, and what a query must not see.
        distances = PositionalEmbedding(C)(torch.arange(T - 1, -1, -1.0))
        hidden = torch.ones(queries, T).triu(1 + T - queries)[:, :, None]
        # Scores are masked in float32, whatever the model's type.
        with mock.patch.object(torch.Tensor, "float", torch.Tensor.double):
            out = functional_call(module, weights, (segment, distances), {"attn_mask": hidden, "mems": memory})[0]
        return (out - segment).transpose(0, 1)  # without the residual


def is_the_same(case):
    with mock.patch.object(make, "Model", WithTheirAttention):
        errors = make.check_case(case)
    same = all(error <= bound for error, bound in zip(errors, BOUNDS))
    wiring = make.wiring_text(json.loads((case / "config.json").read_text()))
    print(f"{case.name}, {wiring}: losses and norms differ by {errors[0]:.1e}, gradients and token losses by "
          f"{errors[1]:.1e}: {'the same' if same else 'NOT the same'}", flush=True)
    return same


def main():
    torch.set_default_dtype(torch.float64)  # of their sines too
    cases = [ROOT / "dev/test/golden/f_memory"]
    with tempfile.TemporaryDirectory() as folder:
        for number, wiring in enumerate(WIRINGS):
            cases.append(Path(folder) / f"random_{number}")
            with contextlib.redirect_stdout(None):
                make.make_case(cases[-1], wiring, number, layers=3, positions=24, steps=5, accumulate=2)
        same = sum([is_the_same(case) for case in cases])
    print(f"{same} of {len(cases)} models are the same")
    return 0 if same == len(cases) else 1


if __name__ == "__main__":
    sys.exit(main())
