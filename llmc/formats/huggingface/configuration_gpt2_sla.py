"""The config of GPT-2 with a wiring of its attention, for transformers."""
from transformers import PretrainedConfig

from .gpt2_sla import Wiring


class GPT2SLAConfig(PretrainedConfig):
    """GPT-2's keys, `wiring`, the text, and `bias`, which is False for a model without any."""

    model_type = "gpt2_sla"
    keys_to_ignore_at_inference = ["past_key_values", "cache"]
    attribute_map = {"hidden_size": "n_embd", "max_position_embeddings": "n_positions", "num_attention_heads": "n_head",
                     "num_hidden_layers": "n_layer"}

    def __init__(self, vocab_size=50257, n_positions=1024, n_embd=768, n_layer=12, n_head=12, layer_norm_epsilon=1e-5,
                 bias=True, wiring="plain", **kwargs):
        self.vocab_size, self.n_positions, self.n_embd = vocab_size, n_positions, n_embd
        self.n_layer, self.n_head = n_layer, n_head
        self.layer_norm_epsilon, self.bias, self.wiring = layer_norm_epsilon, bias, wiring
        untied = Wiring(wiring, n_layer, n_head, n_positions).untied  # raises ValueError for a text that is none
        kwargs.setdefault("tie_word_embeddings", not untied)
        super().__init__(**kwargs)
