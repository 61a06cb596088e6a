"""What a command-line flag is: the metadata of a dataclass field.

A flag is declared once, as a field of one of the dataclasses in `args/tables`. The parser, the refusals, the flags'
documentation and the demo model's training texts are made from that declaration.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from ascend_vllm import plugins
from ascend_vllm.errors import UnsupportedFlagError
from ascend_vllm.logger import init_logger
from ascend_vllm.refusals import Refusal, first_refused

logger = init_logger(__name__)

# How a value is written on the command line; `parser` holds one parsing function per kind.
#   flag         bare, no value                    bool         bare, or =true / =false
#   str          text                              nullable_str text, "" and "None" mean none
#   int, float   a number                          length       a count such as 4096, 4k, 4K, auto
#   json_object  a JSON object                     json_list    a JSON list
#   kvs          name=count,name=count or a JSON object
#   lora_module  name=path or a JSON object
Kind = Literal[
    "flag",
    "bool",
    "str",
    "nullable_str",
    "int",
    "float",
    "length",
    "json_object",
    "json_list",
    "kvs",
    "lora_module",
]
# annotation of a field → its kind if none is given
_USUAL_KINDS: Mapping[str, Kind] = {
    "bool": "flag",
    "bool | None": "bool",
    "int": "int",
    "int | None": "int",
    "float": "float",
    "float | None": "float",
    "str": "str",
    "str | None": "nullable_str",
    "dict[str, Any] | None": "json_object",
    "dict[str, object] | None": "json_object",
}


@dataclasses.dataclass(frozen=True)
class Flag:
    """The properties of a flag.

    Attributes:
        field: the name of the dataclass field, for example "block_size".
        default: the value without the flag.
        section: its heading in the documentation.
        help: one or two sentences for users.
        kind: format of its value.
        choices: the valid values; None: any.
        short: other spellings, for example "-tp".
        many: whether one occurrence takes one or more values; the field is a list.
        repeat: whether it may be given several times, with one value each unless `many`; the field is a list.
        example: part of a command line that uses it.
        unsupported: why values other than the default are refused; None: all are supported.
        allowed: values besides the default that are supported although `unsupported` is set.
        entry_points: group of entry points whose names are supported choices, too.
        no_effect: why it is accepted without effect; None: it has an effect.
        opposite: field of a switch with the opposite meaning; the one given last wins.
    """

    field: str
    default: Any
    section: str
    help: str
    kind: Kind
    choices: tuple[str, ...] | None
    short: tuple[str, ...]
    many: bool
    repeat: bool
    example: str | None
    unsupported: str | None
    allowed: tuple[Any, ...]
    entry_points: str | None
    no_effect: str | None
    opposite: str | None

    @property
    def name(self) -> str:
        """The name on the command line, for example "--block-size"."""
        return "--" + self.field.replace("_", "-")

    @property
    def status(self) -> Literal["supported", "partly supported", "no effect", "not yet"]:
        """How far this version supports the flag."""
        if self.no_effect is not None:
            return "no effect"
        if self.unsupported is None:
            return "supported"
        return "partly supported" if self.allowed else "not yet"

    def is_plugin(self, value: Any) -> bool:
        """Whether the value names an entry point of an installed package."""
        if self.entry_points is None or not isinstance(value, str):
            return False
        return value in plugins.entry_points(self.entry_points)


def flag(
    default: Any,
    help: str,
    *,
    kind: Kind | None = None,
    choices: tuple[str, ...] | None = None,
    short: tuple[str, ...] = (),
    many: bool = False,
    repeat: bool = False,
    example: str | None = None,
    unsupported: str | None = None,
    allowed: tuple[Any, ...] = (),
    entry_points: str | None = None,
    no_effect: str | None = None,
    opposite: str | None = None,
) -> Any:
    """Declares a dataclass field that is a command-line flag; the arguments are the attributes of `Flag`.

    Without `kind`, the format of the value follows from the annotation. Without `unsupported`, the `UNSUPPORTED` of
    the class applies, if there is one.

    Example::

        seed: int = flag(0, "Seed of random draws that no request seeds.", example="--seed 7")
    """
    # all arguments except the default
    settings = dict(locals())
    del settings["default"]
    if isinstance(default, list):
        return dataclasses.field(default_factory=default.copy, metadata={"flag": settings})
    return dataclasses.field(default=default, metadata={"flag": settings})


def flags_of(owner: type) -> tuple[Flag, ...]:
    """The flags a dataclass declares, base classes first, in the order of declaration.

    The section of a flag is the `SECTION` of its class; the class's `UNSUPPORTED`, if any, is the reason for
    refusing flags that have no reason of their own.
    """
    bases = {name: base for base in reversed(owner.__mro__) for name in vars(base).get("__annotations__", {})}
    return tuple(
        _flag_of(field, bases[field.name]) for field in dataclasses.fields(owner) if "flag" in field.metadata
    )


def _flag_of(field: dataclasses.Field[Any], base: type) -> Flag:
    settings = dict(field.metadata["flag"])
    # annotations are strings in the modules of `args/tables`
    settings["kind"] = settings["kind"] or _USUAL_KINDS[str(field.type)]
    settings["unsupported"] = settings["unsupported"] or vars(base).get("UNSUPPORTED")
    default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    return Flag(field=field.name, default=default, section=getattr(base, "SECTION", base.__name__), **settings)


def refuse_unsupported(owner: type, values: Mapping[str, Any]) -> None:
    """Refuses the first flag whose value requires an unsupported feature; warns of flags without effect.

    Args:
        owner: the dataclass that declares the flags.
        values: field name → value.

    Raises:
        UnsupportedFlagError: with the flag and the missing feature.
    """
    flags = {item.field: item for item in flags_of(owner)}
    refusals = {}
    for item in flags.values():
        if item.no_effect is not None and values[item.field] != item.default:
            logger.warning("%s has no effect: %s", item.name, item.no_effect)
        if item.unsupported is not None and not item.is_plugin(values[item.field]):
            refusals[item.field] = Refusal(item.unsupported, (item.default, *item.allowed))
    if (found := first_refused(refusals, values)) is not None:
        name = flags[found.name].name
        typed = name if isinstance(found.value, bool | dict | list) else f"{name} {found.value}"
        raise UnsupportedFlagError(typed, found.reason)
