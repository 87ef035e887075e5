"""Writes tests/fixtures-chat/expected/*.json: what transformers renders for the templates and conversations there.

    python tests/reference/make_chat_fixtures.py [--qwen3-template FILE]

Inputs, all written for these tests: templates/*.jinja and conversations.json. With --qwen3-template the prompts of
that real template are recorded too, without the template. The clock of `strftime_now` stands still at
2025-03-07 09:05:03.
"""

import argparse
import copy
import json
import pathlib
import tempfile
from datetime import datetime

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast
from transformers.utils import chat_template_utils as chat

FOLDER = pathlib.Path(__file__).resolve().parent.parent / "fixtures-chat"
SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


class Clock(datetime):
    @classmethod
    def now(cls, tz=None):
        return cls(2025, 3, 7, 9, 5, 3)


def outcome(render):
    """The text, or the kind and message of the error."""
    try:
        return {"expected": render()}
    except Exception as error:
        return {"error": type(error).__name__, "message": str(error)[:120]}


def write(name, content):
    """Writes a list with one element per line, so that changes can be read."""
    path = FOLDER / "expected" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("[\n" + ",\n".join(json.dumps(row) for row in content) + "\n]\n", encoding="utf-8")
    print(f"{path.name}: {path.stat().st_size} bytes")


def apply(template, request):
    request = {"tools": None, "documents": None, **copy.deepcopy(request)}
    messages = request.pop("messages")
    variables = {**SPECIAL_TOKENS, **request.pop("chat_template_kwargs", {})}
    prompts, _ = chat.render_jinja_template([messages], chat_template=template, **request, **variables)
    return prompts[0]


def prompts(name, template):
    """Every conversation, and those without tools that end with an answer also with that answer left open."""
    for title, request in json.loads((FOLDER / "conversations.json").read_text(encoding="utf-8")).items():
        case = {"template": name, "conversation": title}
        yield {**case, **outcome(lambda: apply(template, request))}
        if not request.get("add_generation_prompt") and not request.get("tools"):
            open_end = {"continue_final_message": True}
            yield {**case, **open_end, **outcome(lambda: apply(template, {**request, **open_end}))}


def checkpoint(files, requests):
    """What a tokenizer loaded from a folder with these files renders."""
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        for name, text in files.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(text, encoding="utf-8", newline="")
        Tokenizer(WordLevel({"<unk>": 0}, unk_token="<unk>")).save(str(folder / "tokenizer.json"))
        tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
        results = []
        for request in requests:
            request = {"messages": [{"role": "user", "content": "Hi"}], **request}
            arguments = {**request, **request.get("chat_template_kwargs", {})}
            arguments.pop("chat_template_kwargs", None)
            messages = arguments.pop("messages")
            rendered = outcome(lambda: tokenizer.apply_chat_template(messages, tokenize=False, **arguments))
            results.append({"request": request, **rendered})
    return {"files": files, "cases": results}


def checkpoints():
    show = "{{ bos_token }}|{{ eos_token }}|{{ pad_token }}|{{ unk_token }}|{{ image_token }}|{{ messages[0].content }}"
    added = {"content": "<added>", "lstrip": False, "normalized": False, "rstrip": False, "single_word": False,
             "special": True, "__type": "AddedToken"}
    named = [{"name": "default", "template": "default " + show},
             {"name": "tool_use", "template": "tool_use {{ tools|tojson }}"},
             {"name": "rag", "template": "rag {{ documents|length }}"}]
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    requests = [
        {}, {"tools": [tool]}, {"tools": []}, {"chat_template_kwargs": {"bos_token": "other", "pad_token": None}},
        {"messages": []}, {"add_generation_prompt": True, "continue_final_message": True},
        {"continue_final_message": True},
    ]
    config = json.dumps({"bos_token": "<s>", "eos_token": added, "pad_token": None, "unk_token": "<unk>",
                         "add_bos_token": True, "image_token": "<img>", "tokenizer_class": "PreTrainedTokenizerFast",
                         "chat_template": show})
    listed = json.dumps({"bos_token": added, "eos_token": "</s>", "chat_template": named})
    no_default = json.dumps({"eos_token": "</s>", "chat_template": named[1:]})
    plain = json.dumps({"eos_token": "</s>", "chat_template": "from the configuration " + show})
    tokens = json.dumps({"bos_token": {**added, "content": "<old bos>"}, "eos_token": "<old eos>"})
    decoder = json.dumps({"bos_token": "<s>", "eos_token": "</s>", "added_tokens_decoder": {"0": {
        k: v for k, v in {**added, "content": "<unk>"}.items() if k != "__type"}}, "chat_template": show})
    extra = json.dumps({"bos_token": "<s>", "extra_special_tokens": {"image_token": "<extra>"}, "chat_template": show})
    return [
        checkpoint({"tokenizer_config.json": config}, requests),
        checkpoint({"tokenizer_config.json": listed}, requests[:4]),
        checkpoint({"tokenizer_config.json": no_default}, requests[:3]),
        checkpoint({"tokenizer_config.json": plain, "chat_template.jinja": "from the file " + show + "\r\n"},
                   requests[:4]),
        checkpoint({"tokenizer_config.json": listed, "chat_template.jinja": "file " + show,
                    "additional_chat_templates/tool_use.jinja": "file tools {{ tools|length }}"}, requests[:4]),
        checkpoint({"tokenizer_config.json": plain, "special_tokens_map.json": tokens}, requests[:1]),
        checkpoint({"tokenizer_config.json": decoder, "special_tokens_map.json": tokens}, requests[:1]),
        checkpoint({"tokenizer_config.json": extra}, requests[:1]),
    ]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--qwen3-template", type=pathlib.Path, help="chat template of a Qwen3 checkpoint")
    arguments = parser.parse_args()
    chat.datetime = Clock
    templates = sorted((FOLDER / "templates").glob("*.jinja"))
    write("templates.json", [case for path in templates for case in prompts(path.stem, path.read_text("utf-8"))])
    write("checkpoints.json", checkpoints())
    if arguments.qwen3_template:
        write("qwen3.json", prompts("qwen3", arguments.qwen3_template.read_text("utf-8")))


if __name__ == "__main__":
    main()
