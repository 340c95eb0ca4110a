"""What a trainer asks of a worker that computes gradients for it. Imports no torch.

::

    trainer --WeightSlices--> worker          the weights of a version, chunk by chunk
    trainer --ProveRequest--> worker          the digest of what then stands in its memory
    trainer --ComputeRequest--> worker        one lease unit; answered when its gradient sum is ready
    trainer --PullRequest--> worker           slices of that sum, chunk by chunk

The trainer calls, the worker answers: so every wait is the trainer's, with its deadline, and a worker that dies ends
the calls to it.
"""

from steelyard.processes.channel import Endpoint
from steelyard.trainer.records import LossSettings
from steelyard.trainer.slice_plan import Slice
from steelyard.trainer.units import LeaseUnit
from steelyard.types import Record


class WeightSlices(Record, frozen=True, kw_only=True):
    """Part of the weights of ``version``; ``data`` holds the slices' bytes one after the other."""

    version: int
    slices: tuple[Slice, ...]
    data: bytes


class ProveRequest(Record, frozen=True, kw_only=True):
    """All weights of ``version`` were sent: which are in memory?"""

    version: int


class WeightProof(Record, frozen=True, kw_only=True):
    """Digest over parameters and buffers as they stand in the worker's memory."""

    version: int
    digest: str


class ComputeRequest(Record, frozen=True, kw_only=True):
    """Compute the gradient sum of a unit at the weights of ``unit.parent_version``."""

    unit: LeaseUnit
    loss: LossSettings


class UnitFigures(Record, frozen=True, kw_only=True):
    """:class:`steelyard.trainer.loss.LossSums` of one unit. The log ratios are float32, little-endian."""

    num_tokens: int
    loss: float
    kl: float
    ratio: float
    ratio_max: float
    num_clipped: int
    entropy: float
    current_log_ratios: bytes
    older_log_ratios: bytes


class UnitDone(Record, frozen=True, kw_only=True):
    """The gradient sum of a unit is ready to be pulled; ``names`` are the parameters that have one."""

    step: int
    unit: int
    names: tuple[str, ...]
    figures: UnitFigures


class PullRequest(Record, frozen=True, kw_only=True):
    """Slices of the gradient sum of a unit."""

    step: int
    unit: int
    slices: tuple[Slice, ...]


class Pulled(Record, frozen=True, kw_only=True):
    """The bytes of the slices, one after the other."""

    data: bytes


class Nothing(Record, frozen=True, kw_only=True):
    """Done, and there is nothing to say."""


PUT_WEIGHTS = Endpoint("elastic.put_weights", WeightSlices, Nothing)
PROVE = Endpoint("elastic.prove", ProveRequest, WeightProof)
COMPUTE = Endpoint("elastic.compute", ComputeRequest, UnitDone)
PULL = Endpoint("elastic.pull", PullRequest, Pulled)
