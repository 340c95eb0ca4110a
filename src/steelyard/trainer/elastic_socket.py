"""A helper on the other end of a Unix socket. Imports no torch."""

from pathlib import Path

from steelyard.processes.channel import Client
from steelyard.trainer.elastic_records import (
    COMPUTE,
    PROVE,
    PULL,
    PUT_WEIGHTS,
    ComputeRequest,
    ProveRequest,
    Pulled,
    PullRequest,
    UnitDone,
    WeightProof,
    WeightSlices,
)


class SocketHelper:
    """Calls an :class:`steelyard.trainer.elastic_worker.ElasticWorker` process. Made by :meth:`connect`."""

    def __init__(self, name: str, client: Client) -> None:
        self._name = name
        self._client = client

    @classmethod
    async def connect(cls, name: str, socket_path: Path, deadline_s: float) -> "SocketHelper":
        """Connect to a worker that may not be listening yet.

        Raises:
            DeadlineExceeded: nobody listened within ``deadline_s`` seconds.
        """
        return cls(name, await Client.connect(socket_path, name=name, deadline_s=deadline_s))

    @property
    def name(self) -> str:
        """The worker's name."""
        return self._name

    async def put_weights(self, request: WeightSlices, deadline_s: float) -> None:
        """See :class:`steelyard.trainer.elastic.Helper`."""
        await self._client.call(PUT_WEIGHTS, request, deadline_s=deadline_s)

    async def prove(self, request: ProveRequest, deadline_s: float) -> WeightProof:
        """See :class:`steelyard.trainer.elastic.Helper`."""
        return await self._client.call(PROVE, request, deadline_s=deadline_s)

    async def compute(self, request: ComputeRequest, deadline_s: float) -> UnitDone:
        """See :class:`steelyard.trainer.elastic.Helper`."""
        return await self._client.call(COMPUTE, request, deadline_s=deadline_s)

    async def pull(self, request: PullRequest, deadline_s: float) -> Pulled:
        """See :class:`steelyard.trainer.elastic.Helper`."""
        return await self._client.call(PULL, request, deadline_s=deadline_s)

    async def close(self) -> None:
        """End the connection."""
        await self._client.close()
