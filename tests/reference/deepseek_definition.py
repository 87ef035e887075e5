"""The three options of DeepSeek-V2 configs that transformers 5.17 reads past, defined here.

`norm_topk_prob`, `scoring_func` and `moe_layer_freq` change nothing in transformers' deepseek_v2.
`install` gives its modules what these options mean; a config that leaves them at their defaults runs
transformers' own code, untouched. The routing is written token by token in plain Python and f64, so
that it shares nothing with the implementation under test but the rule:

* scores are the softmax of the logits, or their sigmoid;
* `group_limited_greedy` keeps the `topk_group` groups with the best single score;
* the k best scores are the weights; `norm_topk_prob` divides them by their sum; then
  `routed_scaling_factor` multiplies them (vLLM's order);
* a layer is sparse from `first_k_dense_replace` on if its index is a multiple of `moe_layer_freq`.
"""

import math

import torch
from transformers.models.deepseek_v2 import modeling_deepseek_v2 as deepseek_v2


def scores_of(logits, scoring):
    """Scores of one token's logits."""
    if scoring == "sigmoid":
        return [1.0 / (1.0 + math.exp(-x)) for x in logits]
    top = max(logits)
    exps = [math.exp(x - top) for x in logits]
    return [x / sum(exps) for x in exps]


def route(logits, config):
    """(ids, weights) of one token."""
    scores = scores_of(logits, getattr(config, "scoring_func", "softmax"))
    allowed = range(len(scores))
    if config.topk_method == "group_limited_greedy":
        size = len(scores) // config.n_group
        best = [max(scores[g * size : (g + 1) * size]) for g in range(config.n_group)]
        kept = sorted(range(config.n_group), key=lambda g: -best[g])[: config.topk_group]
        allowed = [e for e in allowed if e // size in kept]
    ids = sorted(allowed, key=lambda e: -scores[e])[: config.num_experts_per_tok]
    weights = [scores[e] for e in ids]
    if config.norm_topk_prob:
        weights = [w / sum(weights) for w in weights]
    return ids, [w * config.routed_scaling_factor for w in weights]


def routes_itself(config):
    """Whether transformers' own router means what the config says."""
    return not config.norm_topk_prob and getattr(config, "scoring_func", "softmax") == "softmax"


def install():
    """Replaces the methods of transformers' classes where a config asks for the options."""
    router, layer = deepseek_v2.DeepseekV2TopkRouter, deepseek_v2.DeepseekV2DecoderLayer
    router_init, router_forward, layer_init = router.__init__, router.forward, layer.__init__

    def init_router(self, config):
        router_init(self, config)
        self.config = config

    def forward_router(self, hidden_states):
        logits, weights, ids = router_forward(self, hidden_states)
        if routes_itself(self.config):
            return logits, weights, ids
        rows = [route(row, self.config) for row in logits.double().tolist()]
        ids = torch.tensor([row[0] for row in rows])
        return logits, torch.tensor([row[1] for row in rows], dtype=torch.float32), ids

    def init_layer(self, config, layer_idx):
        layer_init(self, config, layer_idx)
        if layer_idx % max(getattr(config, "moe_layer_freq", 1), 1) != 0:
            self.mlp = deepseek_v2.DeepseekV2MLP(config)

    router.__init__, router.forward, layer.__init__ = init_router, forward_router, init_layer
