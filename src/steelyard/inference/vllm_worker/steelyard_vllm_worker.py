"""What we add to the workers of a vLLM server: digests of parameters as they stand in a worker's memory.

Runs in vLLM's environment, which has no Steelyard: the folder of this file is put onto the server's ``PYTHONPATH``,
and the server is started with ``--worker-extension-cls steelyard_vllm_worker.LoadedParameters``. It is called through
``/collective_rpc`` and answers in plain lists and dicts.

On a CPU vLLM would compute with copies of its matrices that oneDNN or a kernel for small matrices has packed, throwing
the matrices themselves away; nothing could then be read back. Importing this module makes it compute with the matrices
as they are.
"""

from typing import Any

import torch
import xxhash
from vllm import _custom_ops
from vllm.model_executor.layers import utils as vllm_layers
from vllm.platforms import current_platform

if current_platform.is_cpu():
    _custom_ops._supports_onednn = False
    # Of bfloat16 on processors with AMX only.
    vllm_layers.check_cpu_sgl_kernel = lambda *_: False


class LoadedParameters:
    """Mixed into vLLM's worker class; ``model_runner`` is the worker's own."""

    model_runner: Any

    def steelyard_parameters(self) -> dict[str, list[Any]]:
        """By name in this worker's memory: dtype, and shape. Tied parameters come once, under their first name."""
        return {name: [_dtype_name(one.dtype), *one.shape] for name, one in self._memory().items()}

    def steelyard_digests(self, slices: dict[str, list[list[Any]]]) -> dict[str, list[list[Any]]]:
        """Digests of runs of rows.

        Args:
            slices: by name in memory: ``[first row, number of rows]`` of each; ``[0, -1]`` is the whole.

        Returns:
            By name in memory, per run of rows: ``[dtype, digest, whether all is zero, shape...]``.
        """
        memory = self._memory()
        return {name: [_described(_rows(memory[name], *one)) for one in runs] for name, runs in slices.items()}

    def _memory(self) -> dict[str, torch.Tensor]:
        return {name: one.detach() for name, one in self.model_runner.get_model().named_parameters()}


def _rows(tensor: torch.Tensor, first: int, number: int) -> torch.Tensor:
    return tensor if number < 0 else tensor.narrow(0, first, number)


def _described(tensor: torch.Tensor) -> list[Any]:
    flat = tensor.cpu().contiguous().reshape(-1)
    digest = xxhash.xxh3_128_hexdigest(flat.view(torch.uint8).numpy().data)
    return [_dtype_name(tensor.dtype), digest, not bool(flat.any()), *tensor.shape]


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
