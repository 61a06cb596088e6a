"""Model directories that are broken in one way each, and what the error must name.

A case is a name, the tiny model it starts from, a function that breaks its directory, and parts of the one-line
error.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import pickle
import struct
import zipfile
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

Break = Callable[[pathlib.Path], None]

WEIGHTS = "model.safetensors"
BIN = "pytorch_model.bin"
INDEX = f"{WEIGHTS}.index.json"
K_PROJ = "model.layers.1.self_attn.k_proj.weight"
NORM = "model.norm.weight"
# an object that is nested too deeply for recursive parsers
DEEP = "[" * 100_000
# numbers of JSON that are not valid sizes
INFINITE, NAN = float("inf"), float("nan")


@dataclasses.dataclass(frozen=True)
class Case:
    """A broken model directory.

    Attributes:
        name: of the case.
        model: of `tests.tiny_models` that is broken.
        breaks: breaks a copy of it.
        parts: of the one-line error.
        flags: further arguments of the engine.
    """

    name: str
    model: str
    breaks: Break
    parts: tuple[str, ...]
    flags: Mapping[str, Any] = dataclasses.field(default_factory=dict)


# ---- JSON files ----------------------------------------------------------------------------------------------


def write(file: str, text: str | bytes) -> Break:
    """Writes a file."""

    def breaks(directory: pathlib.Path) -> None:
        (directory / file).write_bytes(text.encode() if isinstance(text, str) else text)

    return breaks


def set_fields(file: str, **fields: Any) -> Break:
    """Sets fields of the JSON object in a file; `...` removes one."""

    def breaks(directory: pathlib.Path) -> None:
        path = directory / file
        values = (json.loads(path.read_text()) if path.exists() else {}) | fields
        path.write_text(json.dumps({name: value for name, value in values.items() if value is not ...}))

    return breaks


def replace_by_directory(file: str) -> Break:
    """Replaces a file by a directory."""

    def breaks(directory: pathlib.Path) -> None:
        (directory / file).unlink(missing_ok=True)
        (directory / file).mkdir()

    return breaks


def replace_by_fifo(file: str) -> Break:
    """Replaces a file by a pipe without a writer."""

    def breaks(directory: pathlib.Path) -> None:
        (directory / file).unlink(missing_ok=True)
        os.mkfifo(directory / file)

    return breaks


def replace_by_link(file: str, target: str) -> Break:
    """Replaces a file by a link."""

    def breaks(directory: pathlib.Path) -> None:
        (directory / file).unlink(missing_ok=True)
        (directory / file).symlink_to(target)

    return breaks


_JSON_TEXTS: dict[str, str | bytes] = {
    "empty": "",
    "cut short": '{"architectures": ["Llama',
    "no JSON": "architectures: Llama",
    "a list": "[]",
    "a text": '"x"',
    "a number": "3",
    "null": "null",
    "deep": DEEP,
    "deep objects": '{"a":' * 100_000,
    "a deep field": '{"a":' + DEEP,
    "not UTF-8": b'{"a": "\xff\xfe"}',
    "UTF-16": '{"a": 1}'.encode("utf-16"),
    "binary": bytes(range(256)) * 10,
    "a very long number": '{"a": ' + "9" * 10_000 + "}",
}


def _json_cases() -> Iterator[Case]:
    """Every JSON file of a directory, replaced by something that is not a JSON object."""
    files = {
        "config.json": "llama",
        "generation_config.json": "llama",
        "tokenizer_config.json": "llama",
        "tokenizer.json": "llama",
        INDEX: "llama-sharded",
        f"{BIN}.index.json": "llama-bin-sharded",
    }
    for file, model in files.items():
        for name, text in _JSON_TEXTS.items():
            # parsers that accept long numbers are not affected by one in an unused field
            if name == "a very long number" and file.startswith("tokenizer"):
                continue
            yield Case(f"{file} {name}", model, write(file, text), (file,))
        yield Case(f"{file} a directory", model, replace_by_directory(file), (file,))
        yield Case(f"{file} a pipe", model, replace_by_fifo(file), (file,))
        yield Case(f"{file} endless", model, replace_by_link(file, "/dev/zero"), (file,))
        yield Case(f"{file} a link to itself", model, replace_by_link(file, file), (file,))
    yield Case("config.json absent", "llama", lambda path: (path / "config.json").unlink(), ("config.json",))
    # transformers reads these in addition to tokenizer_config.json, if they exist
    for name in ("deep", "a list", "not UTF-8"):
        yield Case(
            f"special_tokens_map.json {name}",
            "llama",
            write("special_tokens_map.json", _JSON_TEXTS[name]),
            ("special_tokens_map.json",),
        )
    for name in ("deep", "no JSON", "a text", "not UTF-8"):
        yield Case(
            f"modules.json {name}", "llama", write("modules.json", _JSON_TEXTS[name]), ("modules.json",), _POOL
        )


_POOL = {"convert": "embed"}

# ---- fields of config.json -----------------------------------------------------------------------------------

_NO_NUMBERS: tuple[Any, ...] = ("3", True, [], [3], {}, {"a": 1}, NAN)
_NO_SIZES = (*_NO_NUMBERS, 2.5, 1e9, 0, -1, 10**9, 10**18, 10**30, INFINITE)
# 0 is none
_NO_WINDOWS = tuple(value for value in _NO_SIZES if value not in (0, 10**9) or isinstance(value, float | bool))
_NO_SCALES = (*_NO_NUMBERS, 0, -1.0, INFINITE)
_NO_TEXTS: tuple[Any, ...] = (3, 2.5, True, ["silu"], {})
_NO_SWITCHES: tuple[Any, ...] = ("false", 3, [], {}, 0.5)
_NO_IDS: tuple[Any, ...] = ("2", 2.5, True, {}, [[2]], ["2"], [None], 10**30, NAN)

_ROPE = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 2.0, "original_max_position_embeddings": 64}
_LLAMA3 = _YARN | {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}

# model → field → values that it cannot have
_FIELDS: dict[str, dict[str, tuple[Any, ...]]] = {
    "llama": {
        "vocab_size": (*_NO_SIZES, None),
        "hidden_size": (*_NO_SIZES, None),
        "num_hidden_layers": (*_NO_SIZES, None),
        "num_attention_heads": (*_NO_SIZES, None),
        "num_key_value_heads": _NO_SIZES,
        "intermediate_size": (*_NO_SIZES, None),
        "head_dim": _NO_SIZES,
        "max_position_embeddings": (*_NO_SIZES, None),
        "n_positions": ("3", 0, -1, True, []),
        "model_max_length": ("3", 0, -1, True, []),
        "rms_norm_eps": (*_NO_NUMBERS, -1.0, INFINITE, None),
        "hidden_act": (*_NO_TEXTS, "zebra"),
        "tie_word_embeddings": _NO_SWITCHES,
        "attention_bias": _NO_SWITCHES,
        "mlp_bias": _NO_SWITCHES,
        "eos_token_id": _NO_IDS,
        "dtype": (3, [], {}, True),
        "architectures": (None, [], "Llama", [3], {}, [None]),
        "model_type": (3, [], {}, "zebra"),
        "rope_parameters": ("x", 3, [], True, [1]),
        "rope_scaling": ("x", 3, [1], True),
        "rope_theta": ("3", True, [1], {"a": 1}, -1.0, NAN, INFINITE),
        "partial_rotary_factor": ("3", True, [1], -1.0, 2.0, NAN, INFINITE),
        "quantization_config": ("x", 3, [1], {"quant_method": "awq"}, {"quant_method": []}),
        "auto_map": ("x", 3, [1], True),
    },
    "mistral": {"sliding_window": _NO_WINDOWS},
    "qwen2-window": {
        "sliding_window": _NO_WINDOWS,
        "use_sliding_window": _NO_SWITCHES,
        "max_window_layers": ("3", True, [], {}, 2.5, -1, NAN),
        "layer_types": ("x", 3, {}, [3] * 3, ["zebra"] * 3, ["full_attention"], [None] * 3, True),
    },
    "opt": {
        "ffn_dim": (*_NO_SIZES, None),
        "word_embed_proj_dim": _NO_SIZES,
        "max_position_embeddings": (*_NO_SIZES, None),
        "activation_function": (*_NO_TEXTS, "zebra"),
        "enable_bias": _NO_SWITCHES,
        "do_layer_norm_before": _NO_SWITCHES,
        "layer_norm_elementwise_affine": _NO_SWITCHES,
        "_remove_final_layer_norm": _NO_SWITCHES,
    },
}

# in rope_parameters: type → field → values
_ROPE_FIELDS: dict[str, tuple[dict[str, Any], dict[str, tuple[Any, ...]]]] = {
    "linear": (_ROPE, {"factor": (*_NO_SCALES, None), "rope_type": (3, [], "zebra"), "rope_theta": _NO_SCALES[:5]}),
    "yarn": (
        _YARN,
        {
            "factor": _NO_SCALES,
            "original_max_position_embeddings": _NO_SCALES,
            "beta_fast": _NO_SCALES,
            "beta_slow": _NO_SCALES,
            "mscale": _NO_NUMBERS,
            "attention_factor": _NO_NUMBERS,
            "truncate": _NO_SWITCHES,
        },
    ),
    "llama3": (
        _LLAMA3,
        {
            "factor": (*_NO_SCALES, None),
            "low_freq_factor": (*_NO_SCALES, None),
            "high_freq_factor": (*_NO_SCALES, None, 1.0),
            "original_max_position_embeddings": _NO_SCALES,
        },
    ),
}


def shown(value: Any) -> str:
    """A value in a case's name."""
    return repr(value)[:24]


def _field_cases() -> Iterator[Case]:
    for model, fields in _FIELDS.items():
        for field, values in fields.items():
            for value in values:
                breaks = set_fields("config.json", **{field: value})
                part = field.replace("model_type", "model type")
                yield Case(f"{model} {field} {shown(value)}", model, breaks, ("config.json", part))
    for kind, (good, rope_fields) in _ROPE_FIELDS.items():
        for field, values in rope_fields.items():
            for value in values:
                breaks = set_fields("config.json", rope_parameters=good | {field: value})
                part = "rope type" if field == "rope_type" and value == "zebra" else field
                yield Case(f"{kind} {field} {shown(value)}", "llama", breaks, ("config.json", part))
    # what no machine has room for
    for field, value in (("num_hidden_layers", 9000), ("hidden_size", 2**20), ("vocab_size", 2**26)):
        breaks = set_fields("config.json", **{"intermediate_size": 2**24, "hidden_size": 2**20, field: value})
        yield Case(f"too large {field}", "llama", breaks, ("config.json", f"{field} {value}"))
        yield Case(f"dummy {field}", "llama", breaks, ("config.json", f"{field} {value}"), {"load_format": "dummy"})
    breaks = set_fields("config.json", num_labels=10**12, architectures=["LlamaForSequenceClassification"])
    yield Case("num_labels", "llama", breaks, ("config.json", "num_labels"))
    for value in ("x", 3, [1], {"0": 3}):
        breaks = set_fields("config.json", id2label=value, architectures=["LlamaForSequenceClassification"])
        yield Case(f"id2label {shown(value)}", "llama", breaks, ("config.json", "id2label"))
    breaks = set_fields("config.json", dtype="int4")
    yield Case("dtype int4", "llama", breaks, ("config.json", "dtype"), {"dtype": "auto"})
    for value in ("x", 3, {"a": 1}, ["x"], [0], [-1], [True]):
        breaks = set_fields("config.json", matryoshka_dimensions=value)
        yield Case(f"matryoshka {shown(value)}", "llama", breaks, ("config.json", "matryoshka_dimensions"), _POOL)


# ---- the other JSON files' fields ----------------------------------------------------------------------------

_GENERATION: dict[str, tuple[Any, ...]] = {
    "temperature": ("1", [], {}, True, -1.0, NAN),
    "top_p": ("1", [], {}, True, -1.0, 0, 2.0, NAN),
    "top_k": ("1", [], {}, True, -5, 2.5),
    "min_p": ("1", [], {}, True, -1.0, 2.0),
    "repetition_penalty": ("1", [], {}, True, -1.0, 0, NAN),
    "max_new_tokens": ("1", [], {}, True, -1, 0, 2.5),
    "eos_token_id": _NO_IDS,
}


def _other_field_cases() -> Iterator[Case]:
    file = "generation_config.json"
    for field, values in _GENERATION.items():
        for value in values:
            yield Case(f"{file} {field} {shown(value)}", "llama", set_fields(file, **{field: value}), (file, field))
    file = "tokenizer_config.json"
    for field, values in {
        "chat_template": (3, {"a": 1}, [3], [{"name": "a"}], True),
        "eos_token": (3, [], True, {"content": 3}),
        "bos_token": (3, [], {"content": []}),
        "added_tokens_decoder": ("x", {"x": {}}, {"0": 3}),
        "auto_map": ("x", 3),
        "tokenizer_class": (3, [], {}),
        "extra_special_tokens": (3, "x"),
    }.items():
        for value in values:
            yield Case(f"{file} {field} {shown(value)}", "llama", set_fields(file, **{field: value}), (file,))
    file = "tokenizer.json"
    for field, value in {
        "model": None,
        "added_tokens": [{"id": -1, "content": "x"}],
        "pre_tokenizer": {"type": "zebra"},
        "decoder": 3,
        "version": 3,
    }.items():
        yield Case(f"{file} {field}", "llama", set_fields(file, **{field: value}), (file,))
    yield Case(
        "chat_template.jinja not UTF-8", "llama", write("chat_template.jinja", b"\xff"), ("chat_template.jinja",)
    )
    modules = [{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}]
    pooling = {"idx": 1, "name": "1", "path": "../../x", "type": "sentence_transformers.models.Pooling"}
    for path in ("../../x", "/etc", 3, [], "a\0b"):
        text = json.dumps([*modules, pooling | {"path": path}])
        yield Case(f"modules.json path {shown(path)}", "llama", write("modules.json", text), ("modules.json",), _POOL)


# ---- .safetensors --------------------------------------------------------------------------------------------


def header(change: Callable[[dict[str, Any]], Any]) -> Break:
    """Changes the header of the weights, or replaces it by what `change` returns; the data are kept."""

    def breaks(directory: pathlib.Path) -> None:
        path = directory / WEIGHTS
        data = path.read_bytes()
        (length,) = struct.unpack("<Q", data[:8])
        entries = json.loads(data[8 : 8 + length])
        changed = change(entries)
        text = (changed if isinstance(changed, str) else json.dumps(entries if changed is None else changed)).encode()
        path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])

    return breaks


def entry(**fields: Any) -> Break:
    """Sets fields of a tensor's entry."""
    return header(lambda entries: entries[K_PROJ].update(fields))


def weights(change: Callable[[dict[str, torch.Tensor]], Any]) -> Break:
    """Replaces the tensors."""

    def breaks(directory: pathlib.Path) -> None:
        tensors: dict[str, Any] = load_file(directory / WEIGHTS)
        change(tensors)
        save_file(tensors, directory / WEIGHTS)

    return breaks


def _safetensors_cases() -> Iterator[Case]:
    for name, text in {
        "deep": DEEP,
        "a list": "[]",
        "empty": "",
        "a tensor that is a number": json.dumps({K_PROJ: 3}),
        "a tensor that is a list": json.dumps({K_PROJ: []}),
        "a tensor that is nothing": json.dumps({K_PROJ: {}}),
        "nonsense": "#" * 32,
    }.items():
        yield Case(f"header {name}", "llama", header(lambda _, text=text: text), (WEIGHTS,))
    for length in (2**64 - 1, 2**63, 2**40, 10**8 + 1, 0):
        yield Case(
            f"header of {length}",
            "llama",
            lambda path, length=length: (path / WEIGHTS).write_bytes(
                struct.pack("<Q", length) + (path / WEIGHTS).read_bytes()[8:]
            ),
            (WEIGHTS,),
        )
    for shape in (
        None,
        "x",
        3,
        {},
        ["x"],
        [[3]],
        [None],
        [-32, 64],
        [32.0, 64.0],
        [True, 64],
        [10**30],
        [2**62, 4],
        [],
    ):
        yield Case(f"shape {shown(shape)}", "llama", entry(shape=shape), (WEIGHTS, K_PROJ))
    for offsets in (None, "xx", 3, {}, [], [0], [0, 1, 2], ["a", "b"], [-1, 3], [10, 2], [0.0, 8192.0], [0, 10**30]):
        yield Case(f"offsets {shown(offsets)}", "llama", entry(data_offsets=offsets), (WEIGHTS, K_PROJ))
    yield Case("offsets of another", "llama", entry(data_offsets=[0, 8192]), (WEIGHTS, "overlaps"))
    for dtype in (None, 3, [], {}, "F31", "I64", "BOOL", "F8_E4M3"):
        yield Case(f"dtype {shown(dtype)}", "llama", entry(dtype=dtype), (WEIGHTS, K_PROJ, "dtype"))
    yield Case("dtype F16 of F32", "llama", entry(dtype="F16"), (WEIGHTS, K_PROJ))
    for metadata in (3, [], "x", {"a": 1}, {"a": {}}):
        changed = header(lambda entries, metadata=metadata: entries.update({"__metadata__": metadata}))
        yield Case(f"metadata {shown(metadata)}", "llama", changed, (WEIGHTS, "__metadata__"))
    twice = header(lambda entries: json.dumps(entries)[:-1] + f', "{NORM}": {json.dumps(entries[NORM])}}}')
    yield Case("a tensor twice", "llama", twice, (WEIGHTS, NORM))
    yield Case("a directory of weights", "llama", replace_by_directory(WEIGHTS), (WEIGHTS,))
    yield Case("a pipe of weights", "llama", replace_by_fifo(WEIGHTS), (WEIGHTS,))
    yield Case("endless weights", "llama", replace_by_link(WEIGHTS, "/dev/zero"), (WEIGHTS,))
    yield Case("a link to nothing", "llama", replace_by_link(WEIGHTS, "nothing"), (WEIGHTS,))
    yield Case("more data", "llama", lambda path: _append(path / WEIGHTS, b"more"), (WEIGHTS,))
    for kept in (0, 4, 100, 0.5, -1):
        yield Case(f"weights cut to {kept}", "llama", cut(WEIGHTS, kept), (WEIGHTS, "damaged or incomplete"))


def cut(file: str, kept: float) -> Break:
    """Keeps the first bytes of a file, or a share of them."""

    def breaks(directory: pathlib.Path) -> None:
        data = (directory / file).read_bytes()
        (directory / file).write_bytes(data[: int(len(data) * kept) if isinstance(kept, float) else kept])

    return breaks


def _append(path: pathlib.Path, data: bytes) -> None:
    path.write_bytes(path.read_bytes() + data)


def _value_cases() -> Iterator[Case]:
    """Values that are not finite."""
    for name in (NORM, "model.layers.0.input_layernorm.weight", K_PROJ, "model.layers.2.mlp.down_proj.weight"):
        for value in (NAN, INFINITE):

            def breaks(tensors: dict[str, torch.Tensor], name: str = name, value: float = value) -> None:
                tensors[name].view(-1)[-1] = value

            yield Case(f"{value} in {name}", "llama", weights(breaks), (WEIGHTS, name, "not finite"))

    def bias(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.1.self_attn.q_proj.bias"][0] = NAN

    yield Case("nan in a bias", "qwen2", weights(bias), (WEIGHTS, "q_proj.bias", "not finite"))


# ---- indices -------------------------------------------------------------------------------------------------


def weight_map(change: Callable[[dict[str, Any]], Any]) -> Break:
    """Changes the index's table, or replaces it by what `change` returns."""

    def breaks(directory: pathlib.Path) -> None:
        path = directory / INDEX
        index = json.loads(path.read_text())
        changed = change(index["weight_map"])
        if changed is not None:
            index["weight_map"] = changed
        path.write_text(json.dumps(index))

    return breaks


def _index_cases() -> Iterator[Case]:
    for value in (None, 3, "x", [], {}, [1], {"a": 3}, {"a": None}, {"a": []}, {"a": ""}, {"a": {}}):
        yield Case(f"weight_map {shown(value)}", "llama-sharded", set_fields(INDEX, weight_map=value), (INDEX,))
    yield Case("weight_map absent", "llama-sharded", set_fields(INDEX, weight_map=...), (INDEX, "weight_map"))
    for name in ("../x.safetensors", "/etc/passwd", "a/../../x.safetensors", ".", "..", "a\0b", "x" * 5000, "a\nb"):
        changed = weight_map(lambda table, name=name: table.update({NORM: name}))
        yield Case(f"index names {shown(name)}", "llama-sharded", changed, (INDEX,))
    missing = weight_map(lambda table: table.update({NORM: "model-9.safetensors"}))
    yield Case("index of a missing file", "llama-sharded", missing, ("model-9.safetensors", INDEX))

    def without_norm(directory: pathlib.Path) -> None:
        file = directory / json.loads((directory / INDEX).read_text())["weight_map"][NORM]
        tensors: dict[str, Any] = load_file(file)
        del tensors[NORM]
        save_file(tensors, file)

    yield Case("index of a missing tensor", "llama-sharded", without_norm, (NORM, "missing"))


# ---- .bin and the cache of arrays ----------------------------------------------------------------------------


class _Payload:
    """Runs code when it is unpickled without care."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch touched",)


def saved(change: Callable[[dict[str, Any]], Any]) -> Break:
    """Writes other objects to the .bin file."""

    def breaks(directory: pathlib.Path) -> None:
        tensors = torch.load(directory / BIN)
        changed = change(tensors)
        torch.save(tensors if changed is None else changed, directory / BIN)

    return breaks


def pickled(data: bytes) -> Break:
    """Writes a pickle to the .bin file, in a zip archive as torch does."""

    def breaks(directory: pathlib.Path) -> None:
        with zipfile.ZipFile(directory / BIN, "w") as archive:
            archive.writestr("archive/data.pkl", data)
            archive.writestr("archive/version", "3\n")
            archive.writestr("archive/byteorder", "little")

    return breaks


def _bin_cases() -> Iterator[Case]:
    data: dict[str, bytes] = {
        "nothing": b"",
        "text": b"not a pickle",
        "zeros": bytes(1000),
        "a zip of nothing": b"PK\x05\x06" + bytes(18),
        "the head of a zip": b"PK\x03\x04" + bytes(100),
        "a plain pickle": pickle.dumps({"a": 1}),
        "a plain pickle of code": pickle.dumps({"a": _Payload()}),
        "a cut pickle": pickle.dumps({"a": "x" * 100})[:50],
        "a deep pickle": b"\x80\x02" + b"]" * 100_000 + b"a" * 99_999 + b".",
        "random": np.random.default_rng(0).bytes(5000),
    }
    for name, content in data.items():
        yield Case(f"bin of {name}", "llama-bin", write(BIN, content), (BIN,))
        if name not in ("nothing", "random", "zeros"):
            yield Case(f"bin with a pickle of {name}", "llama-bin", pickled(content), (BIN,))
    for name, broken in {
        "a pickle without an end": b"\x80\x02}",
        "a pop of nothing": b"\x80\x020.",
        "a memo that is absent": b"\x80\x02h\x05.",
        "a text that is not UTF-8": b"\x80\x02X\x02\x00\x00\x00\xff\xfe.",
        "a number of the wrong kind": b"\x80\x02I1x\n.",
        "a huge text": b"\x80\x02X\xff\xff\xff\x7f.",
        "a huge number": b"\x80\x02\x8b\xff\xff\xff\x7f.",
        "a tensor without a storage": b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(K\x01K\x00)\x81R.",
        "a call of no function": b"\x80\x02K\x01)R.",
        "an id of no storage": b"\x80\x02K\x01Q.",
        "an unknown class": b"\x80\x02ca\nb\n.",
        "an unknown code": b"\x80\x02\xff.",
        "a new protocol": b"\x80\xff.",
    }.items():
        yield Case(f"bin with {name}", "llama-bin", pickled(broken), (BIN,))
    for name, change in {
        "a list": lambda _: [torch.ones(1)],
        "a tensor": lambda _: torch.ones(1),
        "a number": lambda tensors: tensors.update({NORM: 1.0}),
        "a number as a name": lambda tensors: tensors.update({3: torch.ones(1)}),
        "a dict": lambda tensors: {"state_dict": tensors},
        "sparse": lambda tensors: tensors.update({K_PROJ: tensors[K_PROJ].to_sparse()}),
        "complex": lambda tensors: tensors.update({K_PROJ: tensors[K_PROJ].to(torch.complex64)}),
        "meta": lambda tensors: tensors.update({K_PROJ: tensors[K_PROJ].to("meta")}),
        "bytes": lambda tensors: tensors.update({K_PROJ: tensors[K_PROJ].to(torch.uint8)}),
        "nothing": lambda _: {},
        "nan": lambda tensors: tensors.update({NORM: tensors[NORM] * NAN}),
        "code": lambda tensors: tensors.update({NORM: _Payload()}),
    }.items():
        yield Case(f"bin saved with {name}", "llama-bin", saved(change), (BIN,))
    for kept in (100, 0.5):
        yield Case(f"bin cut to {kept}", "llama-bin", cut(BIN, kept), (BIN, "damaged or incomplete"))
    yield Case("a directory of bin", "llama-bin", replace_by_directory(BIN), (BIN,))
    yield Case("a pipe of bin", "llama-bin", replace_by_fifo(BIN), (BIN,))
    yield Case("endless bin", "llama-bin", replace_by_link(BIN, "/dev/zero"), (BIN,))

    cache = {"load_format": "npcache"}
    for name in ("../../outside", "/tmp/outside", "..", "", "weight_names.json", "a\0b", "x" * 300):
        change = saved(lambda tensors, name=name: tensors.update({name: torch.ones(1)}))
        yield Case(f"array of the name {shown(name)}", "llama-bin", change, (BIN,), cache)
    change = saved(lambda tensors: tensors.update({K_PROJ: tensors[K_PROJ].to_sparse()}))
    yield Case("array of a sparse tensor", "llama-bin", change, (BIN, K_PROJ), cache)


def arrays(change: Callable[[pathlib.Path], Any]) -> Break:
    """Makes a cache of arrays of the .bin file, and changes it."""

    def breaks(directory: pathlib.Path) -> None:
        folder = directory / "np"
        folder.mkdir()
        tensors = torch.load(directory / BIN)
        for name, tensor in tensors.items():
            with (folder / name).open("wb") as file:
                np.save(file, tensor.numpy())
        (folder / "weight_names.json").write_text(json.dumps(list(tensors)))
        change(folder)

    return breaks


def _save(array: Any, **options: Any) -> Callable[[pathlib.Path], None]:
    def change(folder: pathlib.Path) -> None:
        with (folder / NORM).open("wb") as file:
            np.save(file, array, **options)

    return change


def _save_archive(folder: pathlib.Path) -> None:
    with (folder / NORM).open("wb") as file:
        np.savez(file, np.ones(64))


def _array_cases() -> Iterator[Case]:
    for name, text in _JSON_TEXTS.items():
        if name != "a list":
            yield Case(
                f"arrays {name}",
                "llama-bin",
                arrays(lambda folder, text=text: write("weight_names.json", text)(folder)),
                ("np", "weight_names.json"),
                {"load_format": "npcache"},
            )
    for value in ([3], [None], [[]], ["../x"], ["absent"], {"a": 1}, "x", [NORM, NORM]):
        yield Case(
            f"arrays named {shown(value)}",
            "llama-bin",
            arrays(lambda folder, value=value: write("weight_names.json", json.dumps(value))(folder)),
            ("np",),
            {"load_format": "npcache"},
        )
    for name, change in {
        "objects": _save(np.array([{}], dtype=object), allow_pickle=True),
        "the other byte order": _save(np.ones(64, ">f4")),
        "long floats": _save(np.ones(64, np.longdouble)),
        "records": _save(np.ones(64, [("a", "f4")])),
        "texts": _save(np.array(["x"] * 64)),
        "integers": _save(np.ones(64, np.int32)),
        "an archive": _save_archive,
        "nothing": lambda folder: (folder / NORM).write_bytes(b""),
        "half": lambda folder: (folder / NORM).write_bytes((folder / NORM).read_bytes()[:200]),
        "a header of nonsense": lambda folder: (folder / NORM).write_bytes(
            b"\x93NUMPY\x01\x00\x10\x00{'descr': [[[[[["
        ),
        "a pickle": lambda folder: (folder / NORM).write_bytes(pickle.dumps(_Payload())),
        "a directory": replace_by_directory(NORM),
        "a pipe": replace_by_fifo(NORM),
    }.items():
        yield Case(f"an array of {name}", "llama-bin", arrays(change), ("np", NORM), {"load_format": "npcache"})


def cases() -> list[Case]:
    """All cases."""
    return [
        *_json_cases(),
        *_field_cases(),
        *_other_field_cases(),
        *_safetensors_cases(),
        *_value_cases(),
        *_index_cases(),
        *_bin_cases(),
        *_array_cases(),
    ]
