"""By how much two computations of one log-probability may differ: measured, for engine, dtype and tensor parallelism.

An engine batches, chunks and orders its sums in another way than the trainer, so that equal weights give slightly
different log-probabilities. ``benchmarks/probe.py`` measures the noise of honest loads; the tolerances here stand
above the largest that it saw and are checked by it. Imports no torch.
"""

from dataclasses import dataclass

from steelyard.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Noise:
    """What was measured on honest loads, and what follows from it; all in nats.

    ``probe_max``: the largest difference seen on a probe. ``probe_tolerance``: what a load may differ by.
    ``token_tolerance``: what any recorded token may differ by when it is computed again from the stored weights; there
    are far more of these than tokens in a probe, so their largest difference is larger.
    ``mismatch_bound``: an alarm goes on where the 99th percentile of a step's differences between engine and
    trainer exceeds it. It covers the cast too: the trainer computes in float32 whatever is published.
    """

    probe_max: float
    probe_tolerance: float
    token_tolerance: float
    mismatch_bound: float


NOISE = {
    ("local", "float32", 1): Noise(probe_max=3.2e-5, probe_tolerance=1e-4, token_tolerance=2e-4, mismatch_bound=1e-3),
    ("local", "bfloat16", 1): Noise(probe_max=0.34, probe_tolerance=0.7, token_tolerance=1.0, mismatch_bound=0.5),
    ("local", "float16", 1): Noise(probe_max=0.072, probe_tolerance=0.15, token_tolerance=0.2, mismatch_bound=0.15),
    ("vllm", "float32", 1): Noise(probe_max=3.7e-5, probe_tolerance=1e-4, token_tolerance=2e-4, mismatch_bound=1e-3),
    ("vllm", "bfloat16", 1): Noise(probe_max=0.52, probe_tolerance=1.1, token_tolerance=1.1, mismatch_bound=0.5),
    ("vllm", "float16", 1): Noise(probe_max=0.059, probe_tolerance=0.15, token_tolerance=0.2, mismatch_bound=0.15),
}
"""By engine, dtype of the published weights, and tensor parallelism; on a CPU. Not yet measured on a GPU.

The noise was measured on SmolLM2-135M. It grows with depth: a decoder of 3.3M parameters gave 0.08 in bfloat16 and
0.01 in float16.
"""


def measured_noise(engine: str, dtype: str, tensor_parallel: int = 1) -> Noise:
    """The row for an engine.

    Raises:
        ConfigError: there is none; a tolerance must then be given.
    """
    noise = NOISE.get((engine, dtype, tensor_parallel))
    if noise is None:
        measured = ", ".join(f"{e} {d} x{n}" for e, d, n in NOISE)
        raise ConfigError(
            f"inference.probe_tolerance must be given for engine {engine} with weights.dtype {dtype} on "
            f"{tensor_parallel} devices: no tolerance was measured for it, only for {measured}"
        )
    return noise
