"""The command-line parser: values of all kinds, both spellings of flags, and YAML files with flags."""

from __future__ import annotations

import argparse
import dataclasses
import decimal
import difflib
import functools
import json
import pathlib
import re
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from ascend_vllm.args.fields import Flag, Kind, flags_of
from ascend_vllm.errors import ConfigError

# --max-model-len auto or -1: as long as fits in the KV cache
AUTO_LENGTH = -1

_DECIMAL = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_LENGTH = re.compile(r"(\d+(?:\.\d+)?)([kKmMgGtT]?)")


@dataclasses.dataclass
class LoRAModule:
    """One entry of --lora-modules.

    Attributes:
        name: value of the requests' field `model`.
        path: the directory of the adapter.
        base_model_name: the model it belongs to.
    """

    name: str
    path: str
    base_model_name: str | None = None


def nullable_str(value: str) -> str | None:
    """Text; "" and "None" mean no value."""
    return None if value in ("", "None") else value


def boolean(value: str) -> bool:
    """true or false, in lower case or capitalised.

    Raises:
        argparse.ArgumentTypeError: anything else.
    """
    if value.lower() not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"Invalid boolean value: {value}. Expected 'true' or 'false'.")
    return value.lower() == "true"


def length(value: str) -> int:
    """A count with an optional unit: 4096, 4k = 4000, 4K = 4096, 1.5k = 1500; auto = -1.

    Raises:
        argparse.ArgumentTypeError: not a count, or a fraction of a binary unit.
    """
    if value in ("auto", "-1"):
        return AUTO_LENGTH
    match = _LENGTH.fullmatch(value)
    if match is None:
        raise argparse.ArgumentTypeError(f"{value!r} is not a count such as 4096, 4k, 4K or auto")
    number, unit = match.groups()
    if unit in _BINARY or not unit:
        if "." in number:
            raise argparse.ArgumentTypeError(f"{value!r}: only k, m, g and t (powers of ten) take a fraction")
        return int(number) * _BINARY.get(unit, 1)
    scaled = decimal.Decimal(number) * _DECIMAL[unit]
    if scaled != int(scaled):
        raise argparse.ArgumentTypeError(f"{value!r} is not a whole number")
    return int(scaled)


def _json_of(expected: type | types.UnionType, what: str, value: str) -> Any:
    try:
        parsed = json.loads(value)
    except ValueError as err:
        raise argparse.ArgumentTypeError(f"{value!r} is not JSON: {err}") from err
    if not isinstance(parsed, expected):
        raise argparse.ArgumentTypeError(f"{value!r} is not a JSON {what}")
    return parsed


json_object: Callable[[str], dict[str, Any] | None] = functools.partial(_json_of, dict | None, "object")
json_list: Callable[[str], list[Any]] = functools.partial(_json_of, list, "list")


def kvs(value: str) -> dict[str, Any] | None:
    """Counts by name: `image=4,video=1`, or the same as a JSON object; "" means none."""
    if not value:
        return None
    if value.startswith("{"):
        return json_object(value)
    counts: dict[str, Any] = {}
    for item in value.split(","):
        name, equals, count = item.partition("=")
        if not equals or not count.strip().isdigit():
            raise argparse.ArgumentTypeError(f"{item!r} is not of the form name=count")
        if name.strip() in counts:
            raise argparse.ArgumentTypeError(f"{name.strip()!r} is given twice")
        counts[name.strip()] = int(count)
    return counts


def lora_module(value: str) -> LoRAModule | None:
    """`name=path`, or a JSON object with the fields of `LoRAModule`."""
    if value in ("", "None"):
        return None
    if "=" in value and "," not in value:
        name, _, path = value.partition("=")
        return LoRAModule(name, path)
    try:
        fields = json.loads(value)
    except ValueError as err:
        raise argparse.ArgumentTypeError(f"Invalid JSON format for --lora-modules: {value}") from err
    try:
        return LoRAModule(**fields)
    except TypeError as err:
        raise argparse.ArgumentTypeError(f"Invalid fields for --lora-modules: {value} - {err}") from err


_PARSERS: Mapping[Kind, Callable[[str], Any]] = {
    "bool": boolean,
    "str": str,
    "nullable_str": nullable_str,
    "int": int,
    "float": float,
    "length": length,
    "json_object": json_object,
    "json_list": json_list,
    "kvs": kvs,
    "lora_module": lora_module,
}


class _SwitchAction(argparse.Action):
    """`--x` sets True, `--no-x` sets False; kinds with a value also take `--x=true` and `--x=false`."""

    def __init__(self, option_strings: Sequence[str], dest: str, *, opposite: str | None, **keywords: Any) -> None:
        super().__init__(option_strings, dest, **keywords)
        self.opposite = opposite

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        negated = option_string is not None and option_string.startswith("--no-")
        if negated and isinstance(values, str):
            parser.error(f"argument {option_string}: takes no value")
        # parsed here and not by `type`, which argparse would also apply to the constant of the bare flag
        try:
            value = boolean(values) if isinstance(values, str) else not negated
        except argparse.ArgumentTypeError as err:
            parser.error(f"argument {option_string}: {err}")
        setattr(namespace, self.dest, value)
        if self.opposite is not None:
            setattr(namespace, self.opposite, not value)


class FlexibleArgumentParser(argparse.ArgumentParser):
    """An argparse parser that reads `--max_model_len` as `--max-model-len`, and searches its help."""

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        """Parses; an unknown flag is an error of the subcommand that lacks it and names the nearest one."""
        found, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self._of_subcommand(found)._refuse(unknown)
        return found

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Replaces underscores in the names of long flags by dashes, then parses; `--help=WORD` prints and exits."""
        if args is None:
            import sys

            args = sys.argv[1:]
        # words after "--" are not flags
        end = args.index("--") if "--" in args else len(args)
        if self._subparsers is None:
            for word in args[:end]:
                if word.startswith("--help="):
                    self._show_help_on(word.removeprefix("--help="))
        elif args[:1] and args[0].startswith("--help="):
            # the subcommands have the flags
            args = ["--help"]
        return super().parse_known_args([*map(_dashed, args[:end]), *args[end:]], namespace)

    def error(self, message: str) -> NoReturn:
        """Exits with code 2 after one line with the error and a hint to --help."""
        self.exit(2, f"{self.prog}: error: {message}\nSee {self.prog} --help for every flag.\n")

    def _of_subcommand(self, namespace: argparse.Namespace) -> FlexibleArgumentParser:
        """The parser of the subcommand that was chosen, or this one."""
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                parser: FlexibleArgumentParser = action.choices[getattr(namespace, action.dest)]
                return parser._of_subcommand(namespace)
        return self

    def _refuse(self, unknown: Sequence[str]) -> NoReturn:
        names = [word.partition("=")[0] for word in unknown if word.startswith("-")]
        nearest = [difflib.get_close_matches(name, self._option_string_actions, 1) for name in names]
        hint = " or ".join(dict.fromkeys(name for found in nearest for name in found))
        self.error(f"unrecognized arguments: {' '.join(unknown)}" + (f". Did you mean {hint}?" if hint else ""))

    def _show_help_on(self, word: str) -> NoReturn:
        """Prints the help on some flags and exits.

        Args:
            word: "all", "page" (all, in a pager), "listgroup" or "group" (the titles), a group's title, or a word of
                names or help texts.
        """
        match word.lower():
            case "all":
                text = self.format_help()
            case "page":
                import pydoc

                pydoc.pager(self.format_help())
                text = ""
            case "listgroup" | "group" | "groups":
                text = "".join(f"{group.title}\n" for group in self._groups())
            case _:
                text = self._search_help(word)
        print(text, end="")
        self.exit()

    def _groups(self) -> list[argparse._ArgumentGroup]:
        return [group for group in self._action_groups if group._group_actions]

    def _search_help(self, word: str) -> str:
        """The flags of the group with this title; else those whose names contain the word; else whose help does."""
        title, name, text = _letters(word), word.lower().lstrip("-").replace("_", "-"), word.lower()
        groups = self._groups()
        tests: list[Callable[[argparse._ArgumentGroup, argparse.Action], bool]] = [
            lambda group, _: _letters(group.title or "") == title,
            lambda _, action: any(name in option for option in action.option_strings),
            lambda group, _: title in _letters(group.title or ""),
            lambda _, action: text in (action.help or "").lower(),
        ]
        for test in tests:
            formatter = self._get_formatter()
            matches = [(group, [one for one in group._group_actions if test(group, one)]) for group in groups]
            if not any(actions for _, actions in matches):
                continue
            for group, actions in matches:
                formatter.start_section(group.title)
                formatter.add_arguments(actions)
                formatter.end_section()
            return formatter.format_help()
        options = [option.lstrip("-") for option in self._option_string_actions]
        nearest = difflib.get_close_matches(name, options, 1)
        hint = f" The nearest flag is --{nearest[0]}." if nearest else ""
        return f"No group or flag has {word!r} in its name or help.{hint} --help=listgroup lists the groups.\n"


def _letters(title: str) -> str:
    """A group's title in the form in which titles are compared: "KV cache" → "kvcache"."""
    return "".join(character for character in title.lower() if character.isalnum())


def _dashed(arg: str) -> str:
    if not arg.startswith("--"):
        return arg
    name, equals, value = arg.partition("=")
    return "--" + name[2:].replace("_", "-") + equals + value


def _help_text(item: Flag) -> str:
    text = item.help
    if item.unsupported is not None:
        honoured = f"besides {', '.join(map(str, item.allowed))}, " if item.allowed else ""
        text += f" Not supported yet ({honoured}default {item.default!r}): {item.unsupported}."
    elif item.no_effect is not None:
        text += f" No effect: {item.no_effect}."
    elif item.default not in (None, [], False, ""):
        text += f" Default: {item.default}."
    return text.replace("%", "%%")


def add_flags(parser: argparse.ArgumentParser, owner: type) -> None:
    """Adds the flags that a dataclass declares, one group per section.

    Args:
        parser: to add to; the names in the namespace are those of the fields.
        owner: a dataclass with fields made by `fields.flag`.
    """
    parser.epilog = (
        "--help=WORD shows the flags with WORD in their names, --help=GROUP those of a group, and --help=listgroup "
        "the groups' names."
    )
    groups: dict[str, Any] = {}
    for item in flags_of(owner):
        group = groups.setdefault(item.section, None) or parser.add_argument_group(item.section)
        groups[item.section] = group
        keywords: dict[str, Any] = {"dest": item.field, "default": item.default, "help": _help_text(item)}
        if item.kind in ("flag", "bool"):
            negative = "--no-" + item.name.removeprefix("--")
            keywords |= {"nargs": 0 if item.kind == "flag" else "?", "opposite": item.opposite}
            group.add_argument(item.name, negative, *item.short, action=_SwitchAction, **keywords)
            continue
        if item.choices is not None:
            none_possible = item.kind == "nullable_str"
            keywords["choices"] = _Choices([None if none_possible and c == "None" else c for c in item.choices], item)
            keywords["metavar"] = "{" + ",".join(item.choices) + "}"
        if item.many:
            keywords["nargs"] = "+"
        if item.repeat:
            keywords["action"] = _AppendAction
        group.add_argument(item.name, *item.short, type=_PARSERS[item.kind], **keywords)


class _Choices(list[Any]):
    """Choices for argparse: those that it shows, and plug-ins of installed packages."""

    def __init__(self, values: list[Any], item: Flag) -> None:
        super().__init__(values)
        self._flag = item

    def __contains__(self, value: object) -> bool:
        return super().__contains__(value) or self._flag.is_plugin(value)


class _AppendAction(argparse.Action):
    """Collects the values of a repeated flag, one or more per occurrence; they replace the default."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,  # noqa: ARG002 - argparse's signature
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,  # noqa: ARG002 - argparse's signature
    ) -> None:
        earlier = getattr(namespace, self.dest)
        gathered = [] if earlier is self.default or earlier is None else earlier
        setattr(namespace, self.dest, gathered + (values if isinstance(values, list) else [values]))


def fields_from_namespace(owner: type, namespace: argparse.Namespace) -> dict[str, Any]:
    """The values of a dataclass's flags in a namespace, field name → value; absent ones are left out."""
    return {item.field: getattr(namespace, item.field) for item in flags_of(owner) if hasattr(namespace, item.field)}


def _flag_words(item: Flag, value: Any) -> list[str]:
    """Converts a value from YAML to words of a command line."""
    if value is None:
        return []
    if isinstance(value, bool):
        return [item.name if value else "--no-" + item.name.removeprefix("--")]
    if isinstance(value, dict) or item.kind in ("json_object", "json_list"):
        return [f"{item.name}={value if isinstance(value, str) else json.dumps(value)}"]
    if not isinstance(value, list):
        return [f"{item.name}={value}"]
    texts = [entry if isinstance(entry, str) else json.dumps(entry) for entry in value]
    return [item.name, *texts] if item.many else [f"{item.name}={text}" for text in texts]


def read_config_file(path: str) -> dict[str, Any]:
    """Reads the flags in a YAML file: a flat mapping of names, without leading dashes, to values.

    Raises:
        ConfigError: the file is missing, of another type, broken or not flat.

    Example::

        # serve.yaml
        max-model-len: 4096
        enable-chunked-prefill: true
        served-model-name: [qwen, qwen-small]
    """
    import yaml

    if pathlib.Path(path).suffix not in (".yaml", ".yml"):
        raise ConfigError(f"Config file must be of a yaml/yml type. --config {path} is not.")
    try:
        loaded = yaml.safe_load(pathlib.Path(path).read_text())
    except OSError as err:
        raise ConfigError(f"--config {path} cannot be read: {err.strerror}.") from err
    except yaml.YAMLError as err:
        raise ConfigError(f"--config {path} is not YAML: {err}") from err
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        raise ConfigError(f"--config {path} must hold one flag per line, as name: value.")
    return loaded


def expand_config_file(args: Sequence[str], flags: Sequence[Flag]) -> list[str]:
    """Replaces `--config FILE` by the file's flags, at the start so that the command line takes precedence.

    Args:
        args: the words after the subcommand.
        flags: that the file may contain.

    Raises:
        ConfigError: see `read_config_file`; or --config has no value or is given twice; or the file contains
            other flags.
    """
    words, path = _take_config_path(args)
    if path is None:
        return words
    by_name = {item.name: item for item in flags}
    expanded: list[str] = []
    for key, value in read_config_file(path).items():
        name = "--" + str(key).replace("_", "-")
        if name not in by_name:
            raise ConfigError(f"--config {path}: there is no flag {name}.")
        expanded += _flag_words(by_name[name], value)
    # a positional model stays first, so that it is not parsed as a value of a list at the end of the file
    if words and not words[0].startswith("-"):
        return [words[0], *expanded, *words[1:]]
    return [*expanded, *words]


def _take_config_path(args: Sequence[str]) -> tuple[list[str], str | None]:
    """The words without --config, and its value."""
    words, paths, rest = [], [], iter(args)
    for word in rest:
        if word.startswith("--config="):
            paths.append(word.removeprefix("--config="))
        elif word == "--config":
            path = next(rest, None)
            if path is None:
                raise ConfigError("--config needs the path of a YAML file.")
            paths.append(path)
        else:
            words.append(word)
    if len(paths) > 1:
        raise ConfigError("No more than one --config can be given.")
    return words, paths[0] if paths else None
