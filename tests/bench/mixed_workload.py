#!/usr/bin/env python3
"""Requests of mixed lengths for offline throughput: a pure function of the seed.

Prompt lengths are log-normal (median 512, sigma 0.8), cut to 128 .. 2048; output lengths log-normal (median 256, sigma
0.5), cut to 128 .. 512. Token ids are uniform over the vocabulary, without its first 1,000 and last 2,000.

Sample at temperature 1, ignore end-of-sequence, share no prefixes. Figures: prompt and output tokens, and output tokens
alone, over the seconds from the first submit to the last answer.

    tests/bench/mixed_workload.py --out mixed.json
    moe bench --model DIR --workload mixed.json

With --score N the same prompts ask for the log-probabilities of their own tokens and of the N likeliest at each
position, and for one new token: what an evaluation by log-likelihood asks for.

The file: {"requests": [{"prompt_token_ids": [..], "max_tokens": n, "seed": s}, ..]}, with --score "prompt_logprobs": N
in each
"""

import argparse
import json
import math
import random
from pathlib import Path

FIRST_ID, IDS_LEFT_OUT_AT_THE_END = 1000, 2000


def length(rng, median, sigma, least, most):
    return min(most, max(least, round(median * math.exp(sigma * rng.gauss(0, 1)))))


def build(requests, seed, vocab, score):
    rng = random.Random(seed)
    built = []
    for i in range(requests):
        prompt = length(rng, 512, 0.8, 128, 2048)
        output = length(rng, 256, 0.5, 128, 512)
        ids = [rng.randrange(FIRST_ID, vocab - IDS_LEFT_OUT_AT_THE_END) for _ in range(prompt)]
        built.append({"prompt_token_ids": ids, "max_tokens": output, "seed": seed * 1000003 + i})
        if score is not None:
            built[-1] |= {"max_tokens": 1, "prompt_logprobs": score}
    return built


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--vocab", type=int, default=151936, help="ids of the model (default: Qwen3-MoE's)")
    parser.add_argument("--score", type=int, help="tokens to list at each position of a prompt, from 0")
    args = parser.parse_args()
    if args.requests < 1 or args.seed < 0 or (args.score or 0) < 0:
        parser.error("--requests: expected at least 1; --seed, --score: expected at least 0")
    if args.vocab <= FIRST_ID + IDS_LEFT_OUT_AT_THE_END:
        parser.error(f"--vocab: expected more than {FIRST_ID + IDS_LEFT_OUT_AT_THE_END}, got {args.vocab}")
    args.out.write_text(json.dumps({"requests": build(args.requests, args.seed, args.vocab, args.score)}))


if __name__ == "__main__":
    main()
