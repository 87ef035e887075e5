"""What describes one parity fixture."""

from dataclasses import dataclass, field

import torch


@dataclass
class Spec:
    """One fixture: the config, how it is stored, and how its reference is made."""

    base: dict  # config values that the family's fixtures share
    name: str
    covers: str
    seed: int
    config: dict = field(default_factory=dict)
    dtype: torch.dtype = torch.bfloat16
    layout: str = "hub"  # hub | hub-packed | saved | saved-packed
    shards: int = 1
    drop: tuple = ()  # keys left out of a hub-style config
    batch: int = 2
    length: int = 24
    generate: int = 16
    quant: str = ""  # a name in quant_checkpoints.SCHEMES
    published_type: str = ""  # the model_type of its config.json, where transformers has no class of this name
    composite: bool = False  # stored as the text part of a model that also has a vision part
    mtp: bool = False  # with the head mtp.* and its logits, `mtp_logits` in the reference
    f32_gates: bool = False  # gates with digits that bf16 does not hold, which tell pairs of experts apart
    text: bool = False  # with a tokenizer and worked text generations

    def config_values(self):
        """The fixture's config on top of the common one."""
        return self.base | self.config
