"""What references need to know of a model family."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Family:
    """What differs between families."""

    config: type
    model: type
    rotary: type
    sparse_block: type
    # Keys of a published config.json in their order, and the values of those that a fixture leaves out.
    hub_keys: tuple
    hub_defaults: dict = field(default_factory=dict)
    # Parts of names of tensors in published checkpoints, in the place of transformers' own.
    hub_names: dict = field(default_factory=dict)
    # What the sparse block calls its router.
    gate: str = "gate"

    def hub_name(self, name):
        """What a published checkpoint calls a tensor that transformers 5 calls `name`."""
        for own, published in self.hub_names.items():
            name = name.replace(own, published)
        return name

    def moe_layers(self, model):
        """Decoder indices of the layers whose MLP is a sparse MoE block."""
        layers = enumerate(model.model.layers)
        return [i for i, layer in layers if isinstance(layer.mlp, self.sparse_block)]
