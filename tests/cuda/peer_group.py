"""The ranks of a group over peer memory, all on one GPU, and the structures that their launchers take."""
import ctypes
import os

# Streams that shared a queue would wait for each other.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")

import torch
from kernels import LIB

MAX_RANKS = 8
CAPACITY = 2 << 20  # PeerAllReduce::CAPACITY


class Peers(ctypes.Structure):
    _fields_ = [("buffer", ctypes.c_uint64 * MAX_RANKS), ("status", ctypes.c_uint64), ("limit", ctypes.c_uint64),
                ("capacity", ctypes.c_uint64), ("rank", ctypes.c_int32), ("ranks", ctypes.c_int32)]


class PeerArray(ctypes.Structure):
    _fields_ = [("input", ctypes.c_void_p), ("out", ctypes.c_void_p), ("slots", ctypes.c_uint32 * MAX_RANKS),
                ("exact", ctypes.c_uint32)]


class Needs(ctypes.Structure):
    _fields_ = [("ids", ctypes.c_void_p), ("owners", ctypes.c_void_p), ("top_k", ctypes.c_uint32), ("experts", ctypes.c_uint32),
                ("row_slots", ctypes.c_uint32)]


class PeerTokens(ctypes.Structure):
    _fields_ = [("rows", ctypes.c_void_p), ("all_rows", ctypes.c_void_p), ("ids", ctypes.c_void_p), ("all_ids", ctypes.c_void_p),
                ("weights", ctypes.c_void_p), ("all_weights", ctypes.c_void_p), ("owners", ctypes.c_void_p),
                ("counts", ctypes.c_uint32 * MAX_RANKS), ("row_slots", ctypes.c_uint32), ("top_k", ctypes.c_uint32),
                ("experts", ctypes.c_uint32)]


class Group:
    """The ranks of a group, with their streams."""

    def __init__(self, ranks, seconds=20.0):
        LIB.lib.moe_peer_buffer_bytes.restype = ctypes.c_size_t
        size = LIB.lib.moe_peer_buffer_bytes(ranks, ctypes.c_size_t(CAPACITY))
        assert size > 0
        self.ranks = ranks
        self.streams = [torch.cuda.Stream() for _ in range(ranks)]
        self.memory = [torch.empty(size, dtype=torch.uint8, device="cuda") for _ in range(ranks)]
        self.status = torch.zeros(ranks, 16, dtype=torch.int32).pin_memory()
        addresses = [m.data_ptr() for m in self.memory] + [0] * (MAX_RANKS - ranks)
        self.peers = [Peers((ctypes.c_uint64 * MAX_RANKS)(*addresses), self.status[rank].data_ptr(), int(seconds * 1e9), CAPACITY,
                            rank, ranks) for rank in range(ranks)]
        for memory in self.memory:
            assert LIB.lib.moe_peer_buffer_init(ctypes.c_void_p(memory.data_ptr()), ctypes.c_size_t(size), None) == 0
        torch.cuda.synchronize()

    def launch(self, rank, name, *args):
        stream = ctypes.c_void_p(self.streams[rank].cuda_stream)
        code = LIB.raw(name, ctypes.byref(self.peers[rank]), *args, stream)
        assert code == 0, f"{name} returned CUDA error {code}"

    def finish(self):
        torch.cuda.synchronize()
        assert not self.status.any(), f"somebody was waited for in vain: {self.status[:, 0].tolist()}"


def scatter(group, rank, sums, own, counts, needs):
    """Sums in f32 or bf16 to the ranks that own the rows."""
    per_row, narrow = sums.shape[1] * sums.element_size() // 16, int(sums.dtype == torch.bfloat16)
    slots = (ctypes.c_uint32 * MAX_RANKS)(*[n * per_row for n in counts])
    group.launch(rank, "moe_peer_reduce_scatter", sums, narrow, own, slots, needs)


def sum_of(sums):
    """The sum in rank order, in f32."""
    added = sums[0].float()
    for other in sums[1:]:
        added = added + other.float()
    return added
