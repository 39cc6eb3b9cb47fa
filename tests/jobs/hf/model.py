"""A small GPT-2 of transformers, and padded batches as its data collators make them."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel

WORDS, LENGTH = 16, 12


def gpt2() -> GPT2LMHeadModel:
    return GPT2LMHeadModel(GPT2Config(
        vocab_size=WORDS, n_positions=LENGTH, n_embd=32, n_layer=2, n_head=4, use_cache=False, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    ))  # fmt: skip


def sequences(count: int, seed: int) -> list[dict[str, torch.Tensor]]:
    draw, items = torch.Generator().manual_seed(seed), []
    for _ in range(count):
        first, stride, length = (int(torch.randint(*ends, (), generator=draw)) for ends in ((WORDS,), (1, 4), (5, 13)))
        mask = (torch.arange(LENGTH) < length).long()
        tokens = (first + stride * torch.arange(LENGTH)) % WORDS
        labels = torch.where(mask.bool(), tokens, -100)
        items.append({"input_ids": tokens * mask, "attention_mask": mask, "labels": labels})
    return items
