"""Times the experts of a sparse layer whose tokens come from several GPUs: gather, lists, products, sums back, norm.
All GPUs of this process are ranks, a stream each; sums return by three launches and by one, in alternation in one call.

  MOE_KERNELS_SO=libmoe_kernels.so python bench_ranks.py [ROWS A RANK ..]
"""
import ctypes
import statistics
import sys

import torch
from kernels import LIB
from library import F32, filled, routing
from peers import CAPACITY, MAX_RANKS, PeerArray, Peers

H, I, E, K, LAYERS = 2048, 768, 128, 8, 12
RANKS = torch.cuda.device_count()


class Rank:
    def __init__(self, rank, rows):
        self.rank, self.rows, self.total, self.local = rank, rows, rows * RANKS, E // RANKS
        with torch.cuda.device(rank):
            new = lambda *shape, dtype=torch.bfloat16: torch.zeros(*shape, dtype=dtype, device="cuda")
            size = LIB.lib.moe_peer_buffer_bytes(RANKS, ctypes.c_size_t(CAPACITY))
            self.memory, self.size = new(size, dtype=torch.uint8), size
            self.status = torch.zeros(16, dtype=torch.int32).pin_memory()
            self.w13 = [torch.randn(self.local, 2 * I, H, device="cuda", dtype=torch.bfloat16) * 0.02 for _ in range(LAYERS)]
            self.w2 = [torch.randn(self.local, H, I, device="cuda", dtype=torch.bfloat16) * 0.02 for _ in range(LAYERS)]
            self.map = torch.full((E,), -1, dtype=torch.int32, device="cuda")
            self.map[rank * self.local:(rank + 1) * self.local] = torch.arange(self.local, dtype=torch.int32, device="cuda")
            self.gain = torch.ones(H, dtype=torch.bfloat16, device="cuda")
            torch.manual_seed(1 + rank)
            self.routing = [routing(rows, E, K) for _ in range(LAYERS)]
            self.x, self.residual = torch.randn(rows, H, device="cuda").bfloat16(), new(rows, H, dtype=torch.float32)
            self.rows_in, self.ids = new(self.total, H), new(self.total, K, dtype=torch.int32)
            self.weights, self.sums = new(self.total, K, dtype=torch.float32), new(self.total, H, dtype=torch.float32)
            self.counts = new(self.local, dtype=torch.int32)
            self.lists = new(self.local, self.total * K, dtype=torch.int32)
            self.act, self.slots = new(self.total * K, I), new(self.total * K, H, dtype=torch.float32)
            self.delta = new(rows, H, dtype=torch.float32)
            words = LIB.lib.moe_experts_tensor_counters(self.local)
            self.counters = new(words, dtype=torch.int32)
            self.stream = torch.cuda.Stream()

    def join(self, addresses):
        self.peers = Peers((ctypes.c_uint64 * MAX_RANKS)(*addresses, *[0] * (MAX_RANKS - RANKS)), self.status.data_ptr(), int(2e9),
                           CAPACITY, self.rank, RANKS)

    def call(self, name, *args):
        code = LIB.raw(name, *args, ctypes.c_void_p(torch.cuda.current_stream().cuda_stream))
        assert code == 0, f"{name}: {code}"

    def gather(self, layer):
        ids, weights = self.routing[layer]
        arrays = (PeerArray * 3)()
        for array, part, out, slots in zip(arrays, (ids, self.x, weights), (self.ids, self.rows_in, self.weights), (K // 2, H // 8, K // 4)):
            array.input, array.out, array.exact = part.data_ptr(), out.data_ptr(), int(part.dtype == torch.int32)
            array.slots = (ctypes.c_uint32 * MAX_RANKS)(*[self.rows * slots] * RANKS)
        self.call("moe_peer_all_gather", ctypes.byref(self.peers), arrays, 3, None)

    def layer(self, layer, ends):
        self.gather(layer)
        self.call("moe_any_list_slots", self.ids, self.map, self.total * K, E, self.local, self.counts, self.lists)
        self.call("moe_experts_tensor", self.rows_in, self.w13[layer], self.w2[layer], self.lists, self.counts, self.total * K, self.act,
                  self.slots, self.counters, self.total, K, E, self.local, H, I)
        ends(self)

    def apart(self):
        self.call("moe_combine", self.slots, self.ids, self.weights, self.map, self.sums, self.total, K, E, self.local, H, F32, F32)
        slots = (ctypes.c_uint32 * MAX_RANKS)(*[self.rows * H // 4] * RANKS)
        self.call("moe_peer_reduce_scatter", ctypes.byref(self.peers), self.sums, 0, self.delta, slots, None)
        self.call("moe_add_rms_norm", self.delta, self.residual, self.gain, 1e-6, self.x, self.rows, H)

    def together(self):
        slots = filled("moe_combine", self.slots, self.ids, self.weights, self.map, None, self.total, K, E, self.local, H, F32, F32)
        counts = (ctypes.c_uint32 * MAX_RANKS)(*[self.rows] * RANKS)
        self.call("moe_peer_combine_add_rms_norm", ctypes.byref(self.peers), ctypes.byref(slots), counts, self.residual, self.gain, 1e-6,
                  self.x)

    def capture(self, ends):
        with torch.cuda.device(self.rank):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=self.stream):
                for layer in range(LAYERS):
                    self.layer(layer, ends)
            return graph


def everywhere(ranks, work):
    for r in ranks:
        with torch.cuda.device(r.rank), torch.cuda.stream(r.stream):
            work(r)
    for r in ranks:
        torch.cuda.synchronize(r.rank)
        assert not r.status.any(), f"rank {r.rank} waited in vain: {r.status[0]}"


def time(ranks, graphs):
    def replay(r):
        r.begin, r.end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        r.begin.record()
        graphs[r.rank].replay()
        r.end.record()
    everywhere(ranks, replay)
    return min(r.begin.elapsed_time(r.end) for r in ranks) * 1e3 / LAYERS


def bench(rows):
    ranks = [Rank(r, rows) for r in range(RANKS)]
    for r in ranks:
        r.join([other.memory.data_ptr() for other in ranks])
    everywhere(ranks, lambda r: r.call("moe_peer_buffer_init", r.memory, ctypes.c_size_t(r.size)))
    start = [r.x.clone() for r in ranks]
    results = {}
    for name, ends in (("apart", Rank.apart), ("together", Rank.together)):
        for r, x in zip(ranks, start):
            r.x.copy_(x), r.residual.zero_()
        everywhere(ranks, lambda r: [r.layer(layer, ends) for layer in range(LAYERS)])
        results[name] = [(r.x.clone(), r.residual.clone()) for r in ranks]
    same = all(torch.equal(a, b) for one, other in zip(*results.values()) for a, b in zip(one, other))
    graphs = {name: [r.capture(ends) for r in ranks] for name, ends in (("apart", Rank.apart), ("together", Rank.together))}
    times = {name: [] for name in graphs}
    for _ in range(30):
        for name in graphs:
            times[name].append(time(ranks, graphs[name]))
    apart, together = (statistics.median(times[name][5:]) for name in ("apart", "together"))
    print(f"{RANKS} ranks x {rows:4} rows: us a layer apart {apart:6.1f} together {together:6.1f} ({together - apart:+.1f}), "
          f"{'the same bits' if same else 'OTHER BITS'}", flush=True)


if __name__ == "__main__":
    LIB.lib.moe_peer_buffer_bytes.restype = ctypes.c_size_t
    for a in range(RANKS):
        for b in range(RANKS):
            if a != b:  # with the first copy torch enables access between two GPUs
                torch.ones(1 << 20, device=f"cuda:{a}").to(f"cuda:{b}")
    for rows in map(int, sys.argv[1:] or (8, 16, 32, 64, 128)):
        bench(rows)
