"""What a calibration says of the parts of a run, held against what they take while the run goes on."""

import msgspec

from steelyard.allocation.architecture import Architecture
from steelyard.allocation.calibration import Calibration
from steelyard.allocation.moving_cost import MovingCost
from steelyard.allocation.online import OnlineCalibration, OnlineError
from steelyard.allocation.roofline import Corrections, Roofline
from steelyard.allocation.serving_cost import ServingCost, StepWork
from steelyard.allocation.training_cost import TrainBatch, TrainingCost, TrainLayout
from steelyard.types.record import Record

SAMPLING, TRAINING, PUBLICATION, LOAD = "sampling", "training", "publication", "load"


class Compared(Record, frozen=True, kw_only=True):
    """One piece of work: seconds as the calibration predicts them and as they were, and what is known of its term."""

    predicted_s: float
    observed_s: float
    known: OnlineError


class Sampled(Record, frozen=True, kw_only=True):
    """What a replica did in some time.

    ``num_running`` and ``kv_tokens`` are means over it; a batch is taken to be as large all the time.
    """

    decode_tokens: int
    prefill_tokens: int
    num_running: float
    kv_tokens: float
    busy_s: float


class RunPrediction:
    """Predicts, observes, and corrects each term (:mod:`steelyard.allocation.online`).

    Args:
        model: the run's, on the devices that were calibrated.
        num_train: devices of the trainer.

    Raises:
        InputError: the model does not fit there.
    """

    def __init__(
        self, calibration: Calibration, model: Architecture, *, num_train: int, micro_batch_tokens: int
    ) -> None:
        self._corrections = calibration.corrections
        self._micro_batch_tokens, self._num_train = micro_batch_tokens, num_train
        self._roofline = Roofline(calibration.device, calibration.corrections)
        self._model, self._element_bytes = model, calibration.element_bytes
        self._serving = ServingCost(model, self._roofline, 1, calibration.element_bytes)
        moving = MovingCost(model, self._roofline, calibration.rates, calibration.element_bytes)
        self._write_s = moving.write_s()
        self._load_s = moving.load_s(self._serving) + moving.swap_s(self._serving)
        self._known = OnlineCalibration()

    @property
    def errors(self) -> tuple[OnlineError, ...]:
        """What is known of each term by now."""
        return self._known.errors()

    @property
    def corrections(self) -> Corrections:
        """The calibration's, times what was observed over predicted since. Nothing gets faster than its roofline."""
        found = self._corrections
        serving, training = self._known.of(SAMPLING).factor, self._known.of(TRAINING).factor
        return msgspec.structs.replace(
            found,
            prefill_compute=max(1.0, found.prefill_compute * serving),
            decode_compute=max(1.0, found.decode_compute * serving),
            memory=max(1.0, found.memory * serving),
            launch=found.launch * serving,
            train_compute=max(1.0, found.train_compute * training),
            train_launch=found.train_launch * training,
        )

    def trained(self, num_tokens: int, num_rows: int, longest_tokens: int, observed_s: float) -> Compared | None:
        """An optimizer step over rows that are taken to be equally long; None where its time says nothing."""
        layout = TrainLayout(
            dp=self._num_train, micro_batch_tokens=max(self._micro_batch_tokens, longest_tokens), recompute=False
        )
        pairs = num_tokens * (num_tokens / max(1, num_rows) + 1.0) / 2.0
        batch = TrainBatch(num_tokens=num_tokens, pairs=pairs, longest_tokens=longest_tokens)
        cost = TrainingCost(self._model, self._roofline, layout, self._element_bytes)
        return self._compare(TRAINING, cost.step_s(batch), observed_s)

    def published(self, observed_s: float) -> Compared | None:
        """A version, until its manifest was written."""
        return self._compare(PUBLICATION, self._write_s, observed_s)

    def loaded(self, observed_s: float) -> Compared | None:
        """A version, until a replica had proven it."""
        return self._compare(LOAD, self._load_s, observed_s)

    def sampled(self, done: Sampled) -> Compared | None:
        """A replica's time in which it computed; None where it sampled nothing."""
        if done.decode_tokens < 1 or done.num_running <= 0.0:
            return None
        batch = max(1, round(done.num_running))
        num_steps = done.decode_tokens / batch
        prompt = done.prefill_tokens / num_steps
        work = StepWork(
            num_decoding=batch,
            kv_tokens=done.kv_tokens,
            prefill_tokens=prompt,
            prefill_pairs=prompt * done.kv_tokens / batch / 2.0,
            num_prompts=1 if prompt else 0,
        )
        return self._compare(SAMPLING, num_steps * self._serving.step_s(work), done.busy_s)

    def _compare(self, term: str, predicted_s: float, observed_s: float) -> Compared | None:
        before = self._known.of(term).num_observed
        self._known = self._known.observed(term, predicted_s, observed_s)
        known = self._known.of(term)
        if known.num_observed == before:
            return None
        error = OnlineError(
            term=term, factor=known.factor, error_frac=known.error_frac, num_observed=known.num_observed
        )
        return Compared(predicted_s=predicted_s, observed_s=observed_s, known=error)
