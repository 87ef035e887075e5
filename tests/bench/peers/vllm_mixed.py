"""vLLM on a workload of ../mixed_workload.py, with dummy weights: the protocol of `bench --workload`.

  python vllm_mixed.py --config ../configs/qwen3-30b-a3b.json --workload mixed.json --out vllm_mixed.json [--tp 1]
  [--ep] [--max-num-seqs 256,512]

All requests at once, temperature 1, end-of-sequence ignored, prefix caching off; a warm-up of the first 64, then the
best of `--repeat` runs. The seeds of the file are not used: with a seed of its own each request samples apart, which is
slower, and no figure here depends on which tokens come.

Needs vLLM with its matching torch. Writes a JSON list with an object for each `--max-num-seqs`, after each of them.
"""
import argparse, gc, json, os, shutil, tempfile, time


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--config", required=True)
    ap.add_argument("--workload", required=True)
    ap.add_argument("--out", required=True)
    ap.add_argument("--tp", type=int, default=1)
    ap.add_argument("--ep", action="store_true")
    ap.add_argument("--limit", type=int, help="the first requests alone")
    ap.add_argument("--max-num-seqs", default="256,512")
    ap.add_argument("--repeat", type=int, default=2)
    a = ap.parse_args()
    from vllm import LLM, SamplingParams

    model_dir = tempfile.mkdtemp()
    shutil.copy(a.config, os.path.join(model_dir, "config.json"))
    requests = json.load(open(a.workload))["requests"][: a.limit]
    prompts = [{"prompt_token_ids": r["prompt_token_ids"]} for r in requests]
    sampling = [SamplingParams(temperature=1.0, max_tokens=r["max_tokens"], min_tokens=r["max_tokens"], ignore_eos=True, detokenize=False, prompt_logprobs=r.get("prompt_logprobs")) for r in requests]
    input_tokens = sum(len(r["prompt_token_ids"]) for r in requests)
    rows = []
    for max_num_seqs in [int(x) for x in a.max_num_seqs.split(",")]:
        llm = LLM(
            model=model_dir, load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16",
            tensor_parallel_size=a.tp, enable_expert_parallel=a.ep, max_model_len=4096,
            gpu_memory_utilization=0.9, enable_prefix_caching=False, max_num_seqs=max_num_seqs,
        )
        llm.generate(prompts[:64], sampling[:64], use_tqdm=False)
        times = []
        for _ in range(a.repeat):
            t = time.time()
            outs = llm.generate(prompts, sampling, use_tqdm=False)
            times.append(time.time() - t)
            assert all(len(o.outputs[0].token_ids) == r["max_tokens"] for o, r in zip(outs, requests))
        output_tokens, best = sum(r["max_tokens"] for r in requests), min(times)
        row = {
            "engine": "vllm", "tp": a.tp, "ep": a.ep, "max_num_seqs": max_num_seqs, "seconds": best, "all_seconds": times,
            "output_tok_s": output_tokens / best, "total_tok_s": (input_tokens + output_tokens) / best,
            "input_tokens": input_tokens, "output_tokens": output_tokens,
        }
        print("mixed", {k: round(v, 1) if isinstance(v, float) else v for k, v in row.items()}, flush=True)
        rows.append(row)
        json.dump(rows, open(a.out, "w"), indent=1)
        # The next engine needs the memory of this one.
        del llm
        gc.collect()
        import torch

        torch.cuda.empty_cache()
        time.sleep(5)


if __name__ == "__main__":
    main()
