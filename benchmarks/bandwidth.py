"""How fast this machine reads memory: the limit of decoding, which reads every weight once a step.

Each thread streams over a slice of its own of a buffer far larger than the caches, on huge pages where the system
gives them; the best of several passes counts, since anything else is somebody else's work.

    python benchmarks/bandwidth.py --gib 1 --threads 2
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import json
import mmap
import os
import pathlib
import struct
import time

import torch


def _huge_buffer(num_bytes: int) -> torch.Tensor:
    """[num_bytes / 4] float32 of ones, on huge pages if possible."""
    memory = mmap.mmap(-1, num_bytes)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.float32).fill_(1.0)


def read_bandwidth(num_threads: int | None = None, gib: float = 1.0, passes: int = 5) -> float:
    """Streaming read bandwidth in GB/s (10^9 bytes).

    Args:
        num_threads: readers; None: one for each core this process may use.
        gib: size of the buffer in GiB.
        passes: the best of so many counts.
    """
    num_threads = num_threads or len(os.sched_getaffinity(0))
    num_bytes = int(gib * 2**30) // (mmap.PAGESIZE * num_threads) * mmap.PAGESIZE * num_threads
    slices = _huge_buffer(num_bytes).chunk(num_threads)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with concurrent.futures.ThreadPoolExecutor(num_threads) as pool:
            best = min(_pass_seconds(pool, slices) for _ in range(passes + 1))
    finally:
        torch.set_num_threads(before)
    return num_bytes / best / 1e9


def _read(part: torch.Tensor) -> None:
    """Read every value once, as decoding does: a matrix times a vector that stays in the cache."""
    columns = mmap.PAGESIZE // 4
    torch.mv(part.view(-1, columns), torch.ones(columns))


def _pass_seconds(pool: concurrent.futures.ThreadPoolExecutor, slices: tuple[torch.Tensor, ...]) -> float:
    start = time.perf_counter()
    list(pool.map(_read, slices))
    return time.perf_counter() - start


def weight_bytes(model_dir: str) -> int:
    """Bytes of a model's tensors that a decode step reads, from the heads of its safetensors files.

    An embedding table that is not also the output layer is left out: a step reads one row of it per sequence.

    Raises:
        FileNotFoundError: the directory has no safetensors file.
    """
    files = sorted(pathlib.Path(model_dir).glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"no *.safetensors in {model_dir}")
    sizes: dict[str, int] = {}
    for file in files:
        with file.open("rb") as stream:
            (head_bytes,) = struct.unpack("<Q", stream.read(8))
            head = json.loads(stream.read(head_bytes))
        head.pop("__metadata__", None)
        sizes |= {name: entry["data_offsets"][1] - entry["data_offsets"][0] for name, entry in head.items()}
    untied = any(name.endswith("lm_head.weight") for name in sizes)
    skipped = ("embed_tokens.weight",) if untied else ()
    return sum(size for name, size in sizes.items() if not name.endswith(skipped))


@dataclasses.dataclass
class Roofline:
    """The limit that memory sets to decoding.

    Attributes:
        bandwidth_gb_s: measured read bandwidth, 10^9 bytes per second.
        weight_bytes: bytes that a decode step reads.
    """

    bandwidth_gb_s: float
    weight_bytes: int

    @property
    def steps_per_s(self) -> float:
        """Decode steps per second at most: with one sequence, also its tokens per second."""
        return self.bandwidth_gb_s * 1e9 / self.weight_bytes

    def describe(self) -> str:
        """One line for people."""
        return (
            f"memory-bandwidth limit: {self.bandwidth_gb_s:.1f} GB/s read / {self.weight_bytes / 1e6:.0f} MB of "
            f"weights = {self.steps_per_s:.1f} decode steps/s ({1e3 / self.steps_per_s:.1f} ms each)"
        )

    def as_dict(self) -> dict[str, float]:
        """For JSON."""
        return {
            "bandwidth_gb_s": self.bandwidth_gb_s,
            "weight_bytes": self.weight_bytes,
            "decode_steps_per_s": self.steps_per_s,
        }


def main() -> None:
    """Print the read bandwidth, with one thread and with several."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--gib", type=float, default=1.0, help="size of the buffer in GiB")
    parser.add_argument("--threads", type=int, default=None, help="readers; default: one per core")
    parser.add_argument("--roofline", metavar="MODEL_DIR", help="print the limit for this model's weights")
    args = parser.parse_args()
    for threads in dict.fromkeys((1, args.threads or len(os.sched_getaffinity(0)))):
        print(f"{threads} thread(s): {read_bandwidth(threads, args.gib):.1f} GB/s")
    if args.roofline:
        roofline = Roofline(read_bandwidth(args.threads, args.gib), weight_bytes(args.roofline))
        print(roofline.describe())


if __name__ == "__main__":
    main()
