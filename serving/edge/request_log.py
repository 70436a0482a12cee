"""One log line when a request is accepted, when it ends and when it is refused: ids, counts, times, never text or keys.

Lines are bounded for each tenant: what is beyond MAX_LINES_PER_S is counted, and the next line says how many.
"""

import logging
from dataclasses import dataclass

from headrace.serving.core.request import RequestId
from headrace.serving.edge.errors import ApiError
from headrace.serving.edge.generation import Done, Failure, Generation
from headrace.serving.edge.job import Job

_log = logging.getLogger("headrace.request")

MAX_LINES_PER_S = 10.0
BURST_LINES = 30.0


@dataclass(slots=True)
class _Allowance:
    lines: float = BURST_LINES
    updated_s: float = 0.0
    num_left_out: int = 0


class RequestLog:
    """now_s is monotonic. Tenants come from the operator's key file, so there are only so many of them."""

    def __init__(self) -> None:
        self._names: dict[RequestId, tuple[str, str]] = {}
        self._allowances: dict[str, _Allowance] = {}

    def accepted(self, job: Job, tenant: str, now_s: float) -> None:
        """Before any event of the job."""
        for generation in job.generations:
            self._names[generation.request.request_id] = job.request_id, tenant
        if not _log.isEnabledFor(logging.INFO):
            return
        requests = [generation.request for generation in job.generations]
        fields: dict[str, object] = {
            "request_id": job.request_id,
            "event": "accepted",
            "endpoint": job.endpoint.value,
            "choices": len(requests),
            "prompt_tokens": sum(len(request.prompt_ids) for request in requests),
            "max_tokens": sum(request.stop.max_tokens for request in requests),
        }
        self._write(tenant, now_s, "%s accepted: %d prompt tokens, at most %d new", fields, (
            job.request_id, fields["prompt_tokens"], fields["max_tokens"],
        ))  # fmt: skip

    def ended(self, generation: Generation, outcome: Done | Failure, now_s: float) -> None:
        """Once for each choice of an accepted job."""
        name, tenant = self._names.pop(generation.request.request_id, ("", generation.request.tenant))
        if not _log.isEnabledFor(logging.INFO):
            return
        fields: dict[str, object] = {
            "request_id": name,
            "event": "finished",
            "choice": generation.index,
            "prompt_tokens": len(generation.request.prompt_ids),
            "completion_tokens": generation.completion_tokens,
            "total_ms": round((now_s - generation.created_s) * 1e3, 1),
        }
        if isinstance(outcome, Failure):
            reason = outcome.error.code
        else:
            reason, timings = outcome.finish_reason.value, outcome.timings
            fields |= {"cached_tokens": outcome.usage.cached_tokens, "preemptions": timings.preemptions}
            for key in ("queue_ms", "prefill_ms", "decode_ms", "first_token_ms"):
                value = getattr(timings, key)
                fields[key] = None if value is None else round(value, 1)
        fields["reason"] = reason
        self._write(tenant, now_s, "%s finished: %s after %d tokens and %.0f ms", fields, (
            name, reason, generation.completion_tokens, fields["total_ms"],
        ))  # fmt: skip

    def refused(self, error: ApiError, tenant: str, now_s: float) -> None:
        """A refused request has no id of the server's. The field at fault is not named: clients make up names."""
        if not _log.isEnabledFor(logging.INFO):
            return
        fields: dict[str, object] = {"event": "refused", "code": error.code}
        if error.retry_after_ms is not None:
            fields["retry_after_ms"] = error.retry_after_ms
        self._write(tenant, now_s, "request refused: %s", fields, (error.code,))

    def _write(
        self, tenant: str, now_s: float, text: str, fields: dict[str, object], arguments: tuple[object, ...]
    ) -> None:
        allowance = self._allowances.setdefault(tenant, _Allowance(updated_s=now_s))
        gained = (now_s - allowance.updated_s) * MAX_LINES_PER_S
        allowance.lines = min(BURST_LINES, allowance.lines + gained)
        allowance.updated_s = now_s
        if allowance.lines < 1:
            allowance.num_left_out += 1
            return
        allowance.lines -= 1
        if tenant:
            fields["tenant"] = tenant
        if allowance.num_left_out:
            fields["lines_left_out"] = allowance.num_left_out
            text, arguments = text + " (%d lines left out before)", (*arguments, allowance.num_left_out)
            allowance.num_left_out = 0
        _log.info(text, *arguments, extra={"fields": fields})
