"""A causal LM as transformers' own module, for what specahead.engine.loading.model does not read by itself.

Importing this takes seconds of a processor: transformers' modelling code brings torch._dynamo and much else.
"""

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, AutoConfig, AutoModelForCausalLM

from specahead.engine.model.modules import NAME, attend_in_pass


def load_module(
    model: str, dtype: torch.dtype, device: str, attention_name: str = NAME, load_format: str = "auto"
) -> nn.Module:
    """Return the causal LM in a folder or of a Hugging Face id; code from the hub is never run.

    Weights are read from safetensors only, shard by shard straight to the device. load_format "dummy": random weights
    in the shape of the model's config, for measurements. Raises what transformers raises for a model that it cannot
    load, and ValueError for a checkpoint that lacks weights, which transformers would make up.
    """
    AttentionInterface.register(NAME, attend_in_pass)
    AttentionMaskInterface.register(NAME, lambda *_, **__: None)
    options = {"dtype": dtype, "attn_implementation": attention_name, "trust_remote_code": False}
    if load_format == "dummy":
        config = AutoConfig.from_pretrained(model, trust_remote_code=False)
        with torch.device(device):
            return AutoModelForCausalLM.from_config(config, **options).eval()
    if device != "cpu":
        options["device_map"] = device
    options |= {"use_safetensors": True, "output_loading_info": True}
    module, loaded = AutoModelForCausalLM.from_pretrained(model, **options)
    if loaded["missing_keys"]:
        raise ValueError(f"{model}: its checkpoint has no {', '.join(sorted(loaded['missing_keys'])[:3])}")
    return module.eval()
