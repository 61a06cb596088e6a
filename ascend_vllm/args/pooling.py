"""Decides whether a model generates or pools, and how: from flags, config.json and sentence-transformers' files."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping
from typing import Any, NamedTuple, get_args

from ascend_vllm.args.tables.engine import EngineFlags
from ascend_vllm.config.arch import READERS
from ascend_vllm.config.model import PoolerConfig
from ascend_vllm.errors import ConfigError, ModelLoadError
from ascend_vllm.model_files import is_there, read_json, shown
from ascend_vllm.pooling_params import POOLING_TASKS, PoolingTask

# suffix of an architecture's name → default of --convert
_CONVERSIONS = {"ForSequenceClassification": "classify", "Model": "embed"}
# value of --task → value of --convert; "none": generation
_TASKS = {"generate": "none", "embedding": "embed", "embed": "embed", "classify": "classify", "score": "classify"}
_SEQ_POOLING_TYPES = ("CLS", "LAST", "MEAN")
_POOLER_FIELDS = (
    "task",
    "pooling_type",
    "seq_pooling_type",
    "tok_pooling_type",
    "use_activation",
    "normalize",
    "softmax",
    "dimensions",
)
# sentence-transformers' names → vLLM's
_MODES = {"mean": "MEAN", "cls": "CLS", "lasttoken": "LAST"}
_ACTIVATIONS = {"Sigmoid": "sigmoid", "Identity": "identity", "Softmax": "softmax"}
_PROBLEM_ACTIVATIONS = {"regression": "identity", "multi_label_classification": "sigmoid"}
# transformers' default if config.json has no labels
_DEFAULT_NUM_LABELS = 2


class _FilesPooling(NamedTuple):
    """Pooling according to sentence-transformers' files."""

    seq_pooling_type: str
    use_activation: bool


def resolve_pooler(args: EngineFlags, hf_config: Mapping[str, Any], directory: str) -> PoolerConfig | None:
    """Configuration of the pooler; None: the model generates.

    The flags decide; without them, architectures without a language-model head pool, and models of
    sentence-transformers, too.

    Args:
        args: with runner, convert, task, pooler_config and override_pooler_config.
        hf_config: the model's, with overrides applied, for labels and activations of heads, which are not part of
            `ArchConfig`, as they are used only here.
        directory: the model's directory.

    Raises:
        ConfigError: flags that contradict each other or the model.
        ModelLoadError: the model's files require unsupported pooling.
    """
    files = read_sentence_transformers(directory)
    convert = _resolve_convert(args, str(hf_config["architectures"][0]), files is not None)
    changes = _changes(args)
    if convert is None:
        if changes:
            raise ConfigError("--pooler-config needs a pooling model; turn this one into one with --convert embed.")
        return None
    if hf_config.get("is_causal") is False or hf_config.get("use_bidirectional_attention"):
        raise ModelLoadError(
            f"{directory}/config.json: the model's tokens see those behind them (is_causal, "
            "use_bidirectional_attention), which is not supported"
        )
    tasks = {"embed": ("embed", "token_embed"), "classify": ("classify", "token_classify")}[convert]
    pooling_type = changes.get("seq_pooling_type") or (files.seq_pooling_type if files is not None else "LAST")
    task: PoolingTask = changes.get("task") or tasks[0]  # type: ignore[assignment]  # one of the tasks
    if task not in tasks:
        raise ConfigError(f"--pooler-config: task {task!r} is none of this model's: {', '.join(tasks)}.")
    use_activation = changes.get("use_activation")
    if use_activation is None:
        use_activation = files.use_activation if files is not None and convert == "embed" else True
    labels = _labels(hf_config) if convert == "classify" else ()
    known = hf_config.get("matryoshka_dimensions")
    return PoolerConfig(
        task=task,
        convert=convert,
        seq_pooling_type=pooling_type,
        use_activation=use_activation,
        activation=_activation(hf_config, len(labels)),
        dimensions=changes.get("dimensions"),
        is_matryoshka=bool(hf_config.get("is_matryoshka") or known),
        matryoshka_dimensions=None if not known else tuple(int(size) for size in known),
        labels=labels,
    )


def _resolve_convert(args: EngineFlags, architecture: str, is_sentence_transformer: bool) -> str | None:
    """ "embed" or "classify"; None: the model generates."""
    runner, convert = args.runner, args.convert
    if args.task != "auto":
        wanted = _TASKS[args.task]
        if convert not in ("auto", wanted) or runner == ("pooling" if wanted == "none" else "generate"):
            raise ConfigError(
                f"--task {args.task} contradicts --runner {runner} and --convert {convert}; leave it out."
            )
        convert = wanted
    own = next((to for end, to in _CONVERSIONS.items() if architecture.endswith(end)), None)
    if architecture in READERS:
        # the names of some models that generate end like this, too
        own = None
    if runner == "generate" or (runner == "auto" and convert == "none"):
        if own is not None:
            raise ConfigError(
                f"This model does not support `--runner generate`: {architecture} has no language-model head."
            )
        if convert in ("embed", "classify"):
            raise ConfigError(f"--convert {convert} makes a pooling model, which --runner generate excludes.")
        return None
    if convert == "none" and own is None:
        raise ConfigError(
            "This model does not support `--runner pooling`. You can pass `--convert <embed|classify> to adapt it "
            "into a pooling model."
        )
    if convert in ("embed", "classify"):
        return convert
    if own is not None:
        return own
    return "embed" if runner == "pooling" or is_sentence_transformer else None


def _changes(args: EngineFlags) -> dict[str, Any]:
    """The fields of `PoolerConfig` in --pooler-config or its older spelling; unset ones are left out.

    Raises:
        ConfigError: an unknown or unsupported field or value; names it.
    """
    if args.pooler_config is not None and args.override_pooler_config is not None:
        raise ConfigError("--override-pooler-config is the older name of --pooler-config; give one of them.")
    name = "--pooler-config" if args.override_pooler_config is None else "--override-pooler-config"
    given = args.pooler_config if args.override_pooler_config is None else args.override_pooler_config
    values = {field: value for field, value in (given or {}).items() if value is not None}
    unknown = sorted(values.keys() - set(_POOLER_FIELDS))
    if unknown:
        raise ConfigError(f"{name}: {', '.join(unknown)} cannot be set; possible are {', '.join(_POOLER_FIELDS)}.")
    kind = values.pop("pooling_type", None)
    if kind is not None:
        values.setdefault("tok_pooling_type" if kind in ("ALL", "STEP") else "seq_pooling_type", kind)
    if values.pop("tok_pooling_type", "ALL") != "ALL":
        raise ConfigError(f"{name}: pooling_type must be one of {', '.join(_SEQ_POOLING_TYPES)} or ALL.")
    if values.get("seq_pooling_type", "LAST") not in _SEQ_POOLING_TYPES:
        wrong = values["seq_pooling_type"]
        raise ConfigError(
            f"{name}: pooling_type must be one of {', '.join(_SEQ_POOLING_TYPES)} or ALL, got {wrong!r}."
        )
    for older in ("normalize", "softmax"):
        if older in values:
            values.setdefault("use_activation", values.pop(older))
    if not isinstance(values.get("use_activation", True), bool):
        raise ConfigError(f"{name}: use_activation must be true or false, got {values['use_activation']!r}.")
    if values.get("task", "embed") not in POOLING_TASKS:
        raise ConfigError(f"{name}: task must be one of {', '.join(get_args(PoolingTask))}, got {values['task']!r}.")
    size = values.get("dimensions", 1)
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise ConfigError(f"{name}: dimensions must be a positive number, got {size!r}.")
    return values


def read_sentence_transformers(directory: str) -> _FilesPooling | None:
    """Reads pooling from modules.json and its files; None: the model is not from sentence-transformers.

    Raises:
        ModelLoadError: a file is broken, or asks for something that is not supported; names it.
    """
    root = pathlib.Path(directory)
    path = root / "modules.json"
    if not is_there(path):
        return None
    modules = [module for module in read_json(path, list) if isinstance(module, dict)]
    by_kind = {str(module.get("type", "")).rpartition(".")[2]: module for module in modules}
    unknown = sorted(by_kind.keys() - {"Transformer", "Pooling", "Normalize"})
    if unknown:
        raise ModelLoadError(f"{path}: module {unknown[0]} is not supported; Transformer, Pooling and Normalize are")
    if "Pooling" not in by_kind:
        return None
    folder = by_kind["Pooling"].get("path", "")
    if not isinstance(folder, str) or not folder.isprintable() or {"..", "/"} & set(pathlib.Path(folder).parts):
        raise ModelLoadError(f"{path}: 'path' must name a directory beside it, got {shown(folder)}")
    pooling_path = root / folder / "config.json"
    pooling = read_json(pooling_path, dict)
    modes = [str(pooling["pooling_mode"])] if isinstance(pooling.get("pooling_mode"), str) else []
    modes += [
        key.removeprefix("pooling_mode_").removesuffix("_tokens").removesuffix("_token")
        for key, value in pooling.items()
        if key.startswith("pooling_mode_") and value is True
    ]
    if len(set(modes)) != 1 or modes[0] not in _MODES:
        raise ModelLoadError(
            f"{pooling_path}: pooling mode {' + '.join(modes) or 'none'} is not supported; one of "
            f"{', '.join(_MODES)} is"
        )
    return _FilesPooling(_MODES[modes[0]], "Normalize" in by_kind)


def _labels(hf_config: Mapping[str, Any]) -> tuple[str, ...]:
    """The labels of a head's outputs, by index."""
    named = hf_config.get("id2label") or {}
    count = int(hf_config.get("num_labels") or len(named) or _DEFAULT_NUM_LABELS)
    return tuple(str(named.get(str(index), f"LABEL_{index}")) for index in range(count))


def _activation(hf_config: Mapping[str, Any], num_labels: int) -> str:
    """The activation that converts a head's outputs to probabilities."""
    # cross-encoders of sentence-transformers have the name of a class of torch.nn
    nested = hf_config.get("sentence_transformers") or {}
    named = nested.get("activation_fn") or hf_config.get("sbert_ce_default_activation_function")
    if named is not None:
        kind = str(named).rpartition(".")[2]
        if kind not in _ACTIVATIONS:
            raise ModelLoadError(f"config.json: activation function {named!r} is not supported")
        return _ACTIVATIONS[kind]
    usual = "sigmoid" if num_labels == 1 else "softmax"
    return _PROBLEM_ACTIVATIONS.get(str(hf_config.get("problem_type")), usual)
