"""The kernels' launchers on torch tensors, and what several benches hand to them."""

import ctypes
import os
import struct

import torch
from library import Library, graph_us, ids_tensor

LIB = Library(os.environ.get("MOE_KERNELS_SO", "target/kernels/libmoe_kernels.so"))
LIB.lib.moe_attention_decode_workspace.restype = ctypes.c_size_t
PLAIN = (1.0, 0.0, 0.0, 0xFFFFFFFF, 0, 0, 0, 0)  # no penalties, no slot, no edits, no log-probabilities

call, u32 = LIB.launch, ids_tensor


def rel(out, ref):
    """|out - ref| / |ref|; inf if anything is not finite."""
    out, ref = out.double(), ref.double()
    if not bool(torch.isfinite(out).all()):
        return float("inf")
    norm = ref.norm().item()
    return (out - ref).norm().item() / norm if norm > 0 else out.norm().item()


def randn(*shape, scale=1.0, dtype=torch.bfloat16):
    return (torch.randn(*shape, device="cuda") * scale).to(dtype)


def attention_splits(rows, heads, kv_heads):
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    return LIB.lib.moe_attention_decode_splits(rows, heads, kv_heads, sms)


def attention_workspace(rows, heads, kv_heads, head_dim, splits):
    size = LIB.lib.moe_attention_decode_workspace(rows, heads, kv_heads, head_dim, splits)
    return torch.zeros(max(size, 16), dtype=torch.uint8, device="cuda")


def state_for(experts, inter):
    """The counters of the launch of a whole layer."""
    return torch.zeros(LIB.raw("moe_layer_stream_state", experts, inter), dtype=torch.uint8, device="cuda")


def pack_rows(params, extras=None):
    """SampleRow of sampling/sampling.cu: (temperature, k, p, min_p, seed, position) and what follows a slot."""
    rows = zip(params, extras or [PLAIN] * len(params))
    packed = b"".join(struct.pack("<fffIQQfffIIIII", t, p, m, k, seed, at, *more) for (t, k, p, m, seed, at), more in rows)
    return torch.frombuffer(bytearray(packed), dtype=torch.uint8).cuda()
