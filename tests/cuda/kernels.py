"""The decode kernels' launchers on torch tensors, guarded outputs and workspaces."""

import ctypes
import os

import torch
from library import Library, graph_us, ids_tensor, poison, sized

LIB = Library(os.environ.get("MOE_KERNELS_SO", "target/kernels/libmoe_kernels.so"))
LIB.lib.moe_attention_decode_workspace.restype = ctypes.c_size_t
NOTHING = -1  # u32::MAX in an int32 tensor
GUARD = 4096  # elements behind an output that must not change

call, refuses, u32 = LIB.launch, LIB.refused, ids_tensor


class Out:
    """A poisoned output with a guard zone behind it."""

    def __init__(self, shape, dtype):
        self.count = 1
        for d in shape:
            self.count *= d
        self.all = poison(self.count + GUARD, dtype=dtype)
        self.t = self.all[: self.count].view(shape)

    def check_guard(self):
        guard = self.all[self.count :]
        same = torch.isnan(guard) if guard.dtype.is_floating_point else guard == 0x5A5A5A5A
        assert bool(same.all()), "wrote behind the output"


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
