#!/usr/bin/env python3
"""Is structured output always valid, and what does it cost?

Sends 500 requests with five JSON schemas through `batch` on the bundled checkpoint and checks each answer with `json`
and a hand-written check of its schema. Then the same prompts run unconstrained, each for exactly as many tokens as its
constrained answer had, so that both batches are the same work but for the grammar. Runs alternate; the medians of new
tokens per second of wall time, start of the program included, are compared. Prints the figures as JSON, and as a last
line the summary. It fails if an answer is not valid or the ratio is below 0.8.

    cargo build --release -p model-moe
    tests/cli/structured.py target/release/moe
"""

import argparse
import json
import os
import random
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SPEAKERS = ["ROMEO", "JULIET", "MENENIUS", "First Citizen", "Nurse"]
MIN_RATIO = 0.8


def closed(properties, required=None, **more):
    required = list(properties) if required is None else required
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False, **more}


def text(limit):
    return {"type": "string", "maxLength": limit}


def integer(low, high):
    return {"type": "integer", "minimum": low, "maximum": high}


def is_text(value, limit):
    return isinstance(value, str) and len(value) <= limit


def is_integer(value, low, high):
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def has(value, required, optional=()):
    return isinstance(value, dict) and set(required) <= set(value) <= {*required, *optional}


# Each kind has a schema, and a check that does not use schemas.
PERSON = closed({"name": text(16), "age": integer(0, 120), "role": {"enum": ["king", "fool", "nurse"]},
                 "words": {"type": "array", "maxItems": 3, "items": text(8)}})
LINE = closed({"speaker": {"enum": SPEAKERS}, "text": text(40), "scene": closed({"act": integer(1, 5), "night": {"type": "boolean"}})})
PATH = {"type": "array", "minItems": 1, "maxItems": 4, "items": {"$ref": "#/$defs/point"},
        "$defs": {"point": closed({"x": integer(-9, 9), "y": integer(-9, 9), "label": text(6)}, ["x", "y"])}}
EITHER = {"anyOf": [closed({"kind": {"const": "letter"}, "to": text(12)}),
                    closed({"kind": {"const": "visit"}, "guests": integer(1, 300)})]}
DATED = closed({"date": {"type": "string", "pattern": "^1[56][0-9]{2}-(0[1-9]|1[0-2])$"}, "price": {"type": ["integer", "null"], "minimum": 0, "maximum": 1000},
                "note": text(20)}, ["date", "price"])


def is_person(v):
    words = has(v, ["name", "age", "role", "words"]) and v["words"]
    return (isinstance(words, list) and len(words) <= 3 and all(is_text(w, 8) for w in words) and is_text(v["name"], 16)
            and is_integer(v["age"], 0, 120) and v["role"] in ("king", "fool", "nurse"))


def is_line(v):
    scene = has(v, ["speaker", "text", "scene"]) and v["scene"]
    return (has(scene, ["act", "night"]) and is_integer(scene["act"], 1, 5) and isinstance(scene["night"], bool)
            and v["speaker"] in SPEAKERS and is_text(v["text"], 40))


def is_path(v):
    def is_point(p):
        return has(p, ["x", "y"], ["label"]) and is_integer(p["x"], -9, 9) and is_integer(p["y"], -9, 9) and is_text(p.get("label", ""), 6)
    return isinstance(v, list) and 1 <= len(v) <= 4 and all(map(is_point, v))


def is_either(v):
    letter = has(v, ["kind", "to"]) and v["kind"] == "letter" and is_text(v["to"], 12)
    return letter or has(v, ["kind", "guests"]) and v["kind"] == "visit" and is_integer(v["guests"], 1, 300)


def is_dated(v):
    return (has(v, ["date", "price"], ["note"]) and isinstance(v["date"], str) and re.fullmatch(r"1[56]\d\d-(0[1-9]|1[0-2])", v["date"]) is not None
            and (v["price"] is None or is_integer(v["price"], 0, 1000)) and is_text(v.get("note", ""), 20))


KINDS = [(PERSON, is_person), (LINE, is_line), (PATH, is_path), (EITHER, is_either), (DATED, is_dated)]


def requests(count):
    """(prompt, sampling) of each request; every fifth is greedy."""
    rng = random.Random(0)
    words = "the king queen love death night day sword crown heart eyes father daughter speak come go".split()
    for i in range(count):
        prompt = f"{rng.choice(SPEAKERS)}:\n{' '.join(rng.choices(words, k=rng.randint(3, 12)))}\n"
        yield prompt, {"temperature": 0 if i % 5 == 4 else 1, "seed": i}


def processor_seconds():
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def run(program, flags, bodies):
    """Answers in the order of the bodies, the wall seconds, and the processor seconds, which other programs hardly
    disturb."""
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "in.jsonl"), Path(folder, "out.jsonl")
        lines = ({"custom_id": str(i), "method": "POST", "url": "/v1/completions", "body": body} for i, body in enumerate(bodies))
        source.write_text("".join(json.dumps(line) + "\n" for line in lines))
        used = processor_seconds()
        begin = time.monotonic()
        done = subprocess.run([program, "batch", "--input", source, "--output", target, *flags], stderr=subprocess.PIPE, text=True)
        seconds, used = time.monotonic() - begin, processor_seconds() - used
        if done.returncode != 0:
            sys.exit(done.stderr)
        records = [json.loads(line) for line in target.read_text().splitlines()]
    return sorted(records, key=lambda record: int(record["custom_id"])), seconds, used


def fault(record, check):
    """What is wrong with an answer; None if nothing is."""
    if record["response"]["status_code"] != 200:
        return str(record["error"])
    choice = record["response"]["body"]["choices"][0]
    try:
        valid = check(json.loads(choice["text"]))
    except ValueError as e:
        valid, choice["error"] = False, str(e)
    return None if valid and choice["finish_reason"] == "stop" else str(choice)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("program")
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("flags", nargs="*", help="further flags of the program, after --")
    args = parser.parse_args()

    asked = list(requests(args.count))
    kinds = [KINDS[i % len(KINDS)] for i in range(args.count)]
    constrained = [{"prompt": prompt, "max_tokens": 440, "guided_json": schema, **sampling}
                   for (prompt, sampling), (schema, _) in zip(asked, kinds)]
    speeds = {"constrained": [], "unconstrained": []}
    processors = {"constrained": [], "unconstrained": []}
    valid = tokens = None
    for _ in range(args.repeat):
        records, seconds, used = run(args.program, args.flags, constrained)
        faults = [f for record, (_, check) in zip(records, kinds) if (f := fault(record, check))]
        print(*faults[:5], sep="\n", end="\n" if faults else "", file=sys.stderr)
        again = [record["response"]["body"]["usage"]["completion_tokens"] for record in records]
        if tokens not in (None, again):
            sys.exit("a run of the same requests gave texts of other lengths")
        tokens, valid = again, min(len(records) - len(faults), args.count if valid is None else valid)
        speeds["constrained"].append(sum(tokens) / seconds)
        processors["constrained"].append(round(used, 2))
        free = [{"prompt": prompt, "max_tokens": n, "ignore_eos": True, **sampling} for (prompt, sampling), n in zip(asked, tokens)]
        records, seconds, used = run(args.program, args.flags, free)
        if sum(record["response"]["body"]["usage"]["completion_tokens"] for record in records) != sum(tokens):
            sys.exit("the unconstrained batch had other lengths")
        speeds["unconstrained"].append(sum(tokens) / seconds)
        processors["unconstrained"].append(round(used, 2))
    medians = {name: round(statistics.median(values)) for name, values in speeds.items()}
    ratio = medians["constrained"] / medians["unconstrained"]
    report = {
        "requests": args.count, "valid": valid, "new_tokens": sum(tokens), "longest": max(tokens), "load_average": os.getloadavg(),
        "tok_s": {name: [round(value) for value in values] for name, values in speeds.items()}, "median_tok_s": medians, "ratio": round(ratio, 3),
        "processor_s": processors, "processor_ratio": round(statistics.median(processors["unconstrained"]) / statistics.median(processors["constrained"]), 3),
    }
    print(json.dumps(report, indent=2))
    print(f"valid {valid} of {args.count}, tok/s constrained {medians['constrained']}, unconstrained {medians['unconstrained']}, ratio {ratio:.2f}")
    sys.exit(valid != args.count or ratio < MIN_RATIO)


if __name__ == "__main__":
    main()
