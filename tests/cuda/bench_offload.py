"""How fast experts change places between slots of the device and host memory, compared with the copy engine; and sums
of their words."""
import ctypes

import torch
from kernels import LIB, graph_us

EXPERTS, SLOTS = 96, 48
LENS = (2 * 768 * 2048 * 2, 768 * 2048 * 2)  # bytes of the two packs of an expert of Qwen3-30B-A3B
SIZE = sum(LENS)


def ints(*shape):
    return torch.zeros(*shape, dtype=torch.int32, device="cuda")


def row(rows, name, us, size=0):
    rows.append({"name": name, "us": us, "bytes": size})
    print(f"{name:40} {us:9.2f} us {size / us / 1e3:7.1f} GB/s", flush=True)


def expert_offload(rows):
    """Exchanges by how many experts change places, and the choice of who does."""
    w13, w2 = (torch.zeros(SLOTS, n // 4, dtype=torch.int32, device="cuda") for n in LENS)
    homes = torch.zeros(EXPERTS - SLOTS, SIZE // 4, dtype=torch.int32).pin_memory()
    exchanges = ints(1 + 2 * SLOTS)
    for count in (0, 1, 4, 8, 32):
        exchanges[: 1 + 2 * count] = torch.tensor([count] + [x for i in range(count) for x in (i, i)], dtype=torch.int32)
        exchange = lambda: LIB.launch("moe_expert_exchange", exchanges, w13, w2, homes.data_ptr(), *LENS)
        row(rows, f"exchange of {count} experts, each way", graph_us([exchange] * 4, 5), count * SIZE)
    place = torch.tensor([e if e < SLOTS else SLOTS - 1 - e for e in range(EXPERTS)], dtype=torch.int32, device="cuda")
    held, counts = torch.arange(SLOTS, dtype=torch.int32, device="cuda"), torch.zeros(2, dtype=torch.int64, device="cuda")
    state = place, ints(EXPERTS), held, ints(EXPERTS), ints(EXPERTS), exchanges, counts
    for count in (1, 8, 64, 512, 65536):
        ids = torch.randint(0, EXPERTS, (count,), dtype=torch.int32, device="cuda")
        choose = lambda: LIB.launch("moe_expert_residency", ids, *state, count, EXPERTS, SLOTS, 1)
        row(rows, f"residency of {count} choices", graph_us([choose] * 8, 5))
    down, up = (torch.empty(SIZE * 8, dtype=torch.uint8, device="cuda") for _ in range(2))
    host = [torch.empty(SIZE * 8, dtype=torch.uint8).pin_memory() for _ in range(2)]
    side = torch.cuda.Stream()
    for name, there, back in (("to the device", True, False), ("from the device", False, True), ("both ways", True, True)):
        for _ in range(2):
            torch.cuda.synchronize()
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            side.wait_event(begin)
            if there:
                down.copy_(host[0], non_blocking=True)
            if back:
                with torch.cuda.stream(side):
                    host[1].copy_(up, non_blocking=True)
            torch.cuda.current_stream().wait_stream(side)
            end.record()
            end.synchronize()
        row(rows, f"copy engine, 8 experts {name}", begin.elapsed_time(end) * 1e3, 8 * SIZE)


def word_sums(rows):
    """Checksums of experts, one after the other, so that none is in the L2 cache."""
    count = 64
    data = torch.randint(0, 256, (count, SIZE), dtype=torch.uint8, device="cuda")
    out = torch.zeros(count, dtype=torch.int64, device="cuda")
    call = lambda i: LIB.launch("moe_any_word_sum", data[i], ctypes.c_int64(SIZE), out[i:])
    row(rows, "word sum of an expert", graph_us([lambda i=i: call(i) for i in range(count)]), SIZE)


BENCHES = [expert_offload, word_sums]
