"""The tokenizer fixture: a tiny byte-level BPE, its config, and a worked text generation.

The tokenizer is trained on the sentences below, which are the project's own, so that regenerating
it needs no corpus. They mix scripts: with so few merges most non-ASCII characters are split into
several tokens, which is what a streaming decoder has to get right.
"""

import json

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer

from make_reference import greedy, load

END, USER, STOP = "<|endoftext|>", "<|im_start|>", "<|im_end|>"

SENTENCES = [
    "The router sends each token to the experts that it scores highest.",
    "Every expert reads the tokens that were sent to it and writes them back.",
    "The token's owner weights the rows and adds them in order.",
    "Attention walks the cache in blocks; a window hides the oldest of them.",
    "naïve café, 東京の朝, Привет, 👋🏽 and 10,000 other things",
]

PROMPTS = [
    "The router sends each token",
    "naïve café 👋🏽 東京",
    "  two spaces, a tab\tand\n\na blank line",
    "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n",
]

# ChatML without tools or a system default: enough to test rendering and special tokens.
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_tokenizer(directory, vocab_size):
    """tokenizer.json and tokenizer_config.json with exactly `vocab_size` entries."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    # The special tokens come last, as in published Qwen3 tokenizers.
    special = [END, USER, STOP]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(special), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    tokenizer.add_special_tokens(special)
    if tokenizer.get_vocab_size() != vocab_size:
        raise RuntimeError(f"{tokenizer.get_vocab_size()} tokens instead of {vocab_size}")
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": None, "eos_token": STOP,
        "pad_token": END, "unk_token": None, "clean_up_tokenization_spaces": False,
        "model_max_length": 512, "chat_template": CHAT_TEMPLATE,
    }  # fmt: skip
    text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    (directory / "tokenizer_config.json").write_text(text, encoding="utf-8")


def text_cases(directory, count):
    """Prompts with their ids and `count` greedy tokens as ids and text, plus one rendered chat."""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = load(directory, torch.float32)
    cases = []
    for prompt in PROMPTS:
        ids = tokenizer(prompt)["input_ids"]
        tokens = greedy(model, torch.tensor([ids]), count)[0][0].tolist()
        cases.append({
            "prompt": prompt, "prompt_ids": ids, "generated_ids": tokens,
            "generated_text": tokenizer.decode(tokens, skip_special_tokens=True),
        })  # fmt: skip
    messages = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi!"}]
    chat = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return {"greedy": cases, "chat": {"messages": messages, "rendered": chat}}
