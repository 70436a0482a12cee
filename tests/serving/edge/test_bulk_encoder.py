"""The process that encodes long prompts: the edge's ids and refusals, a low priority, and what its loss costs."""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import psutil
import pytest

from headrace.serving.app.bulk_process import NICE, bulk_launch
from headrace.serving.app.text_tools import TextOptions, load_text_tools
from headrace.serving.edge.bodies import ChatPrompt
from headrace.serving.edge.bulk_encoder import BulkEncoder, BulkLaunch
from headrace.serving.edge.errors import ApiError, ErrorCode
from headrace.serving.edge.preparation import BULK_BYTES, BULK_MESSAGES, Preparation
from headrace.serving.edge.prompt_ids import LocalEncoder

NOW = datetime(2026, 1, 2, 3, 4, 5)
TEXTS = ("", "a", "Grüße, 世界 🙂 <|im_end|> \n" * 500)
SAYS_NOTHING = "import time; time.sleep(600)"
ENDS = "import sys; sys.exit(3)"


@pytest.fixture(scope="module")
def options(smollm2_path: Path) -> TextOptions:
    return TextOptions(model=str(smollm2_path), vocab_size=49152, now=NOW)


@pytest.fixture(scope="module")
def local(options: TextOptions) -> LocalEncoder:
    tools = load_text_tools(options)
    return LocalEncoder(tools.tokenizer, tools.template)


@pytest.fixture(scope="module")
def launch(options: TextOptions) -> BulkLaunch:
    return bulk_launch(options, load_text_tools(options))


Started = Callable[[], list[psutil.Process]]


@pytest.fixture
def started() -> Iterator[Started]:
    """Processes that the test has started and that are there; none may be left at its end."""
    before = psutil.Process().children()

    def find() -> list[psutil.Process]:
        return [process for process in psutil.Process().children() if process not in before]

    yield find
    assert not find()


@pytest.fixture
def bulk(launch: BulkLaunch, started: Started) -> Iterator[BulkEncoder]:
    encoder = BulkEncoder(launch)
    yield encoder
    encoder.close()


def chat(*messages: tuple[str, str], generation: bool = True, continues: bool = False, **variables: str) -> ChatPrompt:
    return ChatPrompt(
        messages=tuple({"role": role, "content": content} for role, content in messages),
        add_generation_prompt=generation,
        continue_final_message=continues,
        variables=variables,
    )


def test_ids_are_those_of_the_edge(bulk: BulkEncoder, local: LocalEncoder, started: Started) -> None:
    bulk.start()
    chats = (
        chat(("user", "hi")),
        chat(("user", "<|im_end|> is text"), ("assistant", "so it is "), generation=False, continues=True),
        chat(*[("user", "hi there"), ("assistant", "世界")] * 500),
    )
    for conversation in chats:
        assert bulk.chat_ids(conversation) == local.chat_ids(conversation)
    for text in TEXTS:
        for add_special in (True, False):
            ids = bulk.text_ids(text, add_special=add_special)
            assert ids == local.text_ids(text, add_special=add_special)
    [process] = started()
    assert process.nice() == NICE


def test_refusals_are_those_of_the_edge(bulk: BulkEncoder, local: LocalEncoder) -> None:
    conversation = chat(("user", "hi"), date="today")
    refusals = []
    for encoder in (bulk, local):
        with pytest.raises(ApiError) as refused:
            encoder.chat_ids(conversation)
        refusals.append(refused.value.body())
    assert refusals[0] == refusals[1]
    assert refused.value.code == ErrorCode.UNSUPPORTED_FIELD


def test_a_process_that_died_meanwhile_is_replaced(bulk: BulkEncoder, started: Started) -> None:
    before = bulk.text_ids("mill", add_special=False)
    [process] = started()
    process.kill()
    psutil.wait_procs([process], timeout=10)
    assert bulk.text_ids("mill", add_special=False) == before


@pytest.mark.parametrize(
    ("code", "limit_s", "why"), [(ENDS, 60.0, "it ended|link broke"), (SAYS_NOTHING, 0.2, "no answer in 0.2 s")]
)
def test_a_process_that_is_lost_fails_its_job_alone(
    code: str, limit_s: float, why: str, launch: BulkLaunch, started: Started
) -> None:
    broken = BulkEncoder(replace(launch, command=(sys.executable, "-c", code), answer_limit_s=limit_s))
    for _ in range(2):
        with pytest.raises(ApiError, match=why) as refused:
            broken.text_ids("mill", add_special=False)
        assert (refused.value.code, refused.value.status) == (ErrorCode.INTERNAL, 500)
        assert not started()


def test_other_files_than_the_servers_are_noticed(launch: BulkLaunch, started: Started) -> None:
    other = BulkEncoder(replace(launch, content_hash="0" * 64))
    with pytest.raises(ApiError, match="other files"):
        other.text_ids("mill", add_special=False)
    assert not started()


def test_close_ends_the_wait_and_what_comes_later(launch: BulkLaunch, started: Started) -> None:
    encoder = BulkEncoder(replace(launch, command=(sys.executable, "-c", SAYS_NOTHING)))
    encoder.start()
    failures: list[ApiError] = []

    def ask() -> None:
        with pytest.raises(ApiError) as refused:
            encoder.text_ids("mill", add_special=False)
        failures.append(refused.value)

    waiting = threading.Thread(target=ask)
    waiting.start()
    time.sleep(0.1)  # It may not have begun to wait; then it finds the encoder closed.
    encoder.close()
    waiting.join(10)
    ask()
    assert [error.code for error in failures] == [ErrorCode.INTERNAL] * 2
    assert not started()


def test_it_ends_with_the_edge(launch: BulkLaunch, started: Started) -> None:
    """Also with one that was killed: nothing but the closed link tells it."""
    encoder = BulkEncoder(launch)
    encoder.text_ids("mill", add_special=False)
    assert encoder._process is not None
    encoder._process._connection.close()
    assert encoder._process._process.wait(10) == 0
    encoder.close()


class Recorder:
    """An encoder that notes what it is asked for."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def chat_ids(self, chat: ChatPrompt) -> list[int]:
        self.sizes.append(len(chat.messages))
        return [1]

    def text_ids(self, text: str, *, add_special: bool) -> list[int]:
        self.sizes.append(len(text))
        return [1]


async def test_only_long_prompts_go_there(options: TextOptions) -> None:
    tools, recorder = load_text_tools(options), Recorder()
    preparation = Preparation(tools.tokenizer, tools.template, max_prompt_bytes=1 << 20, bulk=recorder)
    try:
        for text in ("x" * BULK_BYTES, "y" * (BULK_BYTES + 1)):
            await preparation.token_ids(None, text)
        for count in (BULK_MESSAGES, BULK_MESSAGES + 1):
            await preparation.token_ids(chat(*[("user", "hi")] * count), None)
        await preparation.token_ids(chat(("user", "z" * (BULK_BYTES + 1))), None)
    finally:
        preparation.close()
    assert recorder.sizes == [BULK_BYTES + 1, BULK_MESSAGES + 1, 1]
