"""The hardware kit: `ascend-vllm doctor --report FILE.tgz` measures, `--read FILE.tgz` compares.

`run` starts each step of the table in `steps` in a process of its own (`child`), one case after another; `rows` are
what they report, `private` removes what belongs to nobody else, `archive` writes and reads the file. `reader` puts a
report beside the one of the simulated NPU and beside what the documentation says (`claims`).
"""
