"""Text for training the small model: held-out split, byte-level BPE, and token batches on a device.

The corpus is small enough to overfit within a minute, so each training batch sees it in another
tokenisation: BPE dropout skips merges at random, and a set of such variants is made up front and
kept on the device, where batches are cut out of it without a data loader.
"""

import os

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

END = "<|endoftext|>"
HELD_OUT = 0.1
# Documents for parallel tokenisation; pieces end at blank lines, where no token spans a border.
PIECE_CHARS = 20_000


def split(text):
    """(training, held-out) text: the last tenth, cut at a blank line, is held out."""
    at = text.index("\n\n", int(len(text) * (1 - HELD_OUT))) + 2
    return text[:at], text[at:]


def train_tokenizer(text, vocab_size):
    """Byte-level BPE with `vocab_size` entries, the end-of-text token last."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 1,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([text], trainer)
    tokenizer.add_special_tokens([END])
    return tokenizer


def pieces(text):
    """Cuts text at blank lines into pieces of about PIECE_CHARS."""
    start, out = 0, []
    while start < len(text):
        end = text.find("\n\n", start + PIECE_CHARS)
        end = len(text) if end < 0 else end + 2
        out.append(text[start:end])
        start = end
    return out


def encode(tokenizer, parts):
    """Token ids of the concatenated parts."""
    ids = [encoding.ids for encoding in tokenizer.encode_batch(parts)]
    return torch.tensor([i for part in ids for i in part], dtype=torch.int32)


class Corpus:
    """Training tokens in several tokenisations, and held-out tokens in the plain one."""

    def __init__(self, text, vocab_size, bpe_dropout, variants, device):
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
        train_text, held_out = split(text)
        self.tokenizer = train_tokenizer(train_text, vocab_size)
        parts = pieces(train_text)
        plain = encode(self.tokenizer, parts)
        rows = [plain]
        if bpe_dropout > 0:
            self.tokenizer.model.dropout = bpe_dropout
            rows += [encode(self.tokenizer, parts) for _ in range(variants)]
            self.tokenizer.model.dropout = None
        self.lengths = torch.tensor([len(row) for row in rows], device=device)
        self.tokens = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.int32)
        for i, row in enumerate(rows):
            self.tokens[i, : len(row)] = row
        self.tokens = self.tokens.to(device)
        self.held_out = encode(self.tokenizer, pieces(held_out)).to(device).long()
        self.held_out_bytes = len(held_out.encode())
        self.train_tokens = len(plain)

    def batch(self, size, length, plain_share):
        """(inputs, targets) [size, length]; about `plain_share` of the rows are tokenised plainly."""
        device = self.tokens.device
        rows = torch.randint(len(self.lengths), (size,), device=device)
        rows = rows.masked_fill(torch.rand(size, device=device) < plain_share, 0)
        room = (self.lengths[rows] - length - 1).float()
        starts = (torch.rand(size, device=device) * room).long()
        positions = starts[:, None] + torch.arange(length + 1, device=device)
        window = self.tokens[rows[:, None], positions].long()
        return window[:, :-1], window[:, 1:]
