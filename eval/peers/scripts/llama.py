"""llama.cpp: its own decoding loop through the C interface of llama-cpp-python, so that Python costs next to nothing.

See `protocol.py` for the command line. Quantised files are made by llama.cpp from one in bfloat16.
"""

import ctypes
import json
from importlib.metadata import version
from pathlib import Path
from time import perf_counter
from typing import Any

from eval.peers.scripts import protocol

_CONTEXT, _BATCH = 2048, 512
_TYPES = {"float32": "F32", "bfloat16": "BF16"}
_QUANTISED = {"int8": "LLAMA_FTYPE_MOSTLY_Q8_0", "int4": "LLAMA_FTYPE_MOSTLY_Q4_0"}
_LAYER = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip
_OTHERS = {
    "model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}  # fmt: skip


def convert(source: str, destination: str, precision: str) -> None:
    file = Path(destination) / "model.gguf"
    file.parent.mkdir(parents=True, exist_ok=True)
    if precision in _TYPES:
        write(Path(source), file, _TYPES[precision])
        return
    import llama_cpp

    between = file.with_name("bfloat16.gguf")
    write(Path(source), between, "BF16")
    options = llama_cpp.llama_model_quantize_default_params()
    options.ftype = getattr(llama_cpp, _QUANTISED[precision])
    failed = llama_cpp.llama_model_quantize(str(between).encode(), str(file).encode(), ctypes.byref(options))
    between.unlink()
    if failed:
        raise SystemExit(f"llama.cpp cannot quantise {source}; its messages are above")


def write(source: Path, file: Path, kind: str) -> None:
    """A Llama of transformers' as GGUF, without a tokenizer: ids go in and come out."""
    import numpy as np
    from gguf import GGMLQuantizationType, GGUFWriter
    from gguf.quants import quantize

    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer = GGUFWriter(file, "llama")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_rope_dimension_count(config.get("head_dim") or config["hidden_size"] // heads)
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    for name, weight in tensors(source / "model.safetensors"):
        if name in _OTHERS:
            new = _OTHERS[name]
        else:
            _, _, layer, part = name.removesuffix(".weight").split(".", 3)
            new = f"blk.{layer}.{_LAYER[part]}.weight"
            if part in ("self_attn.q_proj", "self_attn.k_proj"):  # llama.cpp rotates neighbours, transformers halves
                count = heads if part == "self_attn.q_proj" else kv_heads
                weight = weight.reshape(count, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)
        if weight.ndim == 1 or kind == "F32":
            writer.add_tensor(new, np.ascontiguousarray(weight))
        else:
            of_type = GGMLQuantizationType[kind]
            writer.add_tensor(new, quantize(weight, of_type), raw_dtype=of_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def tensors(file: Path) -> Any:
    """Names and float32 weights of a safetensors file; numpy has no bfloat16, which is the upper half of a float32."""
    import numpy as np

    with file.open("rb") as opened:
        size = int.from_bytes(opened.read(8), "little")
        header = json.loads(opened.read(size))
    data = np.memmap(file, dtype=np.uint8, mode="r", offset=8 + size)
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        first, last = entry["data_offsets"]
        raw = data[first:last]
        if entry["dtype"] == "BF16":
            weight = (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        else:
            weight = raw.view(np.float32)
        yield name, weight.reshape(entry["shape"])


def serve(model: str, precision: str, threads: int) -> tuple[protocol.Answer, dict[str, str]]:
    import llama_cpp

    llama_cpp.llama_backend_init()
    loaded = llama_cpp.llama_model_load_from_file(
        str(Path(model) / "model.gguf").encode(), llama_cpp.llama_model_default_params()
    )
    options = llama_cpp.llama_context_default_params()
    options.n_ctx, options.n_batch, options.n_ubatch = _CONTEXT, _BATCH, _BATCH
    options.n_threads = options.n_threads_batch = threads
    if precision == "float32":
        options.type_k = options.type_v = llama_cpp.GGML_TYPE_F32
    context = llama_cpp.llama_init_from_model(loaded, options)
    if not context:
        raise SystemExit(f"llama.cpp cannot load {model}; its messages are above")
    greedy = llama_cpp.llama_sampler_init_greedy()

    def after(tokens: list[int]) -> int:
        given = (llama_cpp.llama_token * len(tokens))(*tokens)  # which the batch points to
        batch = llama_cpp.llama_batch_get_one(given, len(tokens))
        if llama_cpp.llama_decode(context, batch):
            raise SystemExit("llama.cpp cannot decode; its messages are above")
        return llama_cpp.llama_sampler_sample(greedy, context, -1)

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
        started = perf_counter()
        tokens = [after(request["prompt"])]
        first = perf_counter()
        while len(tokens) < request["new_tokens"] and tokens[-1] not in request["end_tokens"]:
            tokens.append(after(tokens[-1:]))
        return {
            "tokens": tokens,
            "prefill_seconds": first - started,
            "decode_seconds": perf_counter() - first,
        }

    return answer, {"llama-cpp-python": version("llama-cpp-python")}


if __name__ == "__main__":
    protocol.run(serve, convert)
