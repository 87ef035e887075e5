"""Times both expert products alone, from 16 to 32k tokens, in bursts and without a pause, and compares them with the
card's rates.

The power limit slows down a card that multiplies without a pause after some ten milliseconds. So figures of a few calls
after a pause (as other projects usually give them) differ from figures of calls for a third of a second. The table has
both, with clock and power, and the same two figures for cuBLAS and for a read of memory.
"""
import ctypes
import os
import statistics
import time

import torch

from bench_experts import E, H, I, K, SETS, Inputs, make_weights, tensor_calls

WIDE_TOKENS = 512  # from this number on the plan chooses moe_experts_wide
PAUSE = 0.03       # seconds before a burst
BURSTS = 5


class Meter:
    """Clock (MHz) and power (W) of the first visible GPU, of NVML; zeros where there is none."""

    def __init__(self):
        self.device = ctypes.c_void_p()
        first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
        try:
            self.nvml = ctypes.CDLL("libnvidia-ml.so.1")
            ok = self.nvml.nvmlInit_v2() == 0
            by_name = not first.isdigit()
            find = self.nvml.nvmlDeviceGetHandleByUUID if by_name else self.nvml.nvmlDeviceGetHandleByIndex_v2
            ok = ok and find(first.encode() if by_name else int(first), ctypes.byref(self.device)) == 0
        except OSError:
            ok = False
        self.nvml = self.nvml if ok else None

    def read(self):
        clock, power = ctypes.c_uint(), ctypes.c_uint()
        if self.nvml:
            self.nvml.nvmlDeviceGetClockInfo(self.device, 1, ctypes.byref(clock))
            self.nvml.nvmlDeviceGetPowerUsage(self.device, ctypes.byref(power))
        return clock.value, power.value / 1e3


def graph_of(calls):
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        calls[0]()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for call in calls:
                call()
    return graph


def events_ms(work):
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    work()
    end.record()
    return begin, end


def burst_us(graph, calls):
    """Median of microseconds per call of one replay after a pause."""
    times = []
    for _ in range(BURSTS):
        torch.cuda.synchronize()
        time.sleep(PAUSE)
        begin, end = events_ms(graph.replay)
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / calls)
    return statistics.median(times)


def sustained_us(graph, calls, meter, seconds=0.3):
    """Microseconds per call of replays without a gap, in the second half of `seconds`; clock and power then."""
    begin, end = events_ms(graph.replay)
    end.synchronize()
    replays = max(2, int(seconds * 500 / begin.elapsed_time(end)))

    def repeat():
        for _ in range(replays):
            graph.replay()

    repeat()
    begin, end = events_ms(repeat)
    begin.synchronize()
    seen = []
    while not end.query():
        seen.append(meter.read())
        time.sleep(0.02)
    clocks, powers = zip(*seen) if seen else ((0,), (0,))
    return begin.elapsed_time(end) * 1e3 / calls / replays, statistics.median(clocks), max(powers)


def card(meter):
    """cuBLAS at 8,192 in TFLOP/s by both ways, and a read of 4 GB in TB/s."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    graph, calls = graph_of([lambda: torch.mm(a, b.T, out=out)] * 4), 4
    burst = burst_us(graph, calls)
    us, clock, power = sustained_us(graph, calls, meter)
    memory = torch.empty(1 << 30, device="cuda")
    memory.sum()
    read = min(burst_us(graph_of([memory.sum]), 1) for _ in range(2))
    rate = 2 * 8192**3 / 1e6
    return {"matmul_burst": rate / burst, "matmul_sustained": rate / us, "clock": clock, "power": power, "read": memory.nbytes / read / 1e6}


HEAD = f"{'T':>6} {'skew':>5} {'kernel':>8} {'burst us':>9} {'TFLOP/s':>8} {'TB/s':>5} {'of card':>7} {'sustained':>9} {'TFLOP/s':>8} {'MHz':>5} {'W':>4}"


def measured(kernel, calls, inputs, skew, meter, of_card):
    """The row of these calls, printed."""
    graph = graph_of(calls)
    burst = burst_us(graph, len(calls))
    us, clock, power = sustained_us(graph, len(calls), meter)
    tokens = inputs.tokens
    flops, moved = 6 * tokens * K * H * I / 1e6, inputs.bytes() / 1e6
    # The larger share of the card's rates shows what limits the product.
    share = max(flops / burst / of_card["matmul_burst"], moved / burst / of_card["read"])
    print(f"{tokens:>6} {skew:>5g} {kernel:>8} {burst:>9.1f} {flops / burst:>8.0f} {moved / burst:>5.2f} {share:>7.2f} {us:>9.1f} {flops / us:>8.0f} {clock:>5.0f} {power:>4.0f}", flush=True)
    return {"tokens": tokens, "skew": str(skew), "kernel": kernel, "burst_us": burst, "sustained_us": us, "clock": clock, "power": power,
            "tflop_s_burst": flops / burst, "tflop_s_sustained": flops / us, "tb_s_burst": moved / burst, "share_of_card": share}


def inputs_of(tokens, skew, weights):
    """Enough calls that a replay takes about a millisecond."""
    return Inputs(tokens, skew, weights, calls=SETS if tokens >= 4096 else 2 * SETS)


def tell_card(meter):
    of_card = card(meter)
    print("card: cuBLAS {matmul_burst:.0f} TFLOP/s in bursts, {matmul_sustained:.0f} sustained ({clock:.0f} MHz, {power:.0f} W); reads {read:.2f} TB/s".format(**of_card))
    print(HEAD, flush=True)
    return of_card


def run(lib, token_counts, skews):
    meter = Meter()
    of_card = tell_card(meter)
    weights, rows = make_weights(), []
    for skew in skews:
        for tokens in token_counts:
            inputs = inputs_of(tokens, skew, weights)
            wide = tokens >= WIDE_TOKENS
            rows.append(measured("wide" if wide else "tensor", tensor_calls(lib, inputs, "alone", wide=wide), inputs, skew, meter, of_card))
    return {"card": of_card, "experts": E, "rows": rows}
