"""The chat page in a real browser: against a scripted edge for every state, against a real server for a real reply."""

import re
from collections.abc import Iterator

import httpx
import pytest
from playwright.sync_api import Browser, Page, expect

from tests.e2e.browser import chromium
from tests.e2e.scripted_edge import HOSTILE, KEY, ScriptedEdge, scripted_edge
from tests.live import LiveServer


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def running_edge() -> Iterator[ScriptedEdge]:
    with scripted_edge() as edge:
        yield edge


@pytest.fixture
def edge(running_edge: ScriptedEdge) -> ScriptedEdge:
    running_edge.requests.clear()
    running_edge.needs_key = False
    return running_edge


@pytest.fixture
def open_page(browser: Browser) -> Iterator["OpenPage"]:
    """Opens pages and fails the test on any script error or policy violation."""
    opened = OpenPage(browser)
    yield opened
    opened.close()


class OpenPage:
    def __init__(self, browser: Browser) -> None:
        self._browser = browser
        self._problems: list[str] = []
        self._pages: list[Page] = []

    def __call__(self, url: str, *, width: int = 1000) -> Page:
        page = self._browser.new_page(viewport={"width": width, "height": 720})
        page.on("pageerror", lambda error: self._problems.append(str(error)))
        page.on("console", lambda message: self._problems.append(message.text) if message.type == "error" else None)
        self._pages.append(page)
        page.goto(url)
        return page

    def close(self) -> None:
        for page in self._pages:
            page.close()
        assert not self._problems


def say(page: Page, text: str) -> None:
    expect(page.get_by_role("button", name="Send")).to_be_enabled()
    page.get_by_label("Message", exact=True).fill(text)
    page.keyboard.press("Enter")


def test_a_conversation_keeps_its_turns_and_shows_its_times(open_page: OpenPage, edge: ScriptedEdge) -> None:
    page = open_page(edge.url)
    expect(page.get_by_role("status").first).to_have_text("connected")
    expect(page.locator("#model")).to_have_text("scripted")
    say(page, "hello")
    replies = page.locator('[data-role="assistant"]')
    expect(replies.locator(".text")).to_have_text("Reply to 1 messages")
    expect(replies.locator(".facts")).to_have_text(re.compile(r"first token \d+ ms.*tokens 3.*ended by itself"))
    say(page, "again")
    expect(replies.nth(1).locator(".text")).to_have_text("Reply to 3 messages")
    expect(replies.nth(1)).not_to_have_attribute("aria-busy", "true")
    assert edge.requests[1]["messages"] == [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "Reply to 1 messages"},
        {"role": "user", "content": "again"},
    ]
    page.get_by_role("button", name="New chat").click()
    say(page, "fresh")
    expect(replies.locator(".text")).to_have_text("Reply to 1 messages")


def test_settings_reach_the_request(open_page: OpenPage, edge: ScriptedEdge) -> None:
    page = open_page(edge.url)
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Temperature").fill("0")
    page.get_by_label("Longest reply").fill("7")
    page.get_by_label("System message").fill("Be brief.")
    say(page, "hello")
    expect(page.locator(".facts")).to_contain_text("ended by itself")
    assert edge.requests == [
        {
            "model": "scripted",
            "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello"}],
            "temperature": 0,
            "max_tokens": 7,
        }
    ]


def test_what_a_model_says_is_never_markup(open_page: OpenPage, edge: ScriptedEdge) -> None:
    page = open_page(edge.url)
    say(page, "hostile")
    reply = page.locator('[data-role="assistant"] .text')
    expect(page.locator(".facts")).to_contain_text("ended by itself")
    assert reply.evaluate("node => node.textContent") == HOSTILE
    assert page.locator("#log img, #log script").count() == 0
    assert page.title() == "Headrace"


def test_the_policy_stops_inline_scripts(browser: Browser, edge: ScriptedEdge) -> None:
    """Even if markup got in, the browser would not run it."""
    policy = httpx.get(edge.url).headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy
    page = browser.new_page()
    page.goto(edge.url)
    with page.expect_console_message(lambda message: "Content Security Policy" in message.text):
        page.evaluate("""document.body.innerHTML = '<img src="data:," onerror="document.title=1">'""")
    assert page.title() == "Headrace"
    page.close()


def test_stop_by_button_and_by_key(open_page: OpenPage, edge: ScriptedEdge) -> None:
    page = open_page(edge.url)
    facts = page.locator(".facts")
    say(page, "slow")
    expect(page.locator('[aria-busy="true"] .text')).to_have_text("Reply to ")
    page.get_by_role("button", name="Stop").click()
    expect(facts.nth(0)).to_contain_text("ended stopped")
    say(page, "slow")
    expect(page.locator('[aria-busy="true"] .text')).to_have_text("Reply to ")
    page.keyboard.press("Escape")
    expect(facts.nth(1)).to_contain_text("ended stopped")
    expect(page.get_by_role("button", name="Send")).to_be_enabled()


def test_an_error_is_shown_and_the_question_kept(open_page: OpenPage, edge: ScriptedEdge) -> None:
    page = open_page(edge.url)
    say(page, "fail")
    expect(page.get_by_role("alert")).to_have_text("the queue is full <b>")
    expect(page.get_by_label("Message", exact=True)).to_have_value("fail")


def test_a_lost_connection_ends_the_reply_and_comes_back(open_page: OpenPage, edge: ScriptedEdge) -> None:
    page = open_page(edge.url)
    say(page, "drop")
    expect(page.get_by_role("alert")).to_contain_text("Interrupted")
    expect(page.get_by_role("button", name="Send")).to_be_enabled()
    say(page, "hello")
    expect(page.locator(".facts").nth(1)).to_contain_text("ended by itself")


def test_a_server_with_keys_asks_for_one(open_page: OpenPage, edge: ScriptedEdge) -> None:
    edge.needs_key = True
    page = open_page(edge.url)
    expect(page.get_by_role("alert")).to_contain_text("wants a valid API key")
    expect(page.get_by_label("API key")).to_be_focused()
    page.keyboard.type(KEY)
    page.keyboard.press("Tab")
    expect(page.get_by_role("status").first).to_have_text("connected")
    assert KEY not in page.content()


def test_nothing_is_cut_off_on_a_phone(open_page: OpenPage, edge: ScriptedEdge) -> None:
    page = open_page(edge.url, width=360)
    page.get_by_role("button", name="Settings").click()
    say(page, "hostile")
    expect(page.locator(".facts")).to_contain_text("ended by itself")
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    for name in ("New chat", "Settings", "Send"):
        box = page.get_by_role("button", name=name).bounding_box()
        assert box is not None and box["x"] >= 0 and box["x"] + box["width"] <= 360


def test_an_unchanged_page_is_not_sent_again(edge: ScriptedEdge) -> None:
    first = httpx.get(edge.url)
    again = httpx.get(edge.url, headers={"if-none-match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert again.headers["content-security-policy"] == first.headers["content-security-policy"]


def test_a_real_reply_streams(open_page: OpenPage, live_server: LiveServer) -> None:
    page = open_page(live_server.url)
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Temperature").fill("0")
    say(page, "What is the capital of France?")
    expect(page.locator(".facts")).to_contain_text("ended by itself", timeout=60_000)
    expect(page.locator('[data-role="assistant"] .text')).to_have_text("The capital of France is Paris.")
    # Eight tokens may come in one message; a speed takes two.
    say(page, "Name ten cities of Europe.")
    expect(page.locator(".facts").last).to_contain_text(re.compile(r"speed [\d.]+ tokens/s.*ended"), timeout=60_000)
