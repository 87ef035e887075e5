"""Calls the kernels of libmoe_kernels.so on torch tensors, and times them inside CUDA graphs.

The same extern "C" launchers serve Rust; nothing here knows more than their C signature. Launchers with many arguments
take a struct: its fields are read from the headers, and callers list their values in the same order; a field that is
itself a struct is an object whose attributes have the names of its fields.
"""
import ctypes
import os
import re
import statistics
from pathlib import Path

import torch

NO_EXPERT = 0xFFFFFFFF
F32, BF16, ADD_F32 = range(3)  # Dtype and Output of cuda/codes.cuh
SOURCES = Path(__file__).parents[2] / "crates/moe-kernels/cuda"
C_TYPES = {"int": ctypes.c_int32, "float": ctypes.c_float, "int64_t": ctypes.c_int64, "uint64_t": ctypes.c_uint64,
           "uint32_t": ctypes.c_uint32, "Dtype": ctypes.c_int32, "Output": ctypes.c_int32, "Scoring": ctypes.c_int32,
           "QuantFormat": ctypes.c_int32}
TINY = os.environ.get("TINY") == "1"


def sized(full, tiny):
    """What a check is to use: `tiny` under compute-sanitizer, where a launch takes 100 to 1,000 times as long."""
    return tiny if TINY else full


class Routing:
    """StepRoutingArgs: where a launch that routes leaves its choices, and what is forced on it; by default nothing."""

    def __init__(self, heat=None, routed=None, forced=None, stride=0, keep_weights=False):
        self.heat, self.routed, self.forced, self.stride, self.keep_weights = heat, routed, forced, stride, int(keep_weights)


UNWATCHED = Routing()


class Copies:
    """CopiesArgs: the slots of each expert [E + S, width] that take the place of chosen ids; by default ids stay."""

    def __init__(self, log2phy=None, hashed=False, first_row=0):
        self.log2phy, self.width = log2phy, 0 if log2phy is None else log2phy.shape[1]
        self.hashed, self.first_row = int(hashed), first_row


UNCOPIED = Copies()


def fields(body, kind_of):
    """(name, C type) of the fields of a struct; `kind_of` finds the structs that it holds."""
    for statement in filter(str.strip, body.split(";")):
        kind, names = re.fullmatch(r"\s*((?:const )?[\w ]+?\*?) (\w+(?:, \w+)*)\s*", statement).groups()
        for name in names.split(", "):
            yield name, ctypes.c_void_p if kind.endswith("*") else C_TYPES.get(kind) or kind_of(kind)


def structs():
    """The arguments of the launchers that take a struct, by the launcher's name, from the args.cuh of every folder."""
    bodies, kinds, takers = {}, {}, {}
    for header in SOURCES.glob("*/args.cuh"):
        code = re.sub(r"//.*", "", header.read_text())
        bodies.update(re.findall(r"struct (\w+) \{(.*?)\};", code, re.S))
        takers.update(re.findall(r"int (moe_\w+)\(const moe::(\w+)\* (?:args|w)\b", code))

    def kind_of(name):
        if name not in kinds:
            kinds[name] = type(name, (ctypes.Structure,), {"_fields_": list(fields(bodies[name], kind_of))})
        return kinds[name]

    return {launcher: kind_of(name) for launcher, name in takers.items()}


STRUCTS = structs()


class Library:
    def __init__(self, path):
        self.lib = ctypes.CDLL(path)
        torch.cuda.synchronize()  # creates the context that launchers need

    def raw(self, name, *args):
        """The launcher's return code. Tensors become device pointers, None a null pointer."""
        kind = STRUCTS.get(name)
        if kind is not None:
            count = len(kind._fields_)
            assert len(args) >= count, f"{name} takes {count} fields, got {len(args)} arguments"
            own = _filled(kind, args[:count])
            args = ctypes.byref(own), *args[count:]
        return getattr(self.lib, name)(*[_convert(a) for a in args])

    def launch(self, name, *args):
        """Launches on torch's current stream; any error is an exception."""
        code = self.raw(name, *args, ctypes.c_void_p(torch.cuda.current_stream().cuda_stream))
        if code != 0:
            raise RuntimeError(f"{name} returned CUDA error {code}")


def filled(launcher, *values):
    """The struct that a launcher takes, with these values."""
    return _filled(STRUCTS[launcher], values)


def _filled(kind, values):
    """A struct with these values."""
    def one(of, value):
        if isinstance(of, type) and issubclass(of, ctypes.Structure):
            return _filled(of, [getattr(value, name) for name, _ in of._fields_])
        return _address(value)
    return kind(*[one(of, value) for (_, of), value in zip(kind._fields_, values)])


def _address(value):
    if isinstance(value, torch.Tensor):
        assert value.is_cuda and value.is_contiguous()
        return value.data_ptr()
    return value


def _convert(value):
    if value is None or isinstance(value, torch.Tensor):
        return ctypes.c_void_p(_address(value))
    if isinstance(value, float):
        return ctypes.c_float(value)
    return ctypes.c_int(value) if isinstance(value, int) else value


def ids_tensor(values):
    """u32 ids as torch carries them (int32 bits)."""
    return torch.as_tensor(values, dtype=torch.int64, device="cuda").to(torch.int32)


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
    """Distinct random ids per token; popularity of the i-th expert falls as (i + 1)^-skew, of an infinite skew all
    tokens choose the same."""
    if skew == float("inf"):
        ids = torch.randperm(experts, device="cuda")[:top_k].to(torch.int32).repeat(tokens, 1)
        return ids, torch.softmax(torch.randn(tokens, top_k, device="cuda"), -1)
    popularity = (torch.arange(experts, device="cuda").float() + 1) ** -skew
    popularity = popularity[torch.randperm(experts, device="cuda")]
    gumbel = -torch.log(-torch.log(torch.rand(tokens, experts, device="cuda").clamp(1e-20, 1 - 1e-7)))
    ids = (torch.log(popularity) + gumbel).topk(top_k, -1).indices
    return ids.to(torch.int32), torch.softmax(torch.randn(tokens, top_k, device="cuda"), -1)
