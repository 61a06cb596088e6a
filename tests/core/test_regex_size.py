"""How large expressions become with their repetitions written out."""

from __future__ import annotations

import pytest

from ascend_vllm.core.structured.regex_size import end_of_class, expanded_size


@pytest.mark.parametrize(
    ("regex", "size"),
    [
        ("", 0),
        ("abc", 3),
        (r"a\.\d", 3),
        ("[a-z]+x*", 2),
        ("a{3}", 3),
        ("a{2,5}b", 6),
        ("a{7,}", 7),
        ("a{0}", 1),
        ("(ab|c){4}", 12),
        ("((a{10}){10}){10}", 1000),
        ("(a{10}b{10}){10}c", 201),
        ("[]{3}]{2}", 2),
        (r"[^]\]{3}]{2}", 2),
        (r"\{3}", 3),
        (r"\({2}", 2),
        # invalid expressions do not raise
        ("a)b(c{2}", 5),
        ("(((a", 1),
        ("a\\", 2),
        ("[a", 1),
        ("{5}", 0),
    ],
)
def test_size(regex: str, size: int) -> None:
    assert expanded_size(regex) == size


def test_long_expressions_take_no_time() -> None:
    assert expanded_size("(" * 30_000 + "a{9}" + "){2}" * 1000) == 9 * 2**1000


def test_end_of_class() -> None:
    assert [end_of_class(text, 0) for text in ("[a]b", "[]]", "[^]]x", r"[\]]", "[ab")] == [2, 2, 3, 3, 3]
