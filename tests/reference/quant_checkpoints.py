"""Quantised checkpoints of tiny models, and the float models that they stand for.

`quantise` rounds the projections of a model to nearest in one of `SCHEMES`. It returns what the checkpoint holds and
leaves in the model what the integers mean, in f32, so that transformers can run it. The packing is that of
`quant_packers`; no reader of this project takes part.
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
    form: str  # gptq | awq | pack-quantized | fp8 | mxfp4 | nvfp4
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
    "modelopt-nvfp4": Scheme(
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "producer": {"name": "modelopt", "version": "0.40.0"},
         "ignore": ["lm_head", "model.layers.*.mlp.gate"], "kv_cache_scheme": {"num_bits": 8, "type": "float"}},
        "nvfp4",
    ),  # fmt: skip
    "compressed-nvfp4": Scheme(
        compressed("nvfp4-pack-quantized", num_bits=4, type="float", symmetric=True, strategy="tensor_group",
                   group_size=16),
        "nvfp4",
    ),  # fmt: skip
    "mxfp4": Scheme(
        {"quant_method": "mxfp4", "modules_to_not_convert": [
            "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]},
        "mxfp4",
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


def nearest_e2m1(scaled):
    """The nearest values of E2M1, and their codes."""
    values = torch.tensor(pack.E2M1)
    nearest = (scaled.abs().clamp(max=6.0).unsqueeze(-1) - values).abs().argmin(-1)
    return values[nearest] * scaled.sign(), nearest + 8 * (scaled < 0)


def pack_nvfp4(weight, scheme):
    """The tensors of one projection in NVFP4 by suffix, and the weights that they mean."""
    modelopt = scheme.header["quant_method"] == "modelopt"
    blocks = weight.unflatten(-1, (-1, 16))
    # The largest block has the largest scale.
    factor = (weight.abs().max() / (6.0 * LARGEST_FP8)).float()
    # compressed-tensors stores the reciprocal, which is rounded, and readers invert it again.
    meant = factor if modelopt else 1 / (1 / factor)
    scales = (blocks.abs().amax(-1) / 6.0 / meant).clamp(max=LARGEST_FP8).to(torch.float8_e4m3fn)
    spread = (scales.float() * meant).unsqueeze(-1)
    # A scale that is too small for its dtype is 0, and so are its weights.
    values, codes = nearest_e2m1(torch.where(spread > 0, blocks / spread, 0.0))
    stored = pack.nvfp4(codes.flatten(-2).tolist(), scales.view(torch.uint8).tolist(), factor.item(), modelopt)
    # Of activations, which readers of weights alone ignore.
    stored["input_scale" if modelopt else "input_global_scale"] = pack.floats([[0.5]], "F32", [] if modelopt else [1])
    return stored, (values * spread).flatten(-2)


def mxfp4(pack_of_experts):
    """The tensors of a pack [E, N, K] in gpt-oss's container by suffix, and the weights that they mean."""
    blocks = pack_of_experts.unflatten(-1, (-1, 32))
    # The largest number of four bits is 6, in the binade of 4.
    exponent = blocks.abs().amax(-1).clamp(min=1e-30).log2().floor() - 2
    scale = exponent.exp2().unsqueeze(-1)
    values, codes = nearest_e2m1(blocks / scale)
    meaning = (values * scale).flatten(-2)
    stored = {
        "_blocks": pack.bytes_of(codes[..., 0::2] + 16 * codes[..., 1::2]),
        "_scales": pack.bytes_of(exponent + 127),
    }
    return stored, meaning


def quantise_packs(model):
    """`quantise` for experts that are packed by columns."""
    tensors = {}
    for name, tensor in sorted(model.float().state_dict().items()):
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            stored, meaning = mxfp4(tensor.transpose(1, 2))
            tensor.copy_(meaning.transpose(1, 2))
            tensors |= {name + suffix: part for suffix, part in stored.items()}
        else:
            tensor.copy_(tensor.to(torch.bfloat16))
            tensors[name] = plain(tensor)
    return tensors


def plain(tensor):
    """A tensor that stays in bf16."""
    data = tensor.to(torch.bfloat16).contiguous().view(torch.int16).numpy().tobytes()
    return ("BF16", list(tensor.shape), data)


def quantise(model, scheme):
    """The tensors of the quantised checkpoint; the model becomes, in f32, the one that they mean."""
    if scheme.form == "mxfp4":
        return quantise_packs(model)
    state = hub_state(model.float().state_dict(), model.config.tie_word_embeddings)
    tensors = {}
    for seed, name in enumerate(sorted(state)):
        if not PROJECTION.search(name):
            tensors[name] = plain(state[name])
            continue
        match scheme.form:
            case "fp8":
                packed, state[name] = pack_fp8(state[name], scheme)
            case "nvfp4":
                packed, state[name] = pack_nvfp4(state[name], scheme)
            case _:
                packed, state[name] = pack_integers(state[name], scheme, seed)
        prefix = name.removesuffix("weight")
        tensors |= {prefix + suffix: tensor for suffix, tensor in packed.items()}
    put_back(model, state)
    return tensors


def reference_model(spec, seed):
    """The model whose logits a fixture's reference holds."""
    model = build(copy.deepcopy(spec.config_values()), spec.dtype, seed, spec.f32_gates)
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
