"""Lost connections and detached streams, without sockets."""

import pytest

from headrace.serving.core.request import CancelReason
from headrace.serving.edge.keys import ANONYMOUS, Identity
from headrace.serving.edge.stream import ReplayBudget
from tests.serving.edge.scripted import Script
from tests.serving.edge.session_peer import ALICE, BOB, Host, Peer, codes, kinds, opened

# Disconnect and resume


def test_disconnect_cancels_what_is_not_detached() -> None:
    peer = opened()
    plain, kept = peer.create("plain"), peer.create("kept", detach=True)
    stopped: list[str] = []
    peer.send("create", id="preparing", endpoint="chat", body={})
    peer.starting["preparing"].preparing(lambda: stopped.append("preparing"))
    peer.lose()
    assert (plain.cancels, kept.cancels, stopped) == ([CancelReason.DISCONNECT], [], ["preparing"])
    late = Script(9)
    peer.starting["preparing"].started(late.job)
    assert late.cancels == [CancelReason.DISCONNECT]
    peer.session.expire(CancelReason.DISCONNECT)
    assert kept.cancels == [CancelReason.DISCONNECT] and peer.host.budget.used_bytes == 0


def resume(old: Peer, stream_id: str = "r", after: int | None = None, identity: Identity = ANONYMOUS) -> Peer:
    new = Peer(old.host, identity)
    new.read()
    new.send("resume", session=old.session.secret, id=stream_id, **({} if after is None else {"after": after}))
    return new


@pytest.mark.parametrize("after", [None, 0, 1, 2])
@pytest.mark.parametrize("is_lost", [True, False])
def test_resume_repeats_and_goes_on_without_a_gap(after: int | None, is_lost: bool) -> None:
    old = opened()
    script = old.create("r", detach=True)
    for letter in (b"a", b"b"):
        script.tokens(letter)
        old.read()
    if is_lost:
        old.lose()
    script.tokens(b"cd")
    new = resume(old, after=after)
    script.finish()
    script_frames = new.read()
    assert script_frames[-1]["type"] == "done"
    frames = new.frames[1:]
    first = 0 if after is None else after + 1
    assert [frame["seq"] for frame in frames] == list(range(first, 5))
    text = "".join(frame.get("text", "") for frame in frames)
    assert text == "abcd"[max(0, first - 1) :]
    assert old.read() == [] and script.cancels == []


def test_resume_after_the_end_repeats_the_terminal_frame() -> None:
    old = opened()
    script = old.create("r", detach=True)
    script.tokens(b"a")
    script.finish()
    assert kinds(old.read()) == ["created", "delta", "done"]
    old.lose()
    new = resume(old, after=1)
    assert [(f["type"], f["seq"]) for f in new.frames[1:]] == [("done", 2)]
    again = resume(new, after=0)
    assert [(f["type"], f["seq"]) for f in again.frames[1:]] == [("delta", 1), ("done", 2)]


def test_a_stream_that_was_preparing_when_the_connection_was_lost_can_be_resumed() -> None:
    old = opened()
    old.send("create", id="r", endpoint="chat", body={}, detach=True)
    old.lose()
    new = resume(old)
    script = Script(0)
    old.starting["r"].started(script.job)
    script.finish()
    assert kinds(new.read()) == ["created", "done"]


@pytest.mark.parametrize(
    "case", ["wrong session", "wrong id", "not detached", "other tenant", "never sent", "log dropped", "expired"]
)
def test_resume_gone(case: str) -> None:
    host = Host()
    old = Peer(host, ALICE, replay_bytes=300)
    old.read()
    script = old.create("r", detach=case != "not detached")
    script.tokens(b"a")
    old.read()
    if case == "log dropped":
        script.tokens(b"b" * 400)
        old.read()
    if case != "wrong session":
        old.lose()
    if case == "expired":
        old.session.expire(CancelReason.DISCONNECT)
    secret = "s_" + "0" * 32 if case == "wrong session" else old.session.secret
    new = Peer(host, BOB if case == "other tenant" else ALICE)
    new.read()
    frames = new.send(
        "resume", session=secret, id="q" if case == "wrong id" else "r", after=7 if case == "never sent" else 0
    )
    assert codes(frames) == ["resume_gone"]
    assert frames[0]["id"] is None and frames[0]["id_rejected"] == ("q" if case == "wrong id" else "r")
    if case == "other tenant":
        good = Peer(host, ALICE)
        good.read()
        assert kinds(good.send("resume", session=secret, id="r", after=0)) == ["delta"], "the refusal changed nothing"


def test_a_stream_that_was_taken_over_belongs_to_the_new_socket_only() -> None:
    old = opened()
    script = old.create("r", detach=True)
    new = resume(old)
    assert (old.session.num_streams, new.session.num_streams) == (0, 1)
    assert codes(old.send("cancel", id="r")) == ["unknown_id"]
    old.lose()
    old.session.expire(CancelReason.DISCONNECT)
    assert script.cancels == []
    script.finish()
    assert kinds(new.frames[1:] + new.read()) == ["created", "done"], "what the old socket had not shown comes once"


def test_only_the_latest_ended_streams_are_kept_for_resume() -> None:
    old = opened(max_streams=2)
    for name in ("a", "b", "c"):
        old.create(name, detach=True).finish()
        old.read()
    old.lose()
    assert codes(resume(old, "a").frames[1:]) == ["resume_gone"]
    assert kinds(resume(old, "b").frames[1:]) == kinds(resume(old, "c").frames[1:]) == ["created", "done"]


def test_resume_onto_a_live_id_is_a_duplicate() -> None:
    old = opened()
    old.create("r", detach=True)
    old.lose()
    new = opened(host=old.host)
    new.create("r")
    new.read()
    assert codes(new.send("resume", session=old.session.secret, id="r")) == ["duplicate_id"]


def test_logs_stay_within_the_budget_of_the_server() -> None:
    host = Host()
    host.budget = ReplayBudget(2000)
    peer = opened(host=host, max_streams=8)
    for turn in range(50):
        script = peer.create(f"r{turn}", detach=True)
        script.tokens(b"x" * 100)
        script.finish()
        peer.read()
        assert host.budget.used_bytes <= 2000
    peer.lose()
    peer.session.expire(CancelReason.DISCONNECT)
    assert host.budget.used_bytes == 0
