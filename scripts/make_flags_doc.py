"""Writes docs/flags.md from the flag table in ascend_vllm/args/tables/*.py."""

from __future__ import annotations

import pathlib

from ascend_vllm.args.engine_args import all_flags
from ascend_vllm.args.fields import Flag

OUTPUT = pathlib.Path(__file__).resolve().parent.parent / "docs" / "flags.md"

HEADER = """\
# Flags

<!-- Written by scripts/make_flags_doc.py from ascend_vllm/args/tables/*.py; change it there. -->

Every flag of the servers. `ascend-vllm serve` and `python -m ascend_vllm.entrypoints.openai.api_server` take all of
them except those of the /generate server; `python -m ascend_vllm.entrypoints.api_server` takes those of the HTTP
server, of the /generate server and of the engine. The engine's flags are also the keyword arguments of `LLM`, with
underscores.

- `--max_model_len` and `--max-model-len` are the same flag, and `--flag=value` is the same as `--flag value`.
- A switch such as `--trust-remote-code` is turned off by `--no-trust-remote-code`; the last one given wins.
- Counts may have a unit: `4k` is 4000, `4K` is 4096.
- `--help=WORD` shows the flags with WORD in their names (or, if there are none, in their help), `--help=GROUP` those
  of a group, such as `--help="kv cache"`, `--help=listgroup` the groups, `--help=page` everything in a pager.
- `ascend-vllm serve MODEL --config FILE.yaml` reads flags from a file, without the dashes in front. What stands on
  the command line wins.
- A flag that is **not yet** supported is refused at start when it is given a value other than its default, never
  ignored. One **without effect** is accepted, and the log says why it changes nothing.
"""


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _values(item: Flag) -> str:
    if item.kind == "flag":
        return "switch"
    if item.kind == "bool":
        return "switch, or `true` `false`"
    if item.choices is not None:
        return " ".join(f"`{choice}`" for choice in item.choices)
    names = {
        "str": "text",
        "nullable_str": "text",
        "int": "number",
        "float": "number",
        "length": "count",
        "json_object": "JSON object",
        "json_list": "JSON list",
        "kvs": "name=count,…",
        "lora_module": "name=path",
    }
    return names[item.kind] + (", one or more" if item.many else ", repeatable" if item.repeat else "")


def _default(item: Flag) -> str:
    if item.kind in ("flag", "bool") and item.default is not None:
        return "on" if item.default else "off"
    return "" if item.default in (None, [], "") else f"`{item.default}`"


def _meaning(item: Flag) -> str:
    text = item.help
    if item.unsupported is not None:
        allowed = f" (besides {', '.join(f'`{value}`' for value in item.allowed)})" if item.allowed else ""
        text += f" **Not yet**{allowed}: {item.unsupported}."
    if item.no_effect is not None:
        text += f" **Without effect**: {item.no_effect}."
    if item.example is not None:
        text += f" Example: `{item.example}`"
    return text


def render() -> str:
    """The whole page."""
    sections: dict[str, list[Flag]] = {}
    for item in all_flags():
        sections.setdefault(item.section, []).append(item)
    parts = [HEADER]
    for title, items in sections.items():
        parts.append(f"\n## {title}\n\n| flag | values | default | meaning |\n|---|---|---|---|\n")
        for item in items:
            names = ", ".join(f"`{name}`" for name in (item.name, *item.short))
            cells = (names, _values(item), _default(item), _meaning(item))
            parts.append("| " + " | ".join(_cell(cell) for cell in cells) + " |\n")
    return "".join(parts)


if __name__ == "__main__":
    OUTPUT.write_text(render(), encoding="utf-8")
