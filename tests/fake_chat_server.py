"""A chat server without a model, for the tests of the benchmark: ``fake_chat_server.py PORT [SECONDS BETWEEN TOKENS]``.

Each answer has ``max_tokens`` tokens, two in every event. The prompt's last word chooses what goes wrong: ``status``,
``error`` (in the middle of the stream), ``no-usage``, ``hang``, ``exit`` (of the server).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

PAUSE = float(sys.argv[2]) if len(sys.argv) > 2 else 0.002
CHILD = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
"""Servers have workers, which must not outlive them."""


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *words: Any) -> None:
        pass

    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/ready" else 404)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        wish, tokens = body["messages"][0]["content"].split()[-1], body["max_tokens"]
        self.send_response(422 if wish == "status" else 200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        if wish == "status":
            self.wfile.write(b'{"detail": "field refused"}')
            return
        self.send({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
        for n in range(0, tokens, 2):
            time.sleep(PAUSE)
            self.send({"choices": [{"index": 0, "delta": {"content": f"words {n}"}}]})
            if wish == "error":
                self.send({"error": {"message": "out of pages", "type": "server_error"}})
                return
            if wish == "hang":
                time.sleep(600)
            if wish == "exit":
                print("Segmentation something", flush=True)
                os._exit(3)
        last: dict[str, Any] = {"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]}
        if wish != "no-usage":
            last["usage"] = {"prompt_tokens": 5, "completion_tokens": tokens, "total_tokens": tokens + 5}
        self.send(last)
        self.wfile.write(b"data: [DONE]\n\n")

    def send(self, chunk: dict[str, Any]) -> None:
        self.wfile.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")


if __name__ == "__main__":
    print(f"child {CHILD.pid}", flush=True)
    server = ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler)
    server.daemon_threads = True
    server.serve_forever()
