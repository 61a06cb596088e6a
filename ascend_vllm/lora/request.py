"""The adapter that a request asks for."""

from __future__ import annotations

import msgspec


class LoRARequest(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """A LoRA adapter: requests with the same name, id and path share it.

    Attributes:
        lora_name: what the adapter is called.
        lora_int_id: a number of its own, 1 or more.
        lora_path: directory of its files.
        base_model_name: of the model that it was trained for, as `/v1/models` reports it.

    Example:
        >>> LoRARequest("sql", 1, "/adapters/sql").adapter_id
        1
    """

    lora_name: str
    lora_int_id: int
    lora_path: str
    base_model_name: str | None = None

    def __post_init__(self) -> None:
        if self.lora_int_id < 1:
            raise ValueError(f"id must be > 0, got {self.lora_int_id}")
        if not self.lora_path:
            raise ValueError("lora_path cannot be empty")

    @property
    def adapter_id(self) -> int:
        """vLLM's other name of `lora_int_id`."""
        return self.lora_int_id

    @property
    def name(self) -> str:
        """vLLM's other name of `lora_name`."""
        return self.lora_name

    @property
    def path(self) -> str:
        """vLLM's other name of `lora_path`."""
        return self.lora_path

    @property
    def key(self) -> tuple[str, int, str]:
        """What tells adapters apart."""
        return (self.lora_name, self.lora_int_id, self.lora_path)
