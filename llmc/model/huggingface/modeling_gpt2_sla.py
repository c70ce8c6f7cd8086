"""GPT-2 with a wiring of its attention, for transformers:
AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)."""
import torch.nn.functional as F
from transformers import DynamicCache, GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from .configuration_gpt2_sla import GPT2SLAConfig
from .gpt2_sla import GPT2, Wiring


class GPT2SLAForCausalLM(PreTrainedModel, GenerationMixin):
    config_class = GPT2SLAConfig
    base_model_prefix = "transformer"
    _no_split_modules = ["Block"]
    # Files hold zeros for the biases of a model without any, so that other programs load them.
    _keys_to_ignore_on_load_unexpected = [r"\.bias$"]

    def __init__(self, config):
        super().__init__(config)
        wiring = Wiring(config.wiring, config.n_layer, config.n_head, config.n_positions)
        self.transformer = GPT2(wiring, config.n_embd, config.vocab_size, config.n_positions, config.bias,
                                config.layer_norm_epsilon)
        self.post_init()

    def _init_weights(self, module):
        if isinstance(module, GPT2):
            module.initialise()

    def get_input_embeddings(self):
        return self.transformer.wte

    def set_input_embeddings(self, embeddings):
        self.transformer.wte = embeddings

    def forward(self, input_ids, attention_mask=None, past_key_values=None, labels=None, use_cache=None,
                return_dict=True, logits_to_keep=0, **kwargs):
        """input_ids (B, T) -> logits (B, T, V); the loss is the mean cross-entropy of labels[:, 1:], of which -100 are
        left out. Positions follow from attention_mask; no other are known."""
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache()
        x, _ = self.transformer(input_ids, attention_mask, past_key_values)
        logits = F.linear(x[:, -logits_to_keep:] if logits_to_keep else x, self.transformer.wte.weight)
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits[:, :-1].reshape(-1, logits.shape[-1]).float(), labels[:, 1:].reshape(-1))
        if not return_dict:
            return tuple(x for x in (loss, logits, past_key_values) if x is not None)
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=past_key_values)
