r"""Writes a Qwen2 model of Hugging Face's layout as a GGUF file in llama.cpp's Q4_0, rounded by llama.cpp itself.

    pip install llama-cpp-python gguf
    python benchmarks/comparison/write_gguf.py /tmp/qwen2-0.5b /tmp/qwen2-0.5b-q4_0.gguf

The file has no vocabulary: benchmarks send token ids. llama.cpp rounds the embedding, which is also the output layer
of models that tie both, to 6 bits, or to 8 if rows are no multiple of 256 wide. Imports neither torch nor this
project, so that it runs in an environment of its own.

On processors with AMX the products of llama-cpp-python 0.3.36 end with a segmentation fault on such a file; there it
is installed without them:

    CMAKE_ARGS="-DGGML_NATIVE=OFF -DGGML_AVX_VNNI=ON -DGGML_AVX512=ON -DGGML_AVX512_VBMI=ON -DGGML_AVX512_VNNI=ON \
    -DGGML_AVX512_BF16=ON" pip install llama-cpp-python
"""

from __future__ import annotations

import json
import pathlib
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import gguf  # type: ignore[import-not-found]
import llama_cpp  # type: ignore[import-not-found]
import numpy as np

# of a layer, in both layouts
_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_OTHERS = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def tensors(directory: pathlib.Path) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    """Name and float32 values of each bfloat16 tensor in the safetensors files."""
    for path in sorted(directory.glob("*.safetensors")):
        data = np.memmap(path, np.uint8, "r")
        start = 8 + int.from_bytes(data[:8].tobytes(), "little")
        header = json.loads(data[8:start].tobytes())
        header.pop("__metadata__", None)
        for name, entry in header.items():
            if entry["dtype"] != "BF16":
                raise SystemExit(f"{path}: {name} is {entry['dtype']}, and only BF16 is read")
            begin, end = (start + offset for offset in entry["data_offsets"])
            # bfloat16 is the upper half of a float32
            values = (data[begin:end].view(np.uint16).astype(np.uint32) << 16).view(np.float32)
            yield name, values.reshape(entry["shape"])


def gguf_name(name: str) -> str:
    """A tensor's name in GGUF."""
    stem, _, kind = name.rpartition(".")
    if stem in _OTHERS:
        return f"{_OTHERS[stem]}.{kind}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{_NAMES[part]}.{kind}"


def write(directory: pathlib.Path, path: pathlib.Path) -> None:
    """Writes the model in float16, as llama.cpp's quantizer reads it."""
    config = json.loads((directory / "config.json").read_text())
    if config["model_type"] != "qwen2":
        raise SystemExit(f"{directory}: a model of the type {config['model_type']}, and only qwen2 is written")
    writer = gguf.GGUFWriter(path, "qwen2")
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    for name, values in tensors(directory):
        writer.add_tensor(gguf_name(name), values.astype(np.float16) if values.ndim > 1 else values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    """Writes the file."""
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    source, target = map(pathlib.Path, sys.argv[1:])
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        wide = pathlib.Path(scratch) / "f16.gguf"
        write(source, wide)
        params = llama_cpp.llama_model_quantize_default_params()
        params.ftype = llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0
        if llama_cpp.llama_model_quantize(str(wide).encode(), str(target).encode(), params):
            raise SystemExit("llama.cpp cannot quantize the model")


if __name__ == "__main__":
    main()
