"""Accepted requests that do not run yet, bounded in number and in prompt tokens."""

from bisect import insort

from headrace.serving.core.config import SchedulerConfig
from headrace.serving.core.drain_rate import DrainRate
from headrace.serving.core.errors import InvariantError
from headrace.serving.core.fair_share import Tenant
from headrace.serving.core.policy import arrival_rank, class_level, tenant_turn
from headrace.serving.core.request import Priority, Rejection, RejectionReason, Request
from headrace.serving.core.sequence import Sequence

Lines = dict[Tenant, list[Sequence]]


class WaitingQueue:
    """A line by arrival for each class and tenant; the first of all is one of their heads, so that finding it takes as
    long as there are lines, however many wait. The bounds hold for new requests; a preempted one always comes back in,
    to its place by arrival.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self._max_requests = config.max_queued_requests
        self._max_prompt_tokens = config.max_queued_prompt_tokens
        self._aging_s = config.aging_s
        self._classes: dict[Priority, Lines] = {priority: {} for priority in Priority}
        self._served_s = dict.fromkeys(Priority, float("-inf"))
        self._num_waiting = 0
        self._num_prompt_tokens = 0
        self._drain_rate = DrainRate()

    def __len__(self) -> int:
        return self._num_waiting

    @property
    def num_prompt_tokens(self) -> int:
        return self._num_prompt_tokens

    @property
    def sequences(self) -> tuple[Sequence, ...]:
        """By arrival."""
        waiting = [s for lines in self._classes.values() for line in lines.values() for s in line]
        return tuple(sorted(waiting, key=arrival_rank))

    def first(self, now_s: float) -> Sequence:
        """Whose turn it is; there must be one."""
        heads = [
            (self._level(priority, lines, now_s), min((line[0] for line in lines.values()), key=tenant_turn))
            for priority, lines in self._classes.items()
            if lines
        ]
        return min(heads, key=lambda head: (head[0], *tenant_turn(head[1])))[1]

    def wait_s(self, tenant: str, priority: Priority, now_s: float) -> float:
        """At least so long a new request waits, by the measured rate: until those have left that wait in its tenant's
        lines of its class and above. Others may be ahead of it too. 0 while nothing was measured."""
        num_ahead = sum(
            len(line)
            for its, lines in self._classes.items()
            if its <= priority
            for owner, line in lines.items()
            if owner.name == tenant
        )
        return self._drain_rate.wait_s(num_ahead, now_s) if num_ahead else 0.0

    def refuse(self, request: Request, now_s: float) -> Rejection | None:
        """Why the request does not fit into the queue now, with a hint when it may."""
        num_tokens = self._num_prompt_tokens + len(request.prompt_ids)
        if len(self) >= self._max_requests:
            text = f"max_queued_requests={self._max_requests} requests wait already"
        elif self._num_waiting and num_tokens > self._max_prompt_tokens:
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
        line = self._classes[sequence.request.priority].setdefault(sequence.tenant, [])
        insort(line, sequence, key=arrival_rank)
        self._num_waiting += 1
        self._num_prompt_tokens += len(sequence.request.prompt_ids)

    def remove(self, sequence: Sequence) -> None:
        lines = self._classes[sequence.request.priority]
        line = lines[sequence.tenant]
        line.remove(sequence)
        if not line:
            del lines[sequence.tenant]
        self._num_waiting -= 1
        self._num_prompt_tokens -= len(sequence.request.prompt_ids)

    def start(self, sequence: Sequence, now_s: float) -> None:
        """Remove a sequence because it runs from now on."""
        self.remove(sequence)
        self.note_service(sequence.request.priority, now_s)
        self._drain_rate.on_leave(now_s, self._num_waiting > 0)

    def note_service(self, priority: Priority, now_s: float) -> None:
        """A request of the class started, or ran until now and was preempted: its class ages from here on."""
        self._served_s[priority] = now_s

    def check(self) -> None:
        """Raise InvariantError if an order, a count or a waiting sequence is wrong."""
        waiting = self.sequences
        for priority, lines in self._classes.items():
            for tenant, line in lines.items():
                if not line or line != sorted(line, key=arrival_rank):
                    raise InvariantError("the waiting queue is out of order")
                if any(s.tenant is not tenant or s.request.priority is not priority for s in line):
                    raise InvariantError("a request waits in the wrong line")
        if self._num_waiting != len(waiting):
            raise InvariantError("the count of waiting requests is wrong")
        if self._num_prompt_tokens != sum(len(s.request.prompt_ids) for s in waiting):
            raise InvariantError("the count of queued prompt tokens is wrong")
        for s in waiting:
            if s.slot is not None or s.pages or s.num_pending or s.num_computed:
                raise InvariantError(f"waiting request {s.request.request_id} holds state of a tenancy")

    def _level(self, priority: Priority, lines: Lines, now_s: float) -> int:
        since_s = min(line[0].submitted_s for line in lines.values())
        return class_level(priority, now_s - max(since_s, self._served_s[priority]), self._aging_s)
