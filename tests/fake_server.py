"""A vLLM server that is none: for faults, and for tests that look at when it was asked what."""

import json
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Fake:
    """A server on a free port that spoils answers by a `fault`: `times` of them, after the first `spared`.

    poison: only prompts that begin with this token.
    """

    def __init__(
        self,
        fault: str | None = None,
        times: int = 10**9,
        *,
        spared: int = 0,
        poison: int | None = None,
        delay: float = 0.0,
    ):
        self.fault, self.times, self.spared, self.poison, self.delay = fault, times, spared, poison, delay
        self.served: list[int] = []  # first tokens of the prompts that were answered well
        self.asked = Counter()
        self.tag = "default"  # of the weights, as a server that was just started says
        self.report = {"checksums": {}, "dtype": "float32", "shape": {}, "comparable": True}
        self.config = {"model_config": {"logprobs_mode": "processed_logprobs"}, "weight_transfer_config": None}
        self.authorisation: str | None = None
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *arguments):
                pass

            def do_GET(self):
                fake.asked[self.path] += 1
                answer = {"data": [{"id": "model"}], "weight_version": fake.tag, "vllm_config": fake.config}
                self._send(200, b"" if self.path == "/health" else json.dumps(answer).encode())

            def do_POST(self):
                fake.asked[self.path] += 1
                fake.authorisation = self.headers.get("Authorization")
                request = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or "{}")
                if self.path == "/v1/completions":
                    time.sleep(fake.delay)
                    fake.answer(self._send, request, fake.next_fault(request["prompt"][0]))
                elif self.path == fake.fault:
                    self._send(500, b"{}")
                else:
                    fake.tag = request.get("new_version", fake.tag)
                    self._send(*fake.rpc_answer())

            def _send(self, status, body, length=None):
                try:
                    self.send_response(status)
                    self.send_header("Content-Length", str(len(body) if length is None else length))
                    self.end_headers()
                    self.wfile.write(body)
                    if length is not None:
                        self.close_connection = True
                except OSError:
                    pass  # the client gave up waiting

        class Listener(ThreadingHTTPServer):
            request_queue_size = 128  # else connections that come together wait a second

            def handle_error(self, request, client_address):
                pass  # a client that went away

        self.server = Listener(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"

    def rpc_answer(self):
        if self.fault == "no extension":  # vLLM's own answer
            message = "Worker failed with error ''CPUWorker' object has no attribute 'dash_weight_report''"
            return 500, json.dumps({"error": {"message": message}}).encode()
        results = {"no worker": [], "no report": [{"checksums": {}}]}.get(self.fault, [self.report])
        return 200, json.dumps({"results": results, "success": True}).encode()

    def next_fault(self, first):
        if self.spared > 0 or self.times <= 0 or self.poison not in (None, first):
            self.spared -= 1
            return None
        self.times -= 1
        return self.fault

    def answer(self, send, request, fault):
        first, n = request["prompt"][0], request.get("n", 1)
        entries = [{str(token): {"logprob": -0.25 * token}} for token in request["prompt"]]
        choices = [
            {
                "index": i,
                "token_ids": [first, 100 + i],
                "logprobs": {"token_logprobs": [-0.5, -1.5]},
                "prompt_logprobs": [None, *entries[1:]],
                "finish_reason": "stop",
            }
            for i in reversed(range(n))  # their order is not promised
        ]
        for choice in choices:
            del choice["token_ids"][request["max_tokens"] :]
            del choice["logprobs"]["token_logprobs"][request["max_tokens"] :]
        if fault in ("500", "429", "400", "401"):
            return send(int(fault), b'{"error": "told to"}')
        if fault == "NaN":  # vLLM's own answer
            message = "Out of range float values are not JSON compliant: nan"
            return send(400, json.dumps({"error": {"message": message, "type": "BadRequestError"}}).encode())
        if fault == "hangs":
            time.sleep(30)
        if fault == "truncated JSON":
            return send(200, json.dumps({"choices": choices}).encode()[:-20])
        if fault == "breaks off":
            return send(200, json.dumps({"choices": choices}).encode()[:-20], length=100_000)
        if fault == "not JSON":
            return send(200, b"<html>proxy</html>")
        spoiled = choices[0]
        if fault == "too few choices":
            choices = choices[:-1]
        if fault == "too many choices":
            choices.append({**spoiled, "index": n})
        if fault == "null choice":
            choices[0] = None
        if fault == "null index":
            spoiled["index"] = None
        if fault == "written NaN":
            spoiled["logprobs"]["token_logprobs"][0] = float("nan")
            entries[1][str(request["prompt"][1])]["logprob"] = float("nan")
        if fault == "null":
            spoiled["logprobs"]["token_logprobs"][0] = None
            entries[1][str(request["prompt"][1])]["logprob"] = None
        if fault == "wrong token counts":
            spoiled["token_ids"].append(7)
            spoiled["prompt_logprobs"].append({"7": {"logprob": 0.0}})
        if fault == "too many tokens":
            spoiled["token_ids"] *= 5
            spoiled["logprobs"]["token_logprobs"] *= 5
        if fault == "aborted":
            spoiled["finish_reason"] = "abort"
        if fault is None:
            self.served.append(first)
        send(200, json.dumps({"choices": choices}).encode())

    def stop(self):
        self.server.shutdown()
        self.server.server_close()
