"""Both expert products of SonicMoE or vLLM as tests/cuda/experts.py --products measures ours: the same inputs, routing,
bursts and repeats.

  python expert_products.py sonic --out sonic.json [--tokens 16,64,256,..] [--skews 0,1,inf]
  python expert_products.py vllm --package FOLDER --out vllm.json

Both need a Hopper GPU and torch. sonic: quack-kernels 0.3.11 with nvidia-cutlass-dsl 4.4.2 (libs-base), whose two
products SonicMoE 0.1.2 calls, chosen by their autotuner for each number of tokens. vllm: FOLDER is
vllm/model_executor/layers/fused_moe of its wheel, of which the Triton kernel of fused_moe.py and the configuration
tuned for the card are read. Rows are sorted by expert beforehand; vLLM's SwiGLU, a launch of its own, is not timed.
"""
import argparse
import ast
import importlib.util
import json
import sys
import tempfile
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "cuda"))
from bench_experts import E, H, I, K, SETS, make_weights  # noqa: E402
from bench_products import Meter, inputs_of, measured, tell_card  # noqa: E402

BOUND = 1e-2  # of all slots' rows against f32 products of bf16 activations


def swiglu(gate, up):
    return torch.nn.functional.silu(gate.float()).mul_(up.float()).bfloat16()


class Sonic:
    """Rows in order of experts; gate and up rows of w13 in turn."""

    gates, ups = slice(0, None, 2), slice(1, None, 2)

    def __init__(self, inputs):
        from quack.gemm_interface import gemm, gemm_gated

        self.gemm, self.gemm_gated, self.inputs = gemm, gemm_gated, inputs
        self.orders = [self.order(ids.flatten().long()) for ids, _ in inputs.routes]

    @staticmethod
    def order(experts):
        """Offsets of the experts, the slots in their order, and the slots' tokens."""
        offsets = torch.zeros(E + 1, dtype=torch.int32, device="cuda")
        offsets[1:] = torch.bincount(experts, minlength=E).cumsum(0)
        slots = torch.argsort(experts, stable=True)
        return offsets, slots, (slots // K).to(torch.int32)

    def call(self, i):
        (w13, w2), (offsets, _, tokens), a = self.inputs.weights[i % SETS], self.orders[i], self.inputs
        self.gemm_gated(a.x, w13.transpose(1, 2), activation="swiglu", cu_seqlens_m=offsets, A_idx=tokens, postact_out=a.act, store_preact=False)
        self.gemm(a.act, w2.transpose(1, 2), out=a.short_rows, cu_seqlens_m=offsets)

    def checked_rows(self):
        """The rows of the first call, in the order of slots."""
        self.call(0)
        rows = torch.empty_like(self.inputs.short_rows)
        rows[self.orders[0][1]] = self.inputs.short_rows
        return rows


class Vllm:
    """Rows by slot, multiplied by their weights in the second product."""

    gates, ups = slice(0, I), slice(I, None)

    def __init__(self, inputs, package):
        self.kernel, self.inputs = jit_functions(package / "fused_moe.py").fused_moe_kernel, inputs
        name = torch.cuda.get_device_name().replace(" ", "_")
        tuned = json.loads((package / "configs" / f"E={E},N={I},device_name={name}.json").read_text())
        self.config = tuned[min((key for key in tuned if key.isdigit()), key=lambda key: abs(int(key) - inputs.tokens))]
        self.both = torch.empty(inputs.tokens, K, 2 * I, dtype=torch.bfloat16, device="cuda")
        self.orders = [self.order(ids.flatten().long()) for ids, _ in inputs.routes]

    def order(self, experts):
        """The slots in order of experts, with each expert's slots filled up to whole blocks; the expert of each block;
        and the number of places."""
        block, slots = self.config["BLOCK_SIZE_M"], experts.numel()
        counts = torch.bincount(experts, minlength=E)
        blocks = (counts + block - 1) // block
        most = slots + E * (block - 1)
        places = torch.full((most,), slots, dtype=torch.int32, device="cuda")
        order = torch.argsort(experts, stable=True)
        first = counts.cumsum(0) - counts
        of = experts[order]
        places[((blocks.cumsum(0) - blocks) * block)[of] + torch.arange(slots, device="cuda") - first[of]] = order.to(torch.int32)
        of_block = torch.repeat_interleave(torch.arange(E, device="cuda"), blocks).to(torch.int32)
        return places, of_block, (blocks.sum() * block).to(torch.int32).view(1)

    def launch(self, i, x, w, out, weighted, top_k):
        import triton
        import triton.language as tl

        places, of_block, count = self.orders[i]
        block, em = self.config["BLOCK_SIZE_M"], places.numel()
        if x.shape[0] < block:
            em = min(em, x.shape[0] * top_k * block)
        grid = (triton.cdiv(em, block) * triton.cdiv(w.shape[1], self.config["BLOCK_SIZE_N"]),)
        self.kernel[grid](x, w, out, None, None, None, self.inputs.routes[i][1], places, of_block, count, w.shape[1], w.shape[2], em, x.shape[0] * top_k,
                          x.stride(0), x.stride(1), w.stride(0), w.stride(2), w.stride(1), out.stride(1), out.stride(2), *[0] * 9, naive_block_assignment=False,
                          MUL_ROUTED_WEIGHT=weighted, top_k=top_k, compute_type=tl.bfloat16, use_fp8_w8a8=False, use_int8_w8a8=False, use_int8_w8a16=False,
                          per_channel_quant=False, HAS_BIAS=False, SWAP_AB=False, SPLIT_K=1, **self.config)

    def first(self, i):
        self.launch(i, self.inputs.x, self.inputs.weights[i % SETS][0], self.both, False, K)

    def second(self, i):
        self.launch(i, self.inputs.act, self.inputs.weights[i % SETS][1], self.inputs.short_rows.view(-1, K, H), True, 1)

    def call(self, i):
        self.first(i), self.second(i)

    def checked_rows(self):
        self.first(0)
        gate, up = self.both.view(-1, 2 * I).split(I, -1)
        self.inputs.act.copy_(swiglu(gate, up))
        self.second(0)
        return self.inputs.short_rows.float() / self.inputs.routes[0][1].view(-1, 1)


def jit_functions(source):
    """The Triton kernels of a file whose other imports are not there."""
    tree = ast.parse(source.read_text())
    kernels = [node for node in tree.body if isinstance(node, ast.FunctionDef) and any(ast.unparse(d) == "triton.jit" for d in node.decorator_list)]
    path = Path(tempfile.mkdtemp()) / "kernels.py"
    path.write_text("import triton\nimport triton.language as tl\n\n\n" + "\n\n\n".join(ast.unparse(node) for node in kernels) + "\n")
    spec = importlib.util.spec_from_file_location("vllm_kernels", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def error(rival):
    """The relative error of the first call's rows, compared with products in f32."""
    rows, inputs, wrong, norm = rival.checked_rows(), rival.inputs, 0.0, 0.0
    (w13, w2), experts = inputs.weights[0], inputs.routes[0][0].flatten()
    for e in experts.unique().tolist():
        slots = (experts == e).nonzero().flatten()
        both = inputs.x[slots // K].float() @ w13[e].float().T
        want = swiglu(both[:, rival.gates], both[:, rival.ups]).float() @ w2[e].float().T
        wrong += (rows[slots].float() - want).square().sum().item()
        norm += want.square().sum().item()
    return (wrong / norm) ** 0.5


def main():
    ap = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    ap.add_argument("rival", choices=["sonic", "vllm"])
    ap.add_argument("--package", type=Path, help="vllm's folder fused_moe")
    ap.add_argument("--out", required=True)
    ap.add_argument("--tokens", default="16,64,256,1024,2048,4096,8192,32768")
    ap.add_argument("--skews", default="0,1,inf")
    args = ap.parse_args()
    if (args.rival == "vllm") != (args.package is not None):
        ap.error("--package: expected with vllm, and with nothing else")
    meter = Meter()
    of_card, weights, rows = tell_card(meter), make_weights(), []
    for tokens in map(int, args.tokens.split(",")):
        for skew in map(float, args.skews.split(",")):
            inputs = inputs_of(tokens, skew, weights)
            rival = Sonic(inputs) if args.rival == "sonic" else Vllm(inputs, args.package)
            off = error(rival)
            if not off < BOUND:
                raise SystemExit(f"{args.rival}, {tokens} tokens, skew {skew}: rows are off by {off}, at most {BOUND} was expected")
            calls = [lambda i=i: rival.call(i) for i in range(len(rival.orders))]
            rows.append(measured(args.rival, calls, inputs, skew, meter, of_card) | {"error": off})
            with open(args.out, "w") as file:
                json.dump({"device": torch.cuda.get_device_name(), "card": of_card, "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
