"""Writes the Parquet files of crates/moe-cli/tests/data with pyarrow, as other programs write them.

    pip install pyarrow==26.0.1
    python3 tests/reference/make_parquet.py
"""

import datetime
import json
import pathlib

import pyarrow as pa
import pyarrow.parquet as pq

DATA = pathlib.Path(__file__).parents[2] / "crates/moe-cli/tests/data"


def write(name, rows, schema=None, **options):
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), DATA / f"{name}.parquet", **options)


# Bodies are structs, whose fields are null where a row has none of them. Small pages of the newer kind.
write(
    "structs",
    [
        {"custom_id": "a", "body": {"prompt": "To be", "max_tokens": 3, "temperature": 0.0}},
        {"custom_id": "b", "body": {"messages": [{"role": "user", "content": "é\n\"漢\""}], "max_tokens": 4}},
        {"custom_id": "c", "url": "/v1/chat/completions", "body": {"prompt": "x", "stop": ["a", "b"]}},
        {"custom_id": None, "body": {"prompt": "y"}},
        {"custom_id": "e", "body": None},
    ],
    pa.schema([
        ("custom_id", pa.string()),
        ("url", pa.string()),
        ("body", pa.struct([
            ("prompt", pa.string()),
            ("messages", pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))),
            ("max_tokens", pa.int64()),
            ("temperature", pa.float64()),
            ("stop", pa.list_(pa.string())),
        ])),
    ]),
    row_group_size=2,
    compression="gzip",
    data_page_version="2.0",
    data_page_size=32,
)

# Bodies are JSON texts, some of them wrong, one of them bytes that are no text.
write(
    "texts",
    [
        {"custom_id": 7, "body": json.dumps({"prompt": "To be", "max_tokens": 3}).encode()},
        {"custom_id": 8, "body": b'{"messages": [{"role": "user", "content": "hi"}], "seed": 18446744073709551615}'},
        {"custom_id": 9, "body": b"{not json"},
        {"custom_id": 10, "body": b'{"prompt": "\xff"}'},
    ],
    pa.schema([("custom_id", pa.int64()), ("body", pa.binary())]),
    compression="zstd",
    use_dictionary=False,
)

# A data set of conversations with parameters, and with columns that are none.
write(
    "conversations",
    [
        {
            "source": "web",
            "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
            "temperature": 0.7,
            "max_tokens": 5,
            "tools": json.dumps([{"type": "function", "function": {"name": "f"}}]),
            "time": datetime.datetime(2026, 11, 30),
        },
        {"source": "web", "messages": [{"role": "user", "content": "Bye"}], "logit_bias": [("5", -1.5)]},
        {"source": "book", "messages": [], "temperature": float("nan")},
    ],
    pa.schema([
        ("source", pa.dictionary(pa.int32(), pa.string())),
        ("temperature", pa.float32()),
        ("messages", pa.large_list(pa.struct([("role", pa.large_string()), ("content", pa.large_string())]))),
        ("max_tokens", pa.uint8()),
        ("tools", pa.string()),
        ("logit_bias", pa.map_(pa.string(), pa.float64())),
        ("time", pa.timestamp("ns")),
    ]),
)

# Prompts as token ids, and a compression that is not read.
write("ids", [{"prompt": [1, 2, 3], "n": 2}, {"prompt": [4]}])
write("brotli", [{"prompt": "x"}], compression="brotli")
# A time has no form in JSON.
write("times", [{"prompt": "x", "stop": datetime.date(2026, 11, 30)}])
