"""Checks of experts that change places between slots of the device and host memory, against the rule in Python; with --bench, how
fast they do so beside the copy engine: python tests/cuda/check_offload.py [--bench]"""

import ctypes
import os
import sys

import torch
from library import NO_EXPERT, Library, graph_us, ids_tensor, sized

LIB = Library(os.environ.get("MOE_KERNELS_SO", "target/kernels/libmoe_kernels.so"))
USE, AGE_SHIFT = 1 << 16, 6


class Rule:
    """moe_kernels::Residency."""

    def __init__(self, experts, slots):
        self.place = [e if e < slots else slots - 1 - e for e in range(experts)]
        self.heat, self.held, self.pending = [0] * experts, list(range(slots)), set()

    def begin(self, ids):
        self.pending = {e for e in ids if e < len(self.place)}
        self.heat = [h - (h >> AGE_SHIFT) + (USE if e in self.pending else 0) for e, h in enumerate(self.heat)]

    def do_pass(self):
        missing = sorted(e for e in self.pending if self.place[e] < 0)
        idle = [s for s, e in enumerate(self.held) if e not in self.pending]
        exchanges = []
        for expert, slot in zip(missing, sorted(idle, key=lambda s: (self.heat[self.held[s]], s))):
            place = self.place[expert]
            exchanges.append((slot, -1 - place))
            self.place[self.held[slot]], self.place[expert], self.held[slot] = place, slot, expert
        here = {e for e in self.pending if self.place[e] >= 0}
        self.pending -= here
        return [self.place[e] if e in here else -1 for e in range(len(self.place))], exchanges


class Device:
    """`Rule` by the kernels, with weights: word i of expert e's products is a function of both."""

    def __init__(self, experts, slots, lens):
        self.experts, self.slots, self.lens = experts, slots, lens
        words = [n // 4 for n in lens]
        all13, all2 = [torch.arange(experts)[:, None].int() * 1_000_003 + torch.arange(n)[None].int() + i for i, n in enumerate(words)]
        self.whole = torch.cat([all13, all2], 1)
        self.w13, self.w2 = all13[:slots].contiguous().cuda(), all2[:slots].contiguous().cuda()
        self.homes = self.whole[slots:].contiguous().pin_memory()
        rule = Rule(experts, slots)
        ints = lambda values: torch.tensor(values, dtype=torch.int32, device="cuda")
        self.place, self.heat, self.held = ints(rule.place), ints(rule.heat), ints(rule.held)
        self.pending, self.map = ints([0] * experts), ints([7] * experts)
        self.list, self.counts = ints([9] * (1 + 2 * slots)), torch.zeros(2, dtype=torch.int64, device="cuda")

    def do_pass(self, ids, first):
        LIB.launch("moe_expert_residency", ids, self.place, self.heat, self.held, self.pending, self.map, self.list, self.counts,
                   ids.numel(), self.experts, self.slots, int(first))
        self.exchange()
        torch.cuda.synchronize()
        exchanges = self.list.tolist()
        return self.map.tolist(), [tuple(exchanges[1 + 2 * i:3 + 2 * i]) for i in range(exchanges[0])]

    def exchange(self):
        LIB.launch("moe_expert_exchange", self.list, self.w13, self.w2, self.homes.data_ptr(), *self.lens)

    def check_weights(self, rule):
        slots = torch.cat([self.w13, self.w2], 1).cpu()
        for expert, place in enumerate(rule.place):
            own = slots[place] if place >= 0 else self.homes[-1 - place]
            assert torch.equal(own, self.whole[expert]), f"expert {expert} at {place}"


def residency_and_exchange():
    cases = sized([(1, 1, 64, 16, 5), (2, 1, 16, 16, 30), (40, 7, 4096, 2064, 40), (128, 64, 65552, 32784, 60), (513, 512, 144, 80, 20),
                   (2048, 100, 32, 16, 6), (65, 33, 1 << 20, 48, 20)], [(2, 1, 16, 16, 6), (40, 7, 4096, 2064, 4)])
    for experts, slots, len13, len2, steps in cases:
        rule, device = Rule(experts, slots), Device(experts, slots, (len13, len2))
        needed = fetched = 0
        for step in range(steps):
            count = (0, 1, 8, 3, slots, experts, 64, 1000, 2 * experts)[step % 9]
            reach = experts if step % 4 == 0 else max(1, experts // 3)
            ids = torch.randint(0, reach, (count,)).tolist()
            # No expert, and ids that there are not.
            ids = [(NO_EXPERT, experts)[i % 2] if i % 11 == 5 else id for i, id in enumerate(ids)]
            rule.begin(ids)
            needed += len(rule.pending)
            on_device = ids_tensor(ids if ids else [0])[:count]
            for i in range(max(1, -(-min(experts, count) // slots))):
                want = rule.do_pass()
                got = device.do_pass(on_device, i == 0)
                assert got == want, (experts, slots, step, i)
                fetched += len(want[1])
            assert not rule.pending
            assert device.counts.tolist() == [needed, fetched]
            assert device.heat.tolist() == rule.heat and device.held.tolist() == rule.held
            device.check_weights(rule)
    assert LIB.refused("moe_expert_residency", *[None] * 8, 0, 2049, 1, 1)
    assert LIB.refused("moe_expert_residency", *[None] * 8, 0, 4, 5, 1)
    assert LIB.refused("moe_expert_exchange", *[None] * 4, 24, 16)


def bench():
    """Qwen3-30B-A3B's experts, by how many change places."""
    experts, slots, lens = 96, 48, (2 * 768 * 2048 * 2, 768 * 2048 * 2)
    device = Device(experts, slots, lens)
    size = sum(lens)
    for count in (0, 1, 4, 8, 32):
        exchanges = [count] + [x for i in range(count) for x in (i, i)]
        device.list[:len(exchanges)] = torch.tensor(exchanges, dtype=torch.int32, device="cuda")
        us = graph_us([device.exchange] * 4, 5)
        print(f"exchange of {count:2} experts: {us:9.1f} us, {count * size / us / 1e3:5.1f} GB/s each way")
    for count in (1, 8, 64, 512, 65536):
        ids = torch.randint(0, experts, (count,), dtype=torch.int32, device="cuda")
        choose = lambda: LIB.launch("moe_expert_residency", ids, device.place, device.heat, device.held, device.pending, device.map,
                                    device.list, device.counts, count, experts, slots, 1)
        print(f"residency of {count:5} choices: {graph_us([choose] * 8, 5):6.2f} us")
    # The copy engines, one way and both.
    down, up = torch.empty(size * 8, dtype=torch.uint8, device="cuda"), torch.empty(size * 8, dtype=torch.uint8, device="cuda")
    host = [torch.empty(size * 8, dtype=torch.uint8).pin_memory() for _ in range(2)]
    side = torch.cuda.Stream()
    for name, there, back in (("to the device", True, False), ("from the device", False, True), ("both", True, True)):
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
        print(f"copy engine, 8 experts {name}: {8 * size / begin.elapsed_time(end) / 1e6:5.1f} GB/s")


CHECKS = [residency_and_exchange]

if __name__ == "__main__":
    for check in CHECKS:
        check()
        torch.cuda.synchronize()
        print(f"ok    {check.__name__}")
    if "--bench" in sys.argv:
        bench()
