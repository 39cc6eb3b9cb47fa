"""Write a small language model to a directory, as transformers saves one: something to try finetune_lm on.

    python -m mpirun.examples.byte_lm DIRECTORY

It is a GPT-2 of four layers with random weights, and a tokenizer whose tokens are bytes.
"""

import argparse

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast


def main(directory: str, width: int = 32) -> None:
    """Write the model and its tokenizer; `width`: of the vectors."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=256, n_positions=64, n_embd=width, n_layer=4, n_head=2, bos_token_id=0, eos_token_id=0
    )
    GPT2LMHeadModel(config).save_pretrained(directory)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=10**9).save_pretrained(directory)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory")
    main(parser.parse_args().directory)
