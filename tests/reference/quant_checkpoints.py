"""Quantised checkpoints of tiny models, and the float models that they stand for.

`quantise` rounds the projections of a model to nearest in one of `SCHEMES`. It returns what the checkpoint holds and leaves
in the model what the integers mean, in f32, so that transformers can run it. The packing is that of `quant_packers`; no
reader of this project takes part.
"""

import copy
import re
from dataclasses import dataclass

import torch

import quant_packers as pack
from tiny_checkpoints import build, hub_config, hub_state, write_json

PROJECTION = re.compile(r"_proj(_with_mqa)?\.weight$")
# e4m3fn has no infinities: 448 is its largest number.
LARGEST_FP8 = 448.0


@dataclass(frozen=True)
class Scheme:
    """How weights are rounded and packed; `group` -1 is one scale for each row."""

    header: dict
    form: str  # gptq | awq | pack-quantized | fp8
    bits: int = 4
    group: int = 32
    asymmetric: bool = False
    act_order: bool = False
    version: int = 1  # of GPTQ's zero points
    block: tuple = ()  # of FP8 scales; none: one for each row
    scale: torch.dtype = torch.float16


def compressed(form, **weights):
    group = {"targets": ["Linear"], "input_activations": None, "weights": {"dynamic": False} | weights}
    return {
        "quant_method": "compressed-tensors", "format": form, "quantization_status": "compressed",
        "ignore": ["lm_head", "re:.*mlp.gate$"], "config_groups": {"group_0": group},
    }  # fmt: skip


def gptq(bits, group, **options):
    return {"quant_method": "gptq", "bits": bits, "group_size": group} | options


SCHEMES = {
    "gptq-int4-act-order": Scheme(
        gptq(4, 32, sym=True, desc_act=True, checkpoint_format="gptq"), "gptq", act_order=True
    ),
    "gptq-int4-asym-v2": Scheme(
        gptq(4, 32, sym=False, desc_act=False, checkpoint_format="gptq_v2"), "gptq", asymmetric=True, version=2
    ),
    "gptq-int8-channel": Scheme(
        gptq(8, -1, sym=True, desc_act=False, checkpoint_format="gptq"), "gptq", bits=8, group=-1
    ),
    "awq": Scheme(
        {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm",
         "modules_to_not_convert": ["gate"]},
        "awq", asymmetric=True,
    ),  # fmt: skip
    "auto-round": Scheme(
        {"quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": True, "data_type": "int",
         "packing_format": "auto_round:auto_gptq"},
        "gptq",
    ),  # fmt: skip
    "compressed-int4-asym": Scheme(
        compressed("pack-quantized", num_bits=4, type="int", symmetric=False, strategy="group", group_size=32),
        "pack-quantized", asymmetric=True, scale=torch.bfloat16,
    ),  # fmt: skip
    "compressed-int8-channel": Scheme(
        compressed("pack-quantized", num_bits=8, type="int", symmetric=True, strategy="channel"),
        "pack-quantized", bits=8, group=-1, scale=torch.bfloat16,
    ),  # fmt: skip
    "compressed-fp8-channel": Scheme(
        compressed("float-quantized", num_bits=8, type="float", symmetric=True, strategy="channel"),
        "fp8", bits=8, scale=torch.bfloat16,
    ),  # fmt: skip
    "fp8-block": Scheme(
        {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [16, 32],
         "modules_to_not_convert": ["lm_head"]},
        "fp8", bits=8, block=(16, 32), scale=torch.float32,
    ),  # fmt: skip
}


def integers(weight, scheme, seed):
    """Codes [N, K], zero points and scales [N, groups], and the group of each column."""
    n, k = weight.shape
    size = k if scheme.group == -1 else scheme.group
    g_idx = torch.arange(k) // size
    if scheme.act_order:
        g_idx = g_idx[torch.randperm(k, generator=torch.Generator().manual_seed(seed))]
    groups = [weight[:, g_idx == g] for g in range(k // size)]
    top, middle = 2**scheme.bits - 1, 2 ** (scheme.bits - 1)
    scales, zeros = [], []
    for group in groups:
        low, high = group.amin(1).clamp(max=0), group.amax(1).clamp(min=0)
        span = (high - low) / top if scheme.asymmetric else group.abs().amax(1) / (middle - 1)
        scale = span.clamp(min=1e-4).to(scheme.scale).float()
        # At least 1: readers disagree about GPTQ's stored -1.
        zero = (-low / scale).round().clamp(1, top) if scheme.asymmetric else torch.full((n,), float(middle))
        scales.append(scale)
        zeros.append(zero)
    scales, zeros = torch.stack(scales, 1), torch.stack(zeros, 1)
    codes = (weight / scales[:, g_idx] + zeros[:, g_idx]).round().clamp(0, top)
    return codes.int(), zeros.int(), scales, g_idx


def pack_integers(weight, scheme, seed):
    """The tensors of one projection by suffix, and the weights that they mean."""
    codes, zeros, scales, g_idx = integers(weight, scheme, seed)
    meaning = scales[:, g_idx] * (codes - zeros[:, g_idx])
    codes, zeros, factors = codes.tolist(), zeros.tolist(), scales.tolist()
    if scheme.form == "awq":
        return pack.awq(codes, zeros, factors), meaning
    if scheme.form == "gptq":
        order = None if scheme.header["quant_method"] == "auto-round" else g_idx.tolist()
        return pack.gptq(codes, zeros, factors, order, scheme.bits, scheme.version), meaning
    packed = pack.pack_quantized(codes, zeros, factors, None, scheme.bits, scheme.asymmetric)
    return packed, meaning


def pack_fp8(weight, scheme):
    """The same for FP8 with a scale for each block or row."""
    n, k = weight.shape
    rows, columns = scheme.block or (1, k)
    grid = torch.zeros(-(-n // rows), -(-k // columns))
    for i in range(grid.shape[0]):
        for j in range(grid.shape[1]):
            part = weight[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns]
            grid[i, j] = (part.abs().max() / LARGEST_FP8).clamp(min=1e-6)
    grid = grid.to(scheme.scale).float()
    spread = grid.repeat_interleave(rows, 0)[:n].repeat_interleave(columns, 1)[:, :k]
    codes = (weight / spread).clamp(-LARGEST_FP8, LARGEST_FP8).to(torch.float8_e4m3fn)
    name, dtype = ("weight_scale_inv", "F32") if scheme.block else ("weight_scale", "BF16")
    packed = {"weight": pack.raw(codes.view(torch.uint8).tolist()), name: pack.floats(grid.tolist(), dtype)}
    return packed, codes.float() * spread


def plain(tensor):
    """A tensor that stays in bf16."""
    data = tensor.to(torch.bfloat16).contiguous().view(torch.int16).numpy().tobytes()
    return ("BF16", list(tensor.shape), data)


def quantise(model, scheme):
    """The tensors of the quantised checkpoint; the model becomes, in f32, the one that they mean."""
    state = hub_state(model.float().state_dict(), model.config.tie_word_embeddings)
    tensors = {}
    for seed, name in enumerate(sorted(state)):
        if not PROJECTION.search(name):
            tensors[name] = plain(state[name])
            continue
        fp8 = scheme.form == "fp8"
        packed, state[name] = pack_fp8(state[name], scheme) if fp8 else pack_integers(state[name], scheme, seed)
        prefix = name.removesuffix("weight")
        tensors |= {prefix + suffix: tensor for suffix, tensor in packed.items()}
    put_back(model, state)
    return tensors


def reference_model(spec, seed):
    """The model whose logits a fixture's reference holds."""
    model = build(copy.deepcopy(spec.config_values()), spec.dtype, seed)
    if spec.quant:
        quantise(model, SCHEMES[spec.quant])
    return model


def write_quantised(spec, model, directory):
    """The quantised checkpoint; leaves in the model what it means."""
    scheme = SCHEMES[spec.quant]
    config = hub_config(copy.deepcopy(spec.config_values()), torch.bfloat16, spec.drop)
    write_json(directory / "config.json", config | {"quantization_config": scheme.header})
    pack.write(directory / "model.safetensors", quantise(model, scheme), {"format": "pt"})


def put_back(model, state):
    """Gives a model the tensors of `hub_state`."""
    for name, tensor in model.state_dict().items():
        prefix = name.rsplit(".", 1)[0]
        expert = lambda e, projection: state[f"{prefix}.{e}.{projection}.weight"]
        if name.endswith("experts.gate_up_proj"):
            parts = [torch.cat((expert(e, "gate_proj"), expert(e, "up_proj"))) for e in range(len(tensor))]
            tensor.copy_(torch.stack(parts))
        elif name.endswith("experts.down_proj"):
            tensor.copy_(torch.stack([expert(e, "down_proj") for e in range(len(tensor))]))
        elif name in state:
            tensor.copy_(state[name])
