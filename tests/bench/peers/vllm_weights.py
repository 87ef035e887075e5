"""Random weights of vLLM's `load_format="dummy"` with the distribution that `bench --dummy-weights` has, so that both
programs route alike.

vLLM's own are within 1e-3, the weights of norms too. Then router logits are about 1e-5, the random correction bias of a
router (about 1e-3) decides alone, and every token goes to the same experts. Here the weights of norms are 1, everything
else is uniform with mean 0 and deviation 0.02, and packed floats of 4 bits stay random, with exponents that give them
nearly this deviation.
"""

import torch

BOUND = 0.02 * 3**0.5
E8M0_OF_FOUR_BITS = 120  # 2^-7


def is_norm(path, module):
    return "norm" in type(module).__name__.lower() or "norm" in path.rsplit(".", 1)[-1].lower()


@torch.no_grad()
def spread(model):
    """Fills the parameters of a model that vLLM has made and not yet packed."""
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            data = parameter.data
            if data.dtype == torch.uint8 and "scale" in name:
                data.fill_(E8M0_OF_FOUR_BITS)
            elif data.dtype in (torch.bfloat16, torch.float16, torch.float32):
                data.fill_(1.0) if is_norm(path, module) and data.dim() == 1 else data.uniform_(-BOUND, BOUND)


def install():
    """Replaces what fills the weights. Scripts call this at their top level, so that spawned processes call it, too."""
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    plain = DummyModelLoader.load_weights

    def load_weights(self, model, model_config):
        plain(self, model, model_config)
        spread(model)

    DummyModelLoader.load_weights = load_weights
