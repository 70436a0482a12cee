"""Accepted requests that do not run yet, bounded in number and in prompt tokens."""

from bisect import insort

from headrace.serving.core.config import SchedulerConfig
from headrace.serving.core.drain_rate import DrainRate
from headrace.serving.core.errors import InvariantError
from headrace.serving.core.policy import queue_rank
from headrace.serving.core.request import Rejection, RejectionReason, Request
from headrace.serving.core.sequence import Sequence


class WaitingQueue:
    """Ordered by queue_rank. The bounds hold for new requests; a preempted one always comes back in."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._max_requests = config.max_queued_requests
        self._max_prompt_tokens = config.max_queued_prompt_tokens
        self._sequences: list[Sequence] = []
        self._num_prompt_tokens = 0
        self._drain_rate = DrainRate()

    def __len__(self) -> int:
        return len(self._sequences)

    @property
    def sequences(self) -> tuple[Sequence, ...]:
        return tuple(self._sequences)

    @property
    def first(self) -> Sequence:
        return self._sequences[0]

    def refuse(self, request: Request, now_s: float) -> Rejection | None:
        """Why the request does not fit into the queue now, with a hint when it may."""
        num_tokens = self._num_prompt_tokens + len(request.prompt_ids)
        if len(self) >= self._max_requests:
            text = f"max_queued_requests={self._max_requests} requests wait already"
        elif self._sequences and num_tokens > self._max_prompt_tokens:
            text = f"the prompts that wait would exceed max_queued_prompt_tokens={self._max_prompt_tokens}"
        else:
            return None
        return Rejection(
            reason=RejectionReason.QUEUE_FULL,
            message=f"{text}; retry later",
            # Half the queue: there is room for this request by then, and for others who were told the same.
            retry_after_ms=self._drain_rate.retry_after_ms(-(-len(self) // 2), now_s),
        )

    def add(self, sequence: Sequence) -> None:
        insort(self._sequences, sequence, key=queue_rank)
        self._num_prompt_tokens += len(sequence.request.prompt_ids)

    def remove(self, sequence: Sequence) -> None:
        self._sequences.remove(sequence)
        self._num_prompt_tokens -= len(sequence.request.prompt_ids)

    def start(self, sequence: Sequence, now_s: float) -> None:
        """Remove a sequence because it runs from now on."""
        self.remove(sequence)
        self._drain_rate.on_leave(now_s, bool(self._sequences))

    def check(self) -> None:
        """Raise InvariantError if the order, the token count or a waiting sequence is wrong."""
        if self._sequences != sorted(self._sequences, key=queue_rank):
            raise InvariantError("the waiting queue is out of order")
        if self._num_prompt_tokens != sum(len(s.request.prompt_ids) for s in self._sequences):
            raise InvariantError("the count of queued prompt tokens is wrong")
        for s in self._sequences:
            if s.slot is not None or s.pages or s.num_pending or s.num_computed:
                raise InvariantError(f"waiting request {s.request.request_id} holds state of a tenancy")
