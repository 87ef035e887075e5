"""Checkpoints rounded to nearest on a GPU: one that is packed, and the float one that it stands for.

  python quantise.py FOLDER gptq-int4-channel|gptq-int4-g64|gptq-int4-g128|gptq-int4-act-order|fp8-block     writes
  FOLDER-packed and FOLDER-meant

midsize.py and ranks_quantised.sh use it. The packing is of the definitions in tests/reference/quant_packers.py, in
torch on the GPU; no reader of this project takes part.
"""
import json
import re
import shutil
import sys
import zlib
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

# Attention and experts are quantised; router, embedding, norms and vocabulary stay in floats.
PROJECTION = re.compile(r"_proj(_with_mqa)?\.weight$")
BLOCK, LARGEST_FP8 = 128, 448.0


def gptq_int4(weight, group, order=None):
    """Quantises [N, K] to GPTQ's words of eight rows of K, f16 scales [groups, N] and zero points 8 (stored as 7).
    Returns these and the floats that they stand for. Groups follow the columns in `order`, if it is given; the last one
    may be shorter."""
    n, k = weight.shape
    order = torch.arange(k, device=weight.device) if order is None else order
    group = k if group == -1 else group
    groups, back = -(-k // group), order.argsort()
    grouped = torch.nn.functional.pad(weight.float()[:, order], (0, groups * group - k)).view(n, groups, group)
    scale = (grouped.abs().amax(-1, keepdim=True) / 7).clamp(min=1e-4).half().float()
    codes = (grouped / scale + 8).round().clamp(0, 15)
    meaning = ((codes - 8) * scale).view(n, -1)[:, back]
    codes = codes.view(n, -1)[:, back]
    nibbles = codes.view(n, k).T.to(torch.int64).view(k // 8, 8, n)
    words = sum(nibbles[:, i] << (4 * i) for i in range(8))
    words = torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)
    zeros = torch.full((groups, n // 8), 0x77777777, dtype=torch.int32)
    packed = {"qweight": words.contiguous(), "qzeros": zeros, "scales": scale.view(n, -1).T.contiguous().half()}
    return packed | {"g_idx": (back // group).to(torch.int32)}, meaning


def order_of(name, columns, device):
    """A random order of columns, the same for the projections that read the same rows."""
    key = name.split("_proj")[0]
    for same in ("q", "k", "v"), ("gate", "up"):
        key = next((key.removesuffix(own) + same[0] for own in same if key.endswith("." + own)), key)
    return torch.randperm(columns, generator=torch.Generator().manual_seed(zlib.crc32(key.encode()))).to(device)


def fp8_block(weight, *_):
    """[N, K] as E4M3 with an f32 scale for each 128 x 128; and what they mean."""
    n, k = weight.shape
    padded = torch.zeros(-(-n // BLOCK) * BLOCK, -(-k // BLOCK) * BLOCK, device=weight.device)
    padded[:n, :k] = weight.float()
    blocks = padded.view(-1, BLOCK, padded.shape[1] // BLOCK, BLOCK)
    grid = (blocks.abs().amax((1, 3)) / LARGEST_FP8).clamp(min=1e-6)
    spread = grid.repeat_interleave(BLOCK, 0)[:n].repeat_interleave(BLOCK, 1)[:, :k]
    codes = (weight.float() / spread).clamp(-LARGEST_FP8, LARGEST_FP8).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale_inv": grid}, codes.float() * spread


# By name: the packing, the columns of a group (-1: whole rows), and the header. Rows of 704 columns cannot have groups
# of 128.
SCHEMES = {
    name: (gptq_int4, group, {"quant_method": "gptq", "bits": 4, "group_size": group, "sym": True, "desc_act": False})
    for name, group in (("gptq-int4-channel", -1), ("gptq-int4-g64", 64), ("gptq-int4-g128", 128))
} | {
    "gptq-int4-act-order": (gptq_int4, 32, {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": True}),
    "fp8-block": (fp8_block, BLOCK, {
        "quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [BLOCK, BLOCK],
        "modules_to_not_convert": ["lm_head"],
    }),
}  # fmt: skip


def quantise(folder, scheme):
    """Quantises a float checkpoint. Returns the folder of the quantised one, and the folder of the floats that it
    stands for."""
    pack, group, header = SCHEMES[scheme]
    packed_folder, meant_folder = folder.with_name(folder.name + "-packed"), folder.with_name(folder.name + "-meant")
    packed, meant = {}, {}
    for shard in sorted(folder.glob("model*.safetensors")):
        for name, tensor in load_file(shard, device="cuda").items():
            if not PROJECTION.search(name):
                packed[name] = meant[name] = tensor.cpu()
                continue
            order = order_of(name, tensor.shape[1], tensor.device) if header.get("desc_act") else None
            tensors, meaning = pack(tensor, group, order)
            packed |= {name.removesuffix("weight") + suffix: t.cpu().contiguous() for suffix, t in tensors.items()}
            meant[name] = meaning.cpu()
    config = json.loads((folder / "config.json").read_text())
    for target, tensors, extra in ((packed_folder, packed, {"quantization_config": header}), (meant_folder, meant, {})):
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(parents=True)
        save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
        for file in (f for f in folder.glob("*token*.json") if f.is_file()):
            shutil.copy(file, target)
        (target / "config.json").write_text(json.dumps(config | extra))
    return packed_folder, meant_folder


if __name__ == "__main__":
    print(*quantise(Path(sys.argv[1]), sys.argv[2]), sep="\n")
