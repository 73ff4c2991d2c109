"""A tiny Kimi-K2 in a folder as its publisher's: remote code, a tiktoken tokenizer, FP8 block-scaled weights, YaRN.

Weights are random; sizes are multiples of 128 where FP8 blocks are cut.
"""

# ruff: noqa: C408 (fields of a config read best as keywords)

import base64
import json
from pathlib import Path
from typing import Any

import torch

BLOCK = 128
WORDS = ("the", " the", "an", "in", "er", "on", " a", " of", " to", "ing")  # merges, in the order of their ranks
SPECIAL = ("[BOS]", "[EOS]", "<|im_end|>", "[PAD]")
YARN = dict(
    rope_type="yarn", factor=32.0, beta_fast=1.0, beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0,
    original_max_position_embeddings=64,
)  # fmt: skip
SIZES = dict(
    vocab_size=512, hidden_size=256, intermediate_size=256, moe_intermediate_size=128, num_hidden_layers=3,
    num_attention_heads=4, num_key_value_heads=4, n_shared_experts=1, n_routed_experts=8, num_experts_per_tok=2,
    first_k_dense_replace=1, kv_lora_rank=128, q_lora_rank=128, qk_rope_head_dim=32, qk_nope_head_dim=32,
    v_head_dim=64, max_position_embeddings=2048, rms_norm_eps=1e-6, rope_theta=50000.0, tie_word_embeddings=False,
    routed_scaling_factor=2.827, norm_topk_prob=True, n_group=1, topk_group=1, initializer_range=0.06,
)  # fmt: skip

CONFIGURATION = """\
from pathlib import Path

from transformers import DeepseekV3Config

Path(__file__).with_suffix(".ran").touch()


class DeepseekV3Config(DeepseekV3Config):
    model_type = "kimi_k2"
"""
TOKENIZATION = """\
import json
from pathlib import Path

import tiktoken
from tiktoken.load import load_tiktoken_bpe
from transformers import PreTrainedTokenizer
from transformers.models.gpt2.tokenization_gpt2 import bytes_to_unicode


class TikTokenTokenizer(PreTrainedTokenizer):
    vocab_files_names = {"vocab_file": "tiktoken.model"}
    model_input_names = ["input_ids", "attention_mask"]

    def __init__(self, vocab_file, **kwargs):
        ranks = load_tiktoken_bpe(str(vocab_file))
        decoder = kwargs.get("added_tokens_decoder") or {}
        special = {str(token): int(index) for index, token in decoder.items()}
        self.model = tiktoken.Encoding("kimi", pat_str=r" ?\\w+|\\W", mergeable_ranks=ranks, special_tokens=special)
        letters = bytes_to_unicode()
        self.names = {"".join(letters[byte] for byte in word): rank for word, rank in ranks.items()} | special
        self.words = {index: name for name, index in self.names.items()}
        self.vocab_file = str(vocab_file)
        super().__init__(**kwargs)

    @property
    def vocab_size(self):
        return self.model.n_vocab

    def get_vocab(self):
        return dict(self.names)

    def _tokenize(self, text, **kwargs):
        return [self.words[index] for index in self.model.encode(text, disallowed_special=())]

    def _convert_token_to_id(self, token):
        return self.names[token]

    def _convert_id_to_token(self, index):
        return self.words[index]

    def save_vocabulary(self, save_directory, filename_prefix=None):
        target = Path(save_directory) / "tiktoken.model"
        if target != Path(self.vocab_file):
            target.write_bytes(Path(self.vocab_file).read_bytes())
        return (str(target),)
"""


def make_kimi(folder: Path, **changes: Any) -> torch.nn.Module:
    """Write the folder; returns transformers' model in float32 with the very weights that the FP8 blocks hold."""
    made = _model(folder, changes)
    stored: dict[str, torch.Tensor] = {}
    for name, tensor in made.state_dict().items():
        split = {name: tensor}
        if name.endswith("experts.gate_up_proj"):  # transformers packs the experts that the files hold one by one
            split = {}
            for expert, packed in enumerate(tensor):
                parts = packed.chunk(2)
                split |= {name.replace("gate_up_proj", f"{expert}.{kind}_proj.weight"): part
                          for kind, part in zip(("gate", "up"), parts, strict=True)}  # fmt: skip
        elif name.endswith("experts.down_proj"):
            split = {name.replace("down_proj", f"{n}.down_proj.weight"): part for n, part in enumerate(tensor)}
        for key, part in split.items():
            stored |= _blocks(key, part)
    _write(folder, stored)
    return made


def _model(folder: Path, changes: dict[str, Any]) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM, DeepseekV3Config

    folder.mkdir(parents=True)
    config = DeepseekV3Config(**{**SIZES, **changes}, rope_scaling={**YARN, "rope_theta": SIZES["rope_theta"]})
    torch.manual_seed(5)
    made = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, tensor in [*made.named_parameters(), *made.named_buffers()]:
            if name.endswith("e_score_correction_bias"):
                tensor.uniform_(-0.3, 0.3)
            elif "norm" in name:
                tensor.uniform_(0.5, 1.5)
            elif "inv_freq" not in name:
                if tensor.ndim == 3:
                    tensor.normal_(0, 0.06)
                tensor.copy_(tensor.bfloat16())
    _write_config(folder, config)
    _write_tokenizer(folder)
    return made


def _blocks(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """What the file holds of one tensor: linear weights as e4m3 with a scale per block; rounds `tensor` to it."""
    quantized = name.endswith("proj.weight") or "_proj_with_mqa" in name or "_a_proj" in name or "_b_proj" in name
    if not quantized:
        return {name: tensor.clone() if name.endswith("e_score_correction_bias") else tensor.bfloat16()}
    rows, columns = (-(-size // BLOCK) for size in tensor.shape)
    padded = torch.zeros(rows * BLOCK, columns * BLOCK)
    padded[: tensor.shape[0], : tensor.shape[1]] = tensor
    blocks = padded.view(rows, BLOCK, columns, BLOCK)
    scale = blocks.abs().amax((1, 3)).clamp(min=1e-12) / 448
    low = (blocks / scale[:, None, :, None]).to(torch.float8_e4m3fn)
    exact = (low.float() * scale[:, None, :, None]).reshape(padded.shape)[: tensor.shape[0], : tensor.shape[1]]
    with torch.no_grad():
        tensor.copy_(exact)
    whole = low.reshape(padded.shape)[: tensor.shape[0], : tensor.shape[1]].contiguous()
    return {name: whole, f"{name}_scale_inv": scale}


def _write(folder: Path, stored: dict[str, torch.Tensor]) -> None:
    from safetensors.torch import save_file

    names = sorted(stored)
    files = {"model-1-of-2.safetensors": names[::2], "model-2-of-2.safetensors": names[1::2]}
    for file, held in files.items():
        save_file({name: stored[name].contiguous() for name in held}, folder / file, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": {name: file for file, held in files.items() for name in held}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _write_config(folder: Path, config: Any) -> None:
    data = config.to_dict()
    rope = data.pop("rope_parameters", None) or data.pop("rope_scaling")
    theta = rope.pop("rope_theta", SIZES["rope_theta"])
    data |= {
        "model_type": "kimi_k2", "architectures": ["DeepseekV3ForCausalLM"], "rope_theta": theta,
        "rope_scaling": {**rope, "type": rope.pop("rope_type")}, "dtype": "bfloat16",
        "scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1, "num_nextn_predict_layers": 0,
        "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
        "quantization_config": {
            "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK],
        },
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(data, indent=1))
    (folder / "configuration_deepseek.py").write_text(CONFIGURATION)


def _write_tokenizer(folder: Path) -> None:
    ranks = [bytes([byte]) for byte in range(256)] + [word.encode() for word in WORDS if len(word) == 2]
    lines = (f"{base64.b64encode(word).decode()} {rank}" for rank, word in enumerate(ranks))
    (folder / "tiktoken.model").write_text("\n".join(lines) + "\n")
    tokens = {str(len(ranks) + n): {"content": name, "special": True} for n, name in enumerate(SPECIAL)}
    settings = {
        "tokenizer_class": "TikTokenTokenizer", "added_tokens_decoder": tokens, "bos_token": SPECIAL[0],
        "eos_token": SPECIAL[1], "pad_token": SPECIAL[3], "model_max_length": 2048,
        "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
        "chat_template": "{% for m in messages %}{{ m['content'] }}<|im_end|>{% endfor %}",
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))
    (folder / "tokenization_kimi.py").write_text(TOKENIZATION)
