"""GPT-2 with a wiring of its attention, for transformers:
AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)."""
import dataclasses

import torch
import torch.nn.functional as F
from transformers import DynamicCache, GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from .configuration_gpt2_sla import GPT2SLAConfig
from .gpt2_sla import GPT2, Wiring

# What this transformers calls a cache in a model's output: `past_key_values`, in newer ones `cache`.
NAMES_OF_CACHE = ("cache", "past_key_values")
NAME_OF_CACHE = next(field.name for field in dataclasses.fields(CausalLMOutputWithPast) if field.name in NAMES_OF_CACHE)


class GPT2SLAForCausalLM(PreTrainedModel, GenerationMixin):
    config_class = GPT2SLAConfig
    base_model_prefix = "transformer"
    _no_split_modules = ["Block"]
    _supports_cache_class = True  # without it generate() of transformers 4 hands over no cache
    # Files hold zeros for the biases of a model without any, so that other programs load them.
    _keys_to_ignore_on_load_unexpected = [r"\.bias$"]

    def __init__(self, config):
        super().__init__(config)
        wiring = Wiring(config.wiring, config.n_layer, config.n_head, config.n_positions)
        document, end = getattr(config, "document_token_id", None), config.eos_token_id
        if document is None:
            document = end[0] if isinstance(end, (list, tuple)) else end
        self.transformer = GPT2(wiring, config.n_embd, config.vocab_size, config.n_positions, config.bias,
                                config.layer_norm_epsilon, document)
        self.post_init()

    def _init_weights(self, module):  # called of each; transformers 5 passes over modules without own parameters
        self.transformer.initialise(module)

    def get_input_embeddings(self):
        return self.transformer.wte

    def set_input_embeddings(self, embeddings):
        self.transformer.wte = embeddings

    def get_output_embeddings(self):
        return self.transformer.lm_head  # None without `untied`

    def set_output_embeddings(self, embeddings):
        self.transformer.lm_head = embeddings

    def _reorder_cache(self, cache, beams):
        cache.reorder_cache(beams)
        if self.transformer.wiring.documents:
            cache.documents = cache.documents.index_select(0, beams.to(cache.documents.device))
        return cache

    _temporary_reorder_cache = _reorder_cache  # its name in transformers 4

    def prepare_inputs_for_generation(self, *args, **kwargs):
        inputs = super().prepare_inputs_for_generation(*args, **kwargs)
        inputs.pop("cache_position", None)  # transformers 4 has it for all models; it follows from the cache
        return inputs

    def forward(self, input_ids, attention_mask=None, past_key_values=None, labels=None, use_cache=None,
                return_dict=None, logits_to_keep=0, cache=None, num_items_in_batch=None, **loss_kwargs):
        """input_ids (B, T) -> logits (B, T, V); the loss is the mean cross-entropy of labels[:, 1:], of which -100 are
        left out; with num_items_in_batch their sum by that, so that Trainer adds up micro-batches of an update.
        Positions follow from attention_mask (B, S), where S counts cached tokens too; no other are known.
        `cache` and `past_key_values` are two names of one argument, and of one member of the output. loss_kwargs, by
        whose name transformers 4 knows that num_items_in_batch is taken, are what callers say of all models, and are
        refused where they ask for something."""
        unknown = [name for name, value in loss_kwargs.items() if value is not None and value is not False]
        if unknown:
            raise TypeError(f"forward() does not know {', '.join(unknown)}")
        if cache is not None and past_key_values is not None and cache is not past_key_values:
            raise ValueError("cache and past_key_values are two names of one argument, but two different caches")
        cache = past_key_values if cache is None else cache
        if cache is None and use_cache:
            cache = DynamicCache()
        if cache is not None and type(cache).__name__ not in ("DynamicCache", "OffloadedCache"):
            raise ValueError(f"a cache of the class {type(cache).__name__} is not understood; take a DynamicCache")
        x, _ = self.transformer(input_ids, attention_mask, cache)
        logits = self.transformer.logits(x[:, -logits_to_keep:] if logits_to_keep else x)
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits[:, :-1].reshape(-1, logits.shape[-1]).float(), labels[:, 1:].reshape(-1),
                                   reduction="mean" if num_items_in_batch is None else "sum")
            if num_items_in_batch is not None:
                loss = loss / torch.as_tensor(num_items_in_batch, device=loss.device)
        if return_dict is False:
            return tuple(x for x in (loss, logits, cache) if x is not None)
        output = CausalLMOutputWithPast(loss=loss, logits=logits, **{NAME_OF_CACHE: cache})
        for name in NAMES_OF_CACHE:
            if not hasattr(type(output), name):
                setattr(output, name, cache)
        return output
