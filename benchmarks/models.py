"""Write a Hugging Face checkpoint with random weights in the shape of a known model, and a file of random text.

    python benchmarks/models.py SHAPE FOLDER --tokenizer FOLDER   # SHAPE: smollm2, llama-8b or llama-8b-half
    python benchmarks/models.py tiny FOLDER --tokenizer FOLDER    # SmolLM2's with four layers

The tokenizer is a folder with tokenizer.json and its configs, such as SmolLM2's (49152 tokens); every shape has its
vocabulary. The weights are made on the GPU if there is one: 15 GB of random numbers take minutes on a CPU.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
from pathlib import Path
from typing import Any

VOCABULARY = 49152
COMMON = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16", "hidden_act": "silu",
    "vocab_size": VOCABULARY, "attention_bias": False, "mlp_bias": False, "attention_dropout": 0.0,
    "rms_norm_eps": 1e-5, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2, "initializer_range": 0.02,
}  # fmt: skip
SMOLLM2 = {
    "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
    "num_key_value_heads": 3, "head_dim": 64, "max_position_embeddings": 8192, "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
}  # fmt: skip
LLAMA_8B = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 131072, "tie_word_embeddings": False,
    "rope_parameters": {
        "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
    },
}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "smollm2": SMOLLM2,
    "tiny": {**SMOLLM2, "num_hidden_layers": 4},
    "llama-8b": LLAMA_8B,
    "llama-8b-half": {**LLAMA_8B, "num_hidden_layers": 16},
}
LAYERS_PER_FILE = 8


def write(shape: str, folder: Path, tokenizer: Path) -> Path:
    """Write the checkpoint; ``folder`` must not exist."""
    config = COMMON | SHAPES[shape]
    shutil.copytree(tokenizer, folder, ignore=shutil.ignore_patterns("*.safetensors*", "config.json"))
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    index: dict[str, str] = {}
    for first in range(0, config["num_hidden_layers"], LAYERS_PER_FILE):
        layers = range(first, min(first + LAYERS_PER_FILE, config["num_hidden_layers"]))
        shapes = {name: size for layer in layers for name, size in _layer(config, layer).items()}
        _save(folder, f"model-{first:03}.safetensors", shapes, index)
    shapes = {"model.embed_tokens.weight": (VOCABULARY, config["hidden_size"])}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (VOCABULARY, config["hidden_size"])
    shapes["model.norm.weight"] = (config["hidden_size"],)
    _save(folder, "model-ends.safetensors", shapes, index)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return folder


def _layer(config: dict[str, Any], layer: int) -> dict[str, tuple[int, ...]]:
    hidden, wide, width = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    heads, groups = config["num_attention_heads"] * width, config["num_key_value_heads"] * width
    sizes = {
        "self_attn.q_proj": (heads, hidden), "self_attn.k_proj": (groups, hidden), "self_attn.v_proj": (groups, hidden),
        "self_attn.o_proj": (hidden, heads), "mlp.gate_proj": (wide, hidden), "mlp.up_proj": (wide, hidden),
        "mlp.down_proj": (hidden, wide), "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,),
    }  # fmt: skip
    return {f"model.layers.{layer}.{name}.weight": size for name, size in sizes.items()}


def _save(folder: Path, file: str, shapes: dict[str, tuple[int, ...]], index: dict[str, str]) -> None:
    import torch
    from safetensors.torch import save_file

    device = "cuda" if torch.cuda.is_available() else "cpu"
    random_numbers = torch.Generator(device).manual_seed(len(index))
    tensors = {}
    for name, size in shapes.items():
        tensor = torch.ones(size, dtype=torch.bfloat16, device=device)
        if "norm" not in name:
            tensor.normal_(0, COMMON["initializer_range"], generator=random_numbers)
        tensors[name] = tensor.cpu()
        index[name] = file
    save_file(tensors, folder / file, metadata={"format": "pt"})


def write_text(file: Path, texts: int, words: int) -> Path:
    """A .jsonl of texts of random English words; each word is at least one token."""
    known = (Path(__file__).parents[1] / "mlmsub/runtime/quantization/calibration.txt").read_text().split()
    chosen = random.Random(1)
    with file.open("w") as lines:
        for _ in range(texts):
            lines.write(json.dumps({"text": " ".join(chosen.choices(known, k=words))}) + "\n")
    return file


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tokenizer", type=Path, required=True)
    given = parser.parse_args()
    print(write(given.shape, given.folder, given.tokenizer))
