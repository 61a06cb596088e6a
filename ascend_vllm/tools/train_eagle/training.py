"""The training loop: batches, optimiser, progress, and how an interrupted training goes on."""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
from collections.abc import Iterator, Sequence

import torch
from safetensors.torch import save_file
from torch import nn
from tqdm import tqdm

from ascend_vllm.logger import init_logger
from ascend_vllm.tools.train_eagle.data import Sample
from ascend_vllm.tools.train_eagle.head import (
    HeadShape,
    TargetWeights,
    TrainedHead,
    head_config,
    losses,
    read_weights,
)
from ascend_vllm.tools.train_eagle.states import StateReader
from ascend_vllm.tools.training_progress import TrainingProgress

logger = init_logger("ascend_vllm.tools.train_eagle")

# what is kept beside the head until the training has ended
_PROGRESS = "training.pt"
# SafeAILab's rate is that of models of this width; narrower ones learn faster, with these at most
_WIDTH, _RATE, _LARGEST_RATE = 4096, 3e-5, 5e-3
_BETAS = (0.9, 0.95)
_CLIP_VALUE = 0.5
# uniform noise on hidden states, at most as strong as with texts of this many tokens
_NOISE, _NOISE_LENGTH = 0.2, 512
# head size where the target's has none that a Llama layer could have
_HEAD_SIZE = 64


@dataclasses.dataclass(frozen=True)
class TrainingPlan:
    """How long and how fast to learn.

    Attributes:
        num_epochs: passes over the data.
        num_steps: most optimiser steps; None: as many as the passes need.
        batch_tokens: padded tokens of a step, at most.
        batch_size: samples of a step, at most.
        max_length: tokens of a sample, at most.
        learning_rate: after the warm-up; None: 3e-5 for models 4096 wide, and more for narrower ones.
        seed: of weights, order and noise.
        initial_head: directory of a head to begin with; None: random weights.
        ttt_length: passes of a step; from the second one on the head reads what it has predicted itself.
        save_interval_s: seconds between two saves of the progress.
    """

    num_epochs: int = 4
    num_steps: int | None = None
    batch_tokens: int = 4096
    batch_size: int = 64
    max_length: int = 2048
    learning_rate: float | None = None
    seed: int = 0
    initial_head: str | None = None
    ttt_length: int = 1
    save_interval_s: float = 60.0


def _shape_for(reader: StateReader) -> HeadShape:
    """A head like one of the target's layers."""
    arch = reader.config.model.arch
    hidden = arch.hidden_size
    is_usual = arch.latent is None and arch.head_size % 2 == 0
    head_size = arch.head_size if is_usual else math.gcd(_HEAD_SIZE, hidden)
    return HeadShape(
        hidden_size=hidden,
        intermediate_size=arch.intermediate_size or 4 * hidden,
        num_heads=arch.num_heads if is_usual else hidden // head_size,
        num_kv_heads=arch.num_kv_heads if is_usual else hidden // head_size,
        head_size=head_size,
        rope_theta=10000.0 if arch.rope is None else arch.rope.theta,
        norm_eps=arch.norm_eps or 1e-6,
    )


def _epoch(samples: Sequence[Sample], plan: TrainingPlan, generator: torch.Generator) -> list[list[Sample]]:
    """All samples once, in batches of similar length and a random order."""
    jitter = (1 + 0.2 * torch.rand(len(samples), generator=generator)).tolist()
    order = sorted(range(len(samples)), key=lambda i: len(samples[i].token_ids) * jitter[i])
    batches: list[list[Sample]] = [[]]
    for index in order:
        longest = max((len(sample.token_ids) for sample in (*batches[-1], samples[index])), default=0)
        if longest * (len(batches[-1]) + 1) > plan.batch_tokens or len(batches[-1]) == plan.batch_size:
            batches.append([])
        batches[-1].append(samples[index])
    batches = [batch for batch in batches if batch]
    return [batches[place] for place in torch.randperm(len(batches), generator=generator).tolist()]


def _batches(samples: Sequence[Sample], plan: TrainingPlan) -> Iterator[list[Sample]]:
    """Endless batches, in an order that depends on the seed only."""
    generator = torch.Generator().manual_seed(plan.seed)
    while True:
        yield from _epoch(samples, plan, generator)


def _rate_factor(step: int, num_steps: int) -> float:
    """Warm-up over 5% of the steps, 2,000 at most, then down along a cosine."""
    warm_up = min(2000, max(1, num_steps // 20))
    if step < warm_up:
        return (step + 1) / warm_up
    return 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * (step - warm_up) / max(1, num_steps - warm_up)))


class Trainer:
    """Trains a head for a model, or goes on where a training with the same plan was interrupted.

    Args:
        reader: runs the target.
        samples: texts to learn.
        plan: how.
        output: directory for the head.

    Attributes:
        num_steps: of the whole training.

    Raises:
        ConfigError: the directory has the progress of a training of another kind, or the head to begin with does not
            fit the target.
        ModelLoadError: that head cannot be read.
    """

    def __init__(
        self, reader: StateReader, samples: Sequence[Sample], plan: TrainingPlan, output: pathlib.Path
    ) -> None:
        self._reader = reader
        self._samples = samples
        self._plan = plan
        self._output = output
        self._target: TargetWeights = reader.weights()
        self._shape = _shape_for(reader)
        torch.manual_seed(plan.seed)
        self.head = TrainedHead(self._shape).to(reader.device)
        if plan.initial_head is None:
            self._balance_inputs()
        else:
            read_weights(self.head, plan.initial_head)
        usual = min(_RATE * max(1.0, _WIDTH / self._shape.hidden_size) ** 1.5, _LARGEST_RATE)
        rate = usual if plan.learning_rate is None else plan.learning_rate
        self._optimizer = torch.optim.AdamW(self.head.parameters(), lr=rate, betas=_BETAS)
        num_batches = len(_epoch(samples, plan, torch.Generator().manual_seed(plan.seed)))
        self.num_steps = plan.num_epochs * num_batches
        if plan.num_steps is not None:
            self.num_steps = min(self.num_steps, plan.num_steps)
        self._schedule = torch.optim.lr_scheduler.LambdaLR(
            self._optimizer, lambda step: _rate_factor(step, self.num_steps)
        )
        self._num_done = 0
        # of the last step
        self.accuracy = 0.0
        output.mkdir(parents=True, exist_ok=True)
        self._progress = TrainingProgress(output / _PROGRESS, self._settings(), plan.save_interval_s)
        self._resume()

    def _balance_inputs(self) -> None:
        """Lets embeddings and hidden states have the same weight at the start: embeddings may be much smaller."""
        states = torch.cat(self._reader.states([self._samples[0].token_ids]))
        ratio = states.square().mean().sqrt() / self._target.embedding.square().mean().sqrt()
        with torch.no_grad():
            self.head.fc.weight[:, : self._shape.hidden_size] *= ratio

    def run(self) -> None:
        """Trains, and writes the head: config.json and model.safetensors, as SafeAILab's heads are published."""
        progress = tqdm(
            total=self.num_steps, initial=self._num_done, desc="Training the EAGLE head", unit="step", mininterval=0.5
        )
        for number, batch in enumerate(_batches(self._samples, self._plan)):
            if number < self._num_done:
                continue
            if number == self.num_steps:
                break
            progress.set_postfix(self._step(number, batch), refresh=False)
            progress.update()
            self._num_done = number + 1
            if self._progress.is_due:
                self.save_progress()
        progress.close()
        self._write()
        self._progress.remove()

    def _step(self, number: int, batch: Sequence[Sample]) -> dict[str, str]:
        """One optimiser step; returns what the progress bar shows."""
        device = self._reader.device
        # noise depends on the seed and the step only, also behind an interruption
        generator = torch.Generator().manual_seed(self._plan.seed * 1_000_003 + number)
        texts = [sample.token_ids for sample in batch]
        token_ids = nn.utils.rnn.pad_sequence([torch.tensor(text) for text in texts], batch_first=True).to(device)
        learned = nn.utils.rnn.pad_sequence([torch.tensor(sample.learned) for sample in batch], batch_first=True)
        states = nn.utils.rnn.pad_sequence(self._reader.states(texts), batch_first=True)
        num_pairs = token_ids.shape[1] - 2
        strength = _NOISE * min(1.0, _NOISE_LENGTH / num_pairs)
        noise = (torch.rand(len(batch), num_pairs, states.shape[2], generator=generator) - 0.5) * strength
        inputs = token_ids, states, learned.to(device), noise.to(device)
        found = losses(self.head, self._target, *inputs, self._plan.ttt_length)
        self._optimizer.zero_grad(set_to_none=True)
        found.total.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_value_(self.head.parameters(), _CLIP_VALUE)
        self._optimizer.step()
        self._schedule.step()
        self.accuracy = found.accuracy.item()
        return {
            "feature": f"{found.feature.item():.3f}",
            "token": f"{found.token.item():.3f}",
            "accuracy": f"{self.accuracy:.0%}",
        }

    def _settings(self) -> str:
        """What a progress belongs to."""
        plan = dataclasses.asdict(self._plan)
        del plan["save_interval_s"]
        texts = sum(len(sample.token_ids) for sample in self._samples)
        return json.dumps([plan, dataclasses.asdict(self._shape), len(self._samples), texts])

    def save_progress(self) -> None:
        """Keeps what is needed to go on."""
        self._progress.save(
            {
                "num_done": self._num_done,
                "head": self.head.state_dict(),
                "optimizer": self._optimizer.state_dict(),
                "schedule": self._schedule.state_dict(),
            }
        )

    def _resume(self) -> None:
        kept = self._progress.load(self._reader.device)
        if kept is None:
            return
        self._num_done = kept["num_done"]
        self.head.load_state_dict(kept["head"])
        self._optimizer.load_state_dict(kept["optimizer"])
        self._schedule.load_state_dict(kept["schedule"])
        logger.info("Going on after %d of %d steps", self._num_done, self.num_steps)

    def _write(self) -> None:
        config = self._reader.config.model
        dtype = getattr(torch, config.dtype)
        tensors = {"embed_tokens.weight": self._target.embedding, **self.head.state_dict()}
        save_file(
            {name: tensor.to("cpu", dtype).contiguous() for name, tensor in tensors.items()},
            self._output / "model.safetensors",
            metadata={"format": "pt"},
        )
        stated = config.arch.max_length
        length = config.max_model_len if stated is None else stated.num_tokens
        content = head_config(self._shape, config.vocab_size, length, config.dtype)
        # last: whoever finds it finds a whole head
        (self._output / "config.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
