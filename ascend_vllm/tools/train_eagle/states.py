"""Hidden states of texts, as the server computes them: a worker runs the model on whole prompts.

Letters: T tokens of all texts of a batch, H hidden size, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ascend_vllm.args.engine_args import EngineArgs
from ascend_vllm.errors import ConfigError
from ascend_vllm.models.blocks import CausalLM
from ascend_vllm.sampling_params import SamplingParams
from ascend_vllm.tools.train_eagle.head import TargetWeights
from ascend_vllm.types.step import NewRow, SchedulerOutput
from ascend_vllm.worker.input_batch import Int32Array
from ascend_vllm.worker.model_runner import ModelRunner
from ascend_vllm.worker.speculation.proposer import ComputedStep
from ascend_vllm.worker.worker import Worker

_SAMPLING = SamplingParams(temperature=0.0)


class _Collector:
    """A proposer that proposes nothing and keeps the hidden states of the last step."""

    needs_hidden = True
    read_s = 0.0

    def __init__(self) -> None:
        # [T, H] float32, on the device
        self.states = torch.empty(0)

    def apply(self, step: SchedulerOutput) -> None:
        """Nothing to do: rows have no state here."""

    def propose(self, step: ComputedStep) -> Int32Array | None:
        """Keeps a copy of the states."""
        assert step.hidden is not None
        self.states = step.hidden.float()
        return None


class StateReader:
    """Computes hidden states of texts.

    Args:
        model: directory of the target.
        device: of --device.
        dtype: of --dtype.
        trust_remote_code: of --trust-remote-code.
        max_length: most tokens of a text.
        batch_tokens: most tokens of all texts of a batch.
        batch_size: most texts of a batch.

    Attributes:
        config: of the engine that would serve the target.
        device: of the tensors.

    Raises:
        ConfigError: the model cannot be run like this, or heads do not fit it.
        ModelLoadError: it cannot be loaded.
    """

    def __init__(
        self,
        model: str,
        *,
        device: str,
        dtype: str,
        trust_remote_code: bool,
        max_length: int,
        batch_tokens: int,
        batch_size: int,
    ) -> None:
        self.config = EngineArgs(
            model=model,
            device=device,
            dtype=dtype,
            trust_remote_code=trust_remote_code,
            max_model_len=max_length,
            max_num_seqs=batch_size,
            max_num_batched_tokens=batch_tokens,
            enforce_eager=True,
            enable_prefix_caching=False,
        ).create_engine_config()
        arch = self.config.model.arch
        if arch.embedding_size != arch.hidden_size or self.config.model.pooler is not None:
            raise ConfigError(f"--model {model}: there are no EAGLE heads for models of this kind.")
        self._worker = Worker(self.config)
        self._worker.load_model()
        self._block_size = self.config.cache.block_size
        self._worker.initialize_cache(math.ceil(batch_tokens / self._block_size) + batch_size)
        runner = self._worker.get_runner()
        assert isinstance(runner, ModelRunner)
        self._collector = _Collector()
        runner.use_proposer(self._collector)
        self._step_id = 0
        # slots of the last batch
        self._used: list[int] = []

    @property
    def model(self) -> CausalLM:
        """The target."""
        return self._worker.get_model()

    def weights(self) -> TargetWeights:
        """The target's embedding and LM head.

        Raises:
            ConfigError: this class of models has no embedding that a head can use.
        """
        model, arch = self.model, self.config.model.arch
        if model.embed_tokens is None:
            raise ConfigError(f"{type(model).__name__} has no token embedding that an EAGLE head can use.")
        unit = torch.eye(arch.hidden_size, dtype=getattr(torch, self.config.model.dtype), device=self._worker.device)
        with torch.inference_mode():
            ids = torch.arange(arch.vocab_size, device=self._worker.device)
            embedding = model.embed_tokens.forward(ids).float()
            # whatever the format of the head's weight: its products with unit vectors are its columns
            logits = model.compute_logits(unit).float()
        if arch.logit_cap is not None:
            logits = arch.logit_cap * torch.atanh(logits / arch.logit_cap)
        # copies outside of inference mode, which autograd can save
        return TargetWeights(embedding.clone(), logits.T.contiguous().clone(), arch.logit_cap)

    def states(self, texts: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """Hidden states of the tokens of each text, [T, H] float32."""
        step = SchedulerOutput(self._step_id, self._used, [], [], [], [])
        first_block = 0
        for slot, token_ids in enumerate(texts):
            num_blocks = math.ceil(len(token_ids) / self._block_size)
            blocks = list(range(first_block, first_block + num_blocks))
            first_block += num_blocks
            length = len(token_ids)
            step.new_rows.append(NewRow(slot, str(slot), list(token_ids), length, 0, blocks, _SAMPLING, 0, []))
            step.slots.append(slot)
            step.num_scheduled_tokens.append(length)
        self._worker.execute_model(step)
        self._step_id += 1
        self._used = list(range(len(texts)))
        return list(torch.split(self._collector.states.clone(), [len(token_ids) for token_ids in texts]))

    @property
    def device(self) -> torch.device:
        """Of the states."""
        return self._worker.device
