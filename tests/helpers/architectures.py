"""Architectures of the transformers library, small and with random weights, split at 2 and 4 stages.

    python tests/helpers/architectures.py [NAME ...]

Output, gradients and buffers of the stages must be the whole module's. Prints a line for each architecture; the exit
code is 1 if one differs, or is refused unexpectedly.
"""

from __future__ import annotations

import sys
import time
import warnings
from typing import Any

import torch
import transformers
from split_models import agree

from mpirun import split
from schedgen.util.errors import UsageError

WORDS = 100
TOKENS = torch.arange(2 * 8).view(2, 8) * 7 % WORDS
IMAGE = torch.linspace(-1, 1, 2 * 3 * 32 * 32).view(2, 3, 32, 32)
FEATURES, SOUND = torch.linspace(-1, 1, 2 * 8 * 40).view(2, 8, 40), torch.linspace(-1, 1, 2 * 400).view(2, 400)

LAYERS = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 64}
BASE = {**LAYERS, "vocab_size": WORDS, "max_position_embeddings": 64}
GROUPED = {**BASE, "num_key_value_heads": 2, "pad_token_id": 0}
STILL = {"hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0}
TWO_SIDED = {
    "vocab_size": WORDS, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_position_embeddings": 64,
    "dropout": 0, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1,
}  # fmt: skip
PATCHES = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64, "image_size": 32, "patch_size": 8}
TOWERS = {
    "text_config": {**BASE, "num_hidden_layers": 2, "eos_token_id": 2},
    "vision_config": {**PATCHES, "num_hidden_layers": 2},
    "projection_dim": 16,
}
WAVES = {
    **BASE, "num_hidden_layers": 2, "conv_dim": [16, 16], "conv_stride": [5, 2], "conv_kernel": [10, 3],
    "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4,
    "hidden_dropout": 0, "attention_dropout": 0, "feat_proj_dropout": 0, "final_dropout": 0, "layerdrop": 0,
    "activation_dropout": 0, "apply_spec_augment": False,
}  # fmt: skip

TEXT: dict[str, Any] = {"input_ids": TOKENS, "use_cache": False}
MASKED: dict[str, Any] = {"input_ids": TOKENS}
BOTH: dict[str, Any] = {**TEXT, "decoder_input_ids": TOKENS.flip(1)}
SEEN: dict[str, Any] = {"pixel_values": IMAGE}
HEARD: dict[str, Any] = {"input_features": FEATURES, "decoder_input_ids": TOKENS, "use_cache": False}

# name in the library: its task, its configuration, its inputs
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "GPT2": ("LMHeadModel", {"vocab_size": WORDS, "n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 64}, TEXT),
    "Llama": ("ForCausalLM", GROUPED, TEXT),
    "Mistral": ("ForCausalLM", GROUPED, TEXT),
    "Qwen2": ("ForCausalLM", GROUPED, TEXT),
    "Qwen3": ("ForCausalLM", {**GROUPED, "head_dim": 8}, TEXT),
    "Gemma": ("ForCausalLM", {**GROUPED, "head_dim": 8}, TEXT),
    "Gemma2": ("ForCausalLM", {**GROUPED, "head_dim": 8}, TEXT),
    "Phi3": ("ForCausalLM", GROUPED, TEXT),
    "OPT": ("ForCausalLM", {**BASE, "ffn_dim": 64, "word_embed_proj_dim": 32, "dropout": 0}, TEXT),
    "Bloom": ("ForCausalLM", {"vocab_size": WORDS, "hidden_size": 32, "n_layer": 4, "n_head": 4}, TEXT),
    "GPTNeoX": ("ForCausalLM", BASE, TEXT),
    "GPTJ": (
        "ForCausalLM",
        {"vocab_size": WORDS, "n_embd": 32, "n_layer": 4, "n_head": 4, "rotary_dim": 8, "n_positions": 64},
        TEXT,
    ),
    "Falcon": ("ForCausalLM", BASE, TEXT),
    "Mixtral": ("ForCausalLM", {**GROUPED, "num_local_experts": 4, "experts_implementation": "batched_mm"}, TEXT),
    "Mamba": ("ForCausalLM", {"vocab_size": WORDS, "hidden_size": 32, "num_hidden_layers": 4, "state_size": 4}, TEXT),
    "Rwkv": ("ForCausalLM", {**BASE, "num_hidden_layers": 2, "context_length": 16}, TEXT),
    "Bert": ("ForMaskedLM", {**BASE, **STILL}, MASKED),
    "Roberta": ("ForMaskedLM", {**BASE, **STILL}, MASKED),
    "DistilBert": (
        "ForMaskedLM",
        {"vocab_size": WORDS, "dim": 32, "n_layers": 4, "n_heads": 4, "hidden_dim": 64, "dropout": 0},
        MASKED,
    ),
    "Electra": ("ForMaskedLM", {**BASE, **STILL, "embedding_size": 32}, MASKED),
    "Albert": ("ForMaskedLM", {**BASE, "embedding_size": 16}, MASKED),
    "DebertaV2": ("ForMaskedLM", {**BASE, **STILL}, MASKED),
    "T5": (
        "ForConditionalGeneration",
        {"vocab_size": WORDS, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "dropout_rate": 0},
        BOTH,
    ),
    "Bart": ("ForConditionalGeneration", TWO_SIDED, BOTH),
    "Marian": ("MTModel", TWO_SIDED, BOTH),
    "Whisper": ("ForConditionalGeneration", {**TWO_SIDED, "max_source_positions": 20, "num_mel_bins": 8}, HEARD),
    "Wav2Vec2": ("ForCTC", WAVES, {"input_values": SOUND}),
    "ViT": ("ForImageClassification", {**PATCHES, "num_hidden_layers": 4}, SEEN),
    "Swin": (
        "ForImageClassification",
        {
            "image_size": 32, "patch_size": 2, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4],
            "window_size": 4, "drop_path_rate": 0.0,
        },
        SEEN,
    ),
    "ConvNext": ("ForImageClassification", {"hidden_sizes": [16, 32, 32, 32], "depths": [1, 1, 1, 1]}, SEEN),
    "ResNet": (
        "ForImageClassification",
        {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [2, 2], "layer_type": "basic"},
        SEEN,
    ),
    "CLIP": ("Model", TOWERS, {**MASKED, **SEEN}),
}  # fmt: skip
REFUSED = {"Bloom"}  # it defines a backward of its own


def outcome(name: str) -> str:
    """Split an architecture at 2 and 4 stages; return `equal`, or why the stages are not."""
    task, options, inputs = MODELS[name]
    torch.manual_seed(0)
    module = getattr(transformers, name + task)(getattr(transformers, f"{name}Config")(**options)).eval()
    for stages in (2, 4):
        try:
            agree(module, split(module, (), inputs, stages=stages), (), inputs)
        except UsageError as error:
            return f"refused: {error}"
        except AssertionError as error:
            return f"differs at {stages} stages: {error}"
    return "equal"


def main(names: list[str]) -> int:
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    wrong = 0
    for name in names or MODELS:
        begin = time.monotonic()
        result = outcome(name)
        print(f"{name:11} {time.monotonic() - begin:5.1f} s  {result}", flush=True)
        wrong += not result.startswith("refused" if name in REFUSED else "equal")
    return wrong > 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
