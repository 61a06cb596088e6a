"""Makes the demo model's directory: tokenizer, training samples, weights, configuration; Hugging Face layout."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import shutil
import tempfile
from collections.abc import Sequence

import torch
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from ascend_vllm.tools.demo.corpus import Conversation, Passage, build_conversations, build_passages
from ascend_vllm.tools.demo.training import DemoShape, Sample, TrainingPlan, train

END_OF_TEXT = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"

# ChatML, as Qwen's models use it
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# words with the space before them, single digits, runs of punctuation, white space
_SPLIT = r" ?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def train_tokenizer(conversations: Sequence[Conversation], vocab_size: int) -> Tokenizer:
    """Trains a byte-level BPE tokenizer with ChatML's special tokens (ids 0, 1, 2)."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT, TURN_START, TURN_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((turn.text for talk in conversations for turn in talk.turns), trainer)
    return tokenizer


def to_sample(conversation: Conversation, tokenizer: Tokenizer) -> Sample:
    """A conversation's tokens, of which the last answer's are to be learned."""
    *context, answer = conversation.turns
    prompt = "".join(f"{TURN_START}{turn.role}\n{turn.text}{TURN_END}\n" for turn in context)
    prompt_ids = tokenizer.encode(f"{prompt}{TURN_START}assistant\n").ids
    return Sample(prompt_ids + tokenizer.encode(f"{answer.text}{TURN_END}").ids, len(prompt_ids))


def _passage_sample(passage: Passage, tokenizer: Tokenizer) -> Sample:
    prompt_ids = tokenizer.encode(passage.prompt).ids
    # nothing comes before the first token, from which to predict it
    return Sample(prompt_ids + tokenizer.encode(f"{passage.text}{END_OF_TEXT}").ids, max(1, len(prompt_ids)))


def write_json(path: pathlib.Path, content: dict[str, object]) -> None:
    """Writes a file of the model's directory."""
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _write_configs(directory: pathlib.Path, shape: DemoShape, vocab_size: int) -> None:
    write_json(
        directory / "config.json",
        {
            "architectures": ["Qwen2ForCausalLM"],
            "model_type": "qwen2",
            "vocab_size": vocab_size,
            "hidden_size": shape.hidden_size,
            "intermediate_size": shape.intermediate_size,
            "num_hidden_layers": shape.num_layers,
            "num_attention_heads": shape.num_heads,
            "num_key_value_heads": shape.num_kv_heads,
            "hidden_act": "silu",
            "max_position_embeddings": shape.max_position_embeddings,
            "rms_norm_eps": shape.rms_norm_eps,
            "rope_theta": shape.rope_theta,
            "tie_word_embeddings": True,
            "use_sliding_window": False,
            "bos_token_id": None,
            "eos_token_id": 2,
            "torch_dtype": "bfloat16",
        },
    )
    write_json(
        directory / "generation_config.json",
        {"do_sample": True, "temperature": 0.2, "top_p": 0.9, "eos_token_id": [2, 0], "pad_token_id": 0},
    )
    write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": TURN_END,
            "pad_token": END_OF_TEXT,
            "additional_special_tokens": [TURN_START, TURN_END],
            "model_max_length": shape.max_position_embeddings,
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
    )


def make_demo_model(
    output: pathlib.Path, *, shape: DemoShape | None = None, plan: TrainingPlan | None = None
) -> None:
    """Trains the demo model, or one of another size, and writes its directory, all or nothing.

    What an interrupted training goes on from is kept beside the directory.

    Args:
        output: directory to make; one that is there is replaced.
        shape: sizes; default: the demo model's. The vocabulary may become smaller: there are only so many texts.
        plan: how long to train, and the seed: the same one gives the same bytes on the same machine; default:
            TrainingPlan's.

    Raises:
        ConfigError: an interrupted training of another kind is kept there.
    """
    plan = plan or TrainingPlan()
    # two threads whatever the machine: sums in another order would give other weights
    torch.set_num_threads(2)
    conversations = build_conversations(plan.seed)
    shape = shape or DemoShape()
    tokenizer = train_tokenizer(conversations, shape.vocab_size)
    shape = dataclasses.replace(shape, vocab_size=tokenizer.get_vocab_size())
    samples = [to_sample(conversation, tokenizer) for conversation in conversations]
    samples += [_passage_sample(passage, tokenizer) for passage in build_passages(plan.seed)]
    output.parent.mkdir(parents=True, exist_ok=True)
    weights = train(samples, shape, plan, output.with_name(f".{output.name}.training.pt"))

    with tempfile.TemporaryDirectory(dir=output.parent, prefix=".demo-") as scratch:
        directory = pathlib.Path(scratch) / "model"
        directory.mkdir()
        tokenizer.save(str(directory / "tokenizer.json"))
        _write_configs(directory, shape, shape.vocab_size)
        save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
        shutil.rmtree(output, ignore_errors=True)
        directory.rename(output)
