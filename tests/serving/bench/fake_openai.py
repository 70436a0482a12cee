"""An OpenAI-compatible server of known answers: ``python fake_openai.py PORT NAME STEP_MS [strict | die-after N]``.

A word or id of the prompt is a token; the n-th piece of an answer is "wN " by the prompt's length. strict: refuses
fields that OpenAI's API has not. die-after: ends with 7 in the answer after so many; 0: never.
"""

import json
import os
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

OPENAI = {
    "model", "prompt", "messages", "max_tokens", "max_completion_tokens", "temperature", "seed", "stream",
    "stream_options",
}  # fmt: skip


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    name = "fake"
    step_s = 0.001
    is_strict = False
    last = 0
    answered = 0

    def log_message(self, *_: Any) -> None:
        return

    def _send(self, status: int, value: object) -> None:
        raw = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def do_GET(self) -> None:
        if self.path in ("/health", "/readyz"):
            self._send(200, {})
        elif self.path == "/v1/models":
            self._send(200, {"data": [{"id": self.name}]})
        else:
            self._send(404, {})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.is_strict and (unknown := set(body) - OPENAI):
            self._send(400, {"error": {"code": f"unknown_{min(unknown)}"}})
            return
        Handler.answered += 1
        if Handler.answered > Handler.last > 0:
            os._exit(7)
        is_chat = self.path == "/v1/chat/completions"
        prompt = body["messages"][0]["content"] if is_chat else body["prompt"]
        length = len(prompt.split() if isinstance(prompt, str) else prompt)
        count = int(body.get("max_tokens") or body["max_completion_tokens"])
        if not body.get("ignore_eos"):
            count = min(count, 2)
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("connection", "close")
        self.end_headers()
        for number in range(count):
            time.sleep(self.step_s)
            text = f"w{length + number} "
            self._event({"choices": [{"delta": {"content": text}} if is_chat else {"text": text}]})
        self._event({"choices": [{"finish_reason": "length"}]})
        self._event({"choices": [], "usage": {"prompt_tokens": length, "completion_tokens": count}})
        self.wfile.write(b"data: [DONE]\n\n")
        self.close_connection = True

    def _event(self, value: object) -> None:
        self.wfile.write(f"data: {json.dumps(value)}\n\n".encode())
        self.wfile.flush()


def main() -> None:
    Handler.name, Handler.step_s, Handler.is_strict = sys.argv[2], float(sys.argv[3]) / 1000, "strict" in sys.argv[4:]
    if "die-after" in sys.argv:
        Handler.last = int(sys.argv[-1])
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()


if __name__ == "__main__":
    main()
