"""The benchmark of libraries that were not taken measures ways that do the same."""

from __future__ import annotations

import json

import pytest

from ascend_vllm.engine.tokenization import Tokenizer
from tests.benchmark_modules import load_benchmark


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece"])
def test_all_ways_have_the_same_result(kind: str, request: pytest.FixtureRequest) -> None:
    compare_libraries = load_benchmark("compare_libraries")
    tokenizer: Tokenizer = request.getfixturevalue(kind)
    texts = {name: way() for name, way in compare_libraries.ways_of_text(tokenizer, 200).items()}
    assert texts["ours"] == texts["DecodeStream"]
    assert compare_libraries.TEXT.split()[-1] in texts["ours"]
    arguments = {name: way() for name, way in compare_libraries.ways_of_arguments(200).items()}
    whole = json.loads(arguments["ours"] + '"]}')
    assert all(value == whole for name, value in arguments.items() if name != "ours")
    rates = compare_libraries.measure(tokenizer, [50], 1)
    assert all(rate > 0 for part in rates.values() for rate in part[50].values())
