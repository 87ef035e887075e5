"""Calls the kernels of libmoe_kernels.so on torch tensors, and times them inside CUDA graphs.

The same extern "C" launchers serve Rust; nothing here knows more than their C signature.
"""
import ctypes
import os
import statistics

import torch

NO_EXPERT = 0xFFFFFFFF
INVALID_VALUE = 1
TINY = os.environ.get("TINY") == "1"


def sized(full, tiny):
    """What a check is to use: `tiny` under compute-sanitizer, where a launch takes 100 to 1,000 times as long."""
    return tiny if TINY else full


class Library:
    def __init__(self, path):
        self.lib = ctypes.CDLL(path)

    def raw(self, name, *args):
        """The launcher's return code. Tensors become device pointers, None a null pointer."""
        return getattr(self.lib, name)(*[_convert(a) for a in args])

    def launch(self, name, *args):
        """Launches on torch's current stream; any error is an exception."""
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        code = getattr(self.lib, name)(*[_convert(a) for a in args], stream)
        if code != 0:
            raise RuntimeError(f"{name} returned CUDA error {code}")

    def refused(self, name, *args):
        """Whether the launcher refuses these sizes."""
        return self.raw(name, *args, None) == INVALID_VALUE


def _convert(value):
    if value is None:
        return ctypes.c_void_p(None)
    if isinstance(value, torch.Tensor):
        assert value.is_cuda and value.is_contiguous()
        return ctypes.c_void_p(value.data_ptr())
    if isinstance(value, float):
        return ctypes.c_float(value)
    return ctypes.c_int(value)


def ids_tensor(values):
    """u32 ids as torch carries them (int32 bits)."""
    return torch.as_tensor(values, dtype=torch.int64, device="cuda").to(torch.int32)


def ids_back(tensor):
    """u32 values of an id tensor, as int64."""
    return tensor.to(torch.int64) & 0xFFFFFFFF


def poison(*shape, dtype):
    """Memory that no kernel leaves as it is without being noticed."""
    if dtype.is_floating_point:
        return torch.full(shape, float("nan"), dtype=dtype, device="cuda")
    return torch.full(shape, 0x5A5A5A5A, dtype=dtype, device="cuda")


def rel_error(out, ref):
    """||out - ref|| / ||ref||; NaN anywhere gives NaN, which passes no check."""
    return ((out.double() - ref.double()).norm() / ref.double().norm().clamp_min(1e-30)).item()


def graph_us(calls, replays=20):
    """Median microseconds per call of a graph that holds all `calls` in order, over several replays."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls[:2]:
            call()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for call in calls:
                call()
        for _ in range(3):
            graph.replay()
        times = []
        for _ in range(replays):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1e3 / len(calls))
    return statistics.median(times)


def routing(tokens, experts, top_k, skew=0.0):
    """Distinct random ids per token; popularity of the i-th expert falls as (i + 1)^-skew."""
    popularity = (torch.arange(experts, device="cuda").float() + 1) ** -skew
    popularity = popularity[torch.randperm(experts, device="cuda")]
    gumbel = -torch.log(-torch.log(torch.rand(tokens, experts, device="cuda").clamp(1e-20, 1 - 1e-7)))
    ids = (torch.log(popularity) + gumbel).topk(top_k, -1).indices
    return ids.to(torch.int32), torch.softmax(torch.randn(tokens, top_k, device="cuda"), -1)
