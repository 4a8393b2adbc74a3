"""Writes what a rehearsal needs: a tiny model in Hugging Face format, a tokenizer of characters, prompts."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

CHARACTERS = "0123456789+-*/=? abcdefghijklmnopqrstuvwxyz"
SPECIAL = ("<pad>", "<eos>", "<unk>")
VOCABULARY = 64
"""Rows of the embedding: a power of two, so that Megatron adds no padding."""

SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 128,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "initializer_range": 0.1,
}
"""The standard deviation is large: at 0.02 two layers hardly change the distribution, and nothing could be compared."""


def write_model(folder: Path, family: str = "qwen3_moe", seed: int = 1) -> None:
    """Save a randomly initialised model of `family` (``qwen3_moe`` or ``deepseek_v3``) and its tokenizer."""
    import torch
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(seed)
    # No padding: transformers would zero its embedding, and a norm of zeros has a gradient of a thousand.
    ids = {"eos_token_id": SPECIAL.index("<eos>"), "pad_token_id": None, "bos_token_id": None}
    if family == "qwen3_moe":
        config = Qwen3MoeConfig(
            **SIZES,
            **ids,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            decoder_sparse_step=1,
            norm_topk_prob=True,
            rope_theta=1_000_000.0,
        )
        model = Qwen3MoeForCausalLM(config)
    else:
        sizes = {key: value for key, value in SIZES.items() if key != "head_dim"}
        config = DeepseekV3Config(
            **sizes,
            **ids,
            q_lora_rank=32,
            kv_lora_rank=16,
            qk_nope_head_dim=16,
            qk_rope_head_dim=8,
            v_head_dim=16,
            n_routed_experts=4,
            num_experts_per_tok=2,
            n_shared_experts=1,
            n_group=1,
            topk_group=1,
            moe_intermediate_size=32,
            first_k_dense_replace=1,
        )
        config.num_key_value_heads = config.num_attention_heads
        model = DeepseekV3ForCausalLM(config)
    model.to(torch.bfloat16).save_pretrained(folder)
    write_tokenizer(folder)


def write_tokenizer(folder: Path) -> None:
    """One token a character, and a chat template that leaves the text as it is."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = [*SPECIAL, *CHARACTERS]
    vocabulary = {word: index for index, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", pad_token="<pad>", eos_token="<eos>", model_max_length=512
    )
    fast.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    fast.save_pretrained(folder)


def write_prompts(file: Path, count: int = 16) -> None:
    """Lines with a sum and its result."""
    lines = (json.dumps({"text": f"{n}+{n + 1}=?", "label": str(2 * n + 1)}) for n in range(count))
    file.write_text("\n".join(lines) + "\n")


def main() -> None:
    """``python -m musa_titan.rl.rehearsal.assets FOLDER``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--family", choices=("qwen3_moe", "deepseek_v3"), default="qwen3_moe")
    asked = parser.parse_args()
    asked.folder.mkdir(parents=True, exist_ok=True)
    write_model(asked.folder / "hf", asked.family)
    write_prompts(asked.folder / "prompts.jsonl")


if __name__ == "__main__":
    main()
