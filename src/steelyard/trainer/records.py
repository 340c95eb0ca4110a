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


class ElasticSettings(Record, frozen=True, kw_only=True):
    """How a trainer shares the units of a step with workers that help it.

    ``unit_deadline_s``: how long a worker may have a unit; ``pull_deadline_s``: how long one chunk of at most
    ``chunk_bytes`` may take on its way, either way. Units further than ``max_ahead_units`` behind the next to be added
    are not given out, which bounds the sums that are kept. A unit that is out for longer than ``straggler_factor``
    times the median is given to another worker too.
    """

    unit_deadline_s: float = 120.0
    pull_deadline_s: float = 20.0
    prove_deadline_s: float = 60.0
    chunk_bytes: int = 4 << 20
    max_ahead_units: int = 16
    straggler_factor: float = 2.0


class TrainerSettings(Record, frozen=True, kw_only=True):
    """What a trainer needs to start. ``checkpoints_dir`` is that of the run; ``num_threads`` of torch."""

    checkpoints_dir: str
    loss: LossSettings = LossSettings()
    optimizer: OptimizerSettings = OptimizerSettings()
    keep_checkpoints: int = 2
    num_threads: int = 1
    seed: int = 0
    elastic: ElasticSettings = ElasticSettings()


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


class AttachRequest(Record, frozen=True, kw_only=True):
    """Let the worker that listens on ``socket_path`` help with units of steps, under ``name``."""

    name: str
    socket_path: str


class DetachRequest(Record, frozen=True, kw_only=True):
    """Let a helper go."""

    name: str


class HelperState(Record, frozen=True, kw_only=True):
    """A helper and the version that it has proven; None while it loads."""

    name: str
    version: int | None


class HelperStates(Record, frozen=True, kw_only=True):
    """Who helps."""

    helpers: tuple[HelperState, ...]


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
    helpers: tuple[HelperState, ...] = ()


TRAIN = Endpoint("trainer.train_step", TrainRequest, StepReport)
PUBLISH = Endpoint("trainer.publish", PublishRequest, Manifest)
CHECKPOINT = Endpoint("trainer.checkpoint", CheckpointRequest, CheckpointReport)
ATTACH = Endpoint("trainer.attach", AttachRequest, HelperStates)
DETACH = Endpoint("trainer.detach", DetachRequest, HelperStates)
STATE = Endpoint("trainer.state", StateRequest, TrainerState)
