"""The head `mtp.*` of Qwen3-Next and Qwen3.5, which predicts the token after the next one. transformers leaves it out.

It is defined as vLLM 0.33 defines it (qwen3_next_mtp.py, qwen3_5_mtp.py). Row t has the hidden state of the model at
position t, after the last norm, and the embedding of the token at position t + 1. The two, each with a norm of its own,
embedding first, go through `fc`, a decoder layer with full attention at positions 0, 1, .. and a last norm. The
model's vocabulary projection gives the logits.
"""

import copy

import torch

from make_reference import gate, load, reset_rope
from stability import topk_sets
from tiny_checkpoints import build, hub_state


class Head:
    """A head with random weights of storage type `dtype`, for a model with these config values."""

    def __init__(self, values, dtype, seed):
        # A decoder of one layer has the head's layer and last norm; its embedding and projection are not used.
        one = {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
        self.decoder = build(values | one, dtype, seed)
        generator = torch.Generator().manual_seed(seed)
        hidden = values["hidden_size"]
        self.fc = (torch.randn(hidden, 2 * hidden, generator=generator) * hidden**-0.5).to(dtype)
        # Different means, so that norms in each other's place show.
        norms = [torch.randn(hidden, generator=generator) * 0.25 + mean for mean in (0.3, -0.2)]
        self.embedding_norm, self.hidden_norm = (norm.to(dtype) for norm in norms)

    def state(self, packed):
        """The tensors as published checkpoints have them."""
        state = {
            "mtp.fc.weight": self.fc,
            "mtp.pre_fc_norm_embedding.weight": self.embedding_norm,
            "mtp.pre_fc_norm_hidden.weight": self.hidden_norm,
        }
        for name, tensor in self.decoder.state_dict().items():
            if name.startswith(("model.layers.", "model.norm.")):
                state[name.replace("model.", "mtp.", 1)] = tensor.contiguous().clone()
        return state if packed else hub_state(state, tied=False)

    @torch.no_grad()
    def logits(self, model_dir, input_ids):
        """Logits [B, T - 1, V] f32 of the rows 0 .. T - 2, and the gap that decides a row's experts the least."""
        model = load(model_dir, torch.float32)
        reset_rope(model)
        hidden = model.model(input_ids, use_cache=False).last_hidden_state[:, :-1]
        embedded = model.model.embed_tokens(input_ids[:, 1:])
        eps = model.config.rms_norm_eps
        rows = [rms_norm(embedded, self.embedding_norm, eps), rms_norm(hidden, self.hidden_norm, eps)]
        rows = torch.cat(rows, -1) @ self.fc.float().T
        decoder = copy.deepcopy(self.decoder).float()
        decoder.set_attn_implementation("eager")
        decoder.set_experts_implementation("eager")
        reset_rope(decoder)
        gaps = []
        hook = gate(decoder, 0).register_forward_hook(
            lambda _module, _inputs, output: gaps.append(topk_sets(output[0].float(), decoder.config)[1])
        )
        last = decoder.model(inputs_embeds=rows, use_cache=False).last_hidden_state
        hook.remove()
        return model.lm_head(last).contiguous(), min(gaps)


def rms_norm(rows, weight, eps):
    """The norm of these families, which multiplies by 1 + weight."""
    return rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + eps) * (1 + weight.float())
