"""Writes an exported Llama as the `transformers` package reads one: model.safetensors and config.json.

    mpjax export runs/stdlib-bf16 --plugin examples/llama/llama.py
    python examples/llama/to_transformers.py runs/stdlib-bf16/model.safetensors llama-hf

`transformers.AutoModelForCausalLM.from_pretrained("llama-hf")` then gives the same logits, up to rounding.
"""

from __future__ import annotations

import argparse
import json
import pathlib
from typing import Any

import jax
import safetensors.flax

import mpjax

# Matrices of a block: our path and theirs. They are [in, out] here and [out, in] there.
MATRICES = {
  "attention/q": "self_attn.q_proj",
  "attention/k": "self_attn.k_proj",
  "attention/v": "self_attn.v_proj",
  "attention/o": "self_attn.o_proj",
  "gate": "mlp.gate_proj",
  "up": "mlp.up_proj",
  "down": "mlp.down_proj",
}
NORMS = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}


def weights(params: dict[str, Any]) -> dict[str, jax.Array]:
  """Returns the parameters by the names that `transformers` gives them."""
  blocks = params["blocks"]
  found = {
    "model.embed_tokens.weight": params["embed"]["embedding"],
    "model.norm.weight": params["norm"]["scale"],
    "lm_head.weight": params["head"]["kernel"].T,
  }
  for ours, theirs in MATRICES.items():
    leaf = blocks
    for name in ours.split("/"):
      leaf = leaf[name]
    found |= {f"model.layers.{i}.{theirs}.weight": kernel.T for i, kernel in enumerate(leaf["kernel"])}
  for ours, theirs in NORMS.items():
    found |= {f"model.layers.{i}.{theirs}.weight": s for i, s in enumerate(blocks[ours]["scale"])}
  return found


def config_of(model: mpjax.train.ExportedModel) -> dict[str, Any]:
  """Returns what `config.json` says of the model."""
  options = model.config.model.options
  vocab_size, dim = model.params["embed"]["embedding"].shape
  return {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": dim,
    "intermediate_size": options["hidden"],
    "max_position_embeddings": model.config.data.options["seq_len"],
    "num_attention_heads": options["heads"],
    "num_hidden_layers": options["layers"],
    "num_key_value_heads": options["kv_heads"],
    "rms_norm_eps": options["epsilon"],
    "rope_theta": options["theta"],
    "tie_word_embeddings": False,
    "torch_dtype": model.params["head"]["kernel"].dtype.name,
    "vocab_size": vocab_size,
    "bos_token_id": None,
    "eos_token_id": None,
  }


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("export", type=pathlib.Path, help="the file that mpjax export wrote")
  parser.add_argument("folder", type=pathlib.Path, help="for model.safetensors and config.json")
  options = parser.parse_args()
  mpjax.train.load_plugins([str(pathlib.Path(__file__).with_name("llama.py"))])
  try:
    model = mpjax.train.load_safetensors(options.export)
  except mpjax.train.ConfigError as error:
    parser.error(str(error))
  if model.config.model.kind != "llama":
    parser.error(f"{options.export} holds a {model.config.model.kind}: expected a llama")
  options.folder.mkdir(parents=True, exist_ok=True)
  named = weights(model.params)
  # By Python, so that the file has the mode that the umask gives.
  (options.folder / "model.safetensors").write_bytes(safetensors.flax.save(named, metadata={"format": "pt"}))
  (options.folder / "config.json").write_text(json.dumps(config_of(model), indent=2) + "\n")
  print(f"wrote {options.folder / 'model.safetensors'}: {len(named)} tensors, and config.json")


if __name__ == "__main__":
  main()
