"""Loads a tokenizer that is Python code of the model's repository (`auto_map` in tokenizer_config.json).

It is loaded without AutoTokenizer, which would import torch into the API server and run the repository's
configuration class. Torch is imported only if the repository's code does that.
"""

from __future__ import annotations

import pathlib
import traceback
from collections.abc import Sequence
from typing import Any

from ascend_vllm.errors import ModelLoadError
from ascend_vllm.logger import init_logger
from ascend_vllm.model_files import one_line

logger = init_logger(__name__)

# of transformers, for packages that are missing
_INSTALL = "not found in your environment: "


def load_repository_tokenizer(directory: pathlib.Path, references: Sequence[str]) -> Any:
    """The tokenizer of the first class that works. Runs code of the repository.

    Args:
        directory: with the code and the vocabulary.
        references: classes as `auto_map` names them, such as "tokenization_own.OwnTokenizer".

    Raises:
        ModelLoadError: no class works with the installed packages; says what can be done about the first.
    """
    failures: list[BaseException] = []
    for reference in references:
        try:
            tokenizer = _load(str(directory), reference)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # the repository's code, and tokenizers in Rust, may raise anything
            failures.append(error)
            continue
        for failure in failures:
            logger.warning(
                "%s: the tokenizer is %s, since %s fails: %s", directory, reference, references[0], one_line(failure)
            )
        return tokenizer
    raise _diagnosis(directory, references[0], failures[0]) from failures[0]


def _load(directory: str, reference: str) -> Any:
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    tokenizer_class: Any = get_class_from_dynamic_module(reference, directory, local_files_only=True)
    tokenizer = tokenizer_class.from_pretrained(directory, local_files_only=True, trust_remote_code=True)
    to_text = tokenizer.convert_tokens_to_string
    # code may expect a token, as InternLM 3's does, but there is none if all ids are special ones that are skipped
    tokenizer.convert_tokens_to_string = lambda tokens: to_text(tokens) if tokens else ""
    # code for older versions of transformers may fail in any of these
    len(tokenizer), tokenizer.get_vocab(), tokenizer.eos_token_id, tokenizer.all_special_ids
    token_ids = tokenizer("a b", return_attention_mask=False).input_ids
    tokenizer.decode(token_ids, skip_special_tokens=True)
    tokenizer.convert_ids_to_tokens(token_ids)
    return tokenizer


def _diagnosis(directory: pathlib.Path, reference: str, error: BaseException) -> ModelLoadError:
    """The error for code that does not work."""
    import transformers

    start = f"cannot load the tokenizer in {directory}: its code {reference}"
    repository, _, name = reference.rpartition("--")
    module, _, class_name = name.partition(".")
    text = str(error)
    if isinstance(error, ImportError) and _INSTALL in text:
        return ModelLoadError(f"{start} needs packages that are not installed: {text.partition(_INSTALL)[2].strip()}")
    frames = traceback.extract_tb(error.__traceback__)
    own = [index for index, frame in enumerate(frames) if pathlib.Path(frame.filename).stem == module]
    if repository and not own:
        return ModelLoadError(
            f"{start} is in another repository: {one_line(error)}. Copy {module}.py from {repository} into the "
            f"directory, and write {name!r} in auto_map of tokenizer_config.json."
        )
    line = f"line {frames[own[-1]].lineno} of {module}.py: " if own else ""
    start += f" does not work with transformers {transformers.__version__} ({line}{one_line(error)})."
    # transformers calls methods of the class in the middle of its constructor, when attributes are still missing
    if own and frames[own[0]].name == "__init__" and len(frames) > own[0] + 1 != own[-1]:
        return ModelLoadError(
            f"{start} In {class_name}.__init__, move super().__init__(...) behind the lines that set attributes, "
            "which transformers uses in it; or convert the tokenizer to tokenizer.json, see docs/models.md."
        )
    return ModelLoadError(
        f"{start} Convert the tokenizer to tokenizer.json and give its directory by --tokenizer, see docs/models.md."
    )
