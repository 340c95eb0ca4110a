"""Records and endpoints of the trainer process. Imports no torch.

::

    control --TrainRequest(path and digest of the batch file)--> Trainer --StepReport--> control
    control --PublishRequest--> Trainer --Manifest--> control
    control --CheckpointRequest--> Trainer --CheckpointReport--> control
"""

from steelyard.processes.channel import Endpoint
from steelyard.types import Manifest, Record, StepReport

TRAINED_DTYPE = "float32"
"""What the trainer keeps its weights in, whatever is published."""


class LossSettings(Record, frozen=True, kw_only=True):
    """Coefficients of the loss; see :mod:`steelyard.trainer.loss`."""

    clip_low: float = 0.2
    clip_high: float = 0.28
    kl_coef: float = 0.0
    entropy_coef: float = 0.0


class OptimizerSettings(Record, frozen=True, kw_only=True):
    """AdamW (arXiv 1711.05101): a linear warm-up, then a line down to ``final_rate_frac`` of the rate.

    The line ends at step ``decay_steps``; with a fraction of 1.0 the rate stays.
    """

    learning_rate: float = 3e-4
    warmup_steps: int = 0
    decay_steps: int = 0
    final_rate_frac: float = 1.0
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.95
    max_grad_norm: float = 1.0


class TrainerSettings(Record, frozen=True, kw_only=True):
    """What a trainer needs to start. ``checkpoints_dir`` is that of the run; ``num_threads`` of torch."""

    checkpoints_dir: str
    loss: LossSettings = LossSettings()
    optimizer: OptimizerSettings = OptimizerSettings()
    keep_checkpoints: int = 2
    num_threads: int = 1
    seed: int = 0


class TrainRequest(Record, frozen=True, kw_only=True):
    """Take one optimizer step over the StepBatch in the file ``path``, whose bytes have ``digest``.

    ``version`` is the number that the new weights get.
    """

    path: str
    digest: str
    step: int
    version: int


class PublishRequest(Record, frozen=True, kw_only=True):
    """Publish the present weights, which must be ``version``."""

    version: int
    parent_version: int | None


class CheckpointRequest(Record, frozen=True, kw_only=True):
    """Write a checkpoint of the state before step ``step``. ``extra`` is kept unread (the sampler's cursor)."""

    step: int
    extra: bytes = b""


class CheckpointReport(Record, frozen=True, kw_only=True):
    """A durable checkpoint; ``digest`` is over its manifest."""

    step: int
    version: int
    path: str
    digest: str
    weights_digest: str


class StateRequest(Record, frozen=True, kw_only=True):
    """Ask for the trainer's state."""


class TrainerState(Record, frozen=True, kw_only=True):
    """The next step, and the version and digest of the weights that it will be computed at.

    ``is_busy`` says that a step, publication or checkpoint is under way; the rest is then still the state before it.
    ``checkpoint_extra`` is what the checkpoint that was opened had been given.
    """

    step: int
    version: int
    weights_digest: str
    is_busy: bool
    num_parameters: int
    checkpoint_extra: bytes = b""


TRAIN = Endpoint("trainer.train_step", TrainRequest, StepReport)
PUBLISH = Endpoint("trainer.publish", PublishRequest, Manifest)
CHECKPOINT = Endpoint("trainer.checkpoint", CheckpointRequest, CheckpointReport)
STATE = Endpoint("trainer.state", StateRequest, TrainerState)
