"""The one table from outcomes to status, type and code."""

import pytest

from headrace.serving.core.request import Rejection, RejectionReason
from headrace.serving.edge.errors import ERROR_TABLE, ApiError, ErrorCode, from_rejection


def test_every_code_has_a_rule_and_a_meaning() -> None:
    assert set(ERROR_TABLE) == set(ErrorCode)
    for rule in ERROR_TABLE.values():
        assert 400 <= rule.status <= 504
        assert rule.meaning.endswith(".") or "A-Z" in rule.meaning


@pytest.mark.parametrize(
    ("reason", "status"),
    [
        (RejectionReason.QUEUE_FULL, 429),
        (RejectionReason.CONTEXT_EXCEEDED, 400),
        (RejectionReason.NEVER_FITS, 400),
        (RejectionReason.SHUTTING_DOWN, 503),
        (RejectionReason.INVALID, 400),
    ],
)
def test_rejections(reason: RejectionReason, status: int) -> None:
    error = from_rejection(Rejection(reason=reason, message="m", param="p", retry_after_ms=1500))
    assert error.status == status
    assert error.body() == {"error": {"message": "m", "type": error.type, "param": "p", "code": error.code}}
    assert error.headers() == {"retry-after": "2", "retry-after-ms": "1500"}


def test_every_rejection_reason_is_covered() -> None:
    for reason in RejectionReason:
        assert from_rejection(Rejection(reason=reason, message="m")).headers() == {}


def test_an_unknown_engine_code_is_a_server_error() -> None:
    error = ApiError("not_finite", "logits are not finite")
    assert (error.status, error.type, error.code) == (500, "server_error", "not_finite")
