"""A small OpenAI-compatible server for the tests, with faults on order. Needs nothing but Python.

    python chat_server.py '{"delay": 0.01, "faults": [{"match": "cat", "do": 500, "times": 2}]}'

Prints its port. An answer follows from the messages (and the seed, when sampled) alone; a token is
a character, as in the tests' tiny tokenizer. ``GET /stats`` tells what was asked and how many
requests were under way at once.
"""

import hashlib
import json
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

CHARACTERS = ["\n", *(chr(code) for code in [*range(32, 127), *range(0xE0, 0xFD)])]
IDS = {letter: number for number, letter in enumerate(CHARACTERS, start=3)}
START, END = 1, 2  # <|im_start|> and <|im_end|>


class State:
    def __init__(self, options: dict):
        self.options = options
        self.lock = threading.Lock()
        self.under_way = 0
        self.most = 0
        self.asked: list[dict] = []  # body, time, key
        self.tries: dict[str, int] = {}  # of each fault

    def fault(self, text: str) -> dict:
        """The first fault on order for this question that has not had its turns."""
        for number, fault in enumerate(self.options.get("faults", [])):
            if fault["match"] in text:
                with self.lock:
                    tried = self.tries.get(str(number), 0)
                    self.tries[str(number)] = tried + 1
                if tried < fault.get("times", 1 << 30):
                    return fault
        return {}


def spelt(text: str) -> list[int]:
    return [IDS[letter] for letter in text]


def prompt_ids(messages: list[dict]) -> list[int]:
    ids = []
    for message in messages:
        ids += [START, *spelt(f"{message['role']}\n{message['content']}"), END, *spelt("\n")]
    return [*ids, START, *spelt("assistant\n")]


def answer(body: dict, options: dict) -> dict:
    """The completion a faultless server gives."""
    draw = body["seed"] if body["temperature"] else None
    key = json.dumps([body["messages"], body.get("chat_template_kwargs"), draw])
    digest = hashlib.sha256(key.encode()).hexdigest()
    text = digest[: 4 + int(digest[0], 16)]
    cut = len(text) >= body["max_tokens"]
    text = text[: body["max_tokens"]]
    ids = spelt(text) + ([] if cut else [END])
    read = prompt_ids(body["messages"])
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": text},
        "finish_reason": "length" if cut else "stop",
    }
    usage = {"prompt_tokens": len(read), "completion_tokens": len(ids)}
    completion = {"object": "chat.completion", "choices": [choice], "usage": usage}
    if options.get("ids", True) and body.get("return_token_ids"):
        choice["token_ids"] = ids
        completion["prompt_token_ids"] = read
    return completion


def spoil(completion: dict, do: str) -> dict:
    choice = completion["choices"][0]
    if do == "shape":
        completion["choices"] = []
    elif do == "tool":
        call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
        choice |= {"finish_reason": "tool_calls"}
        choice["message"] |= {"content": None, "tool_calls": [call]}
    elif do == "empty":
        choice["message"]["content"] = " \n"
    elif do == "cut in thoughts":
        choice |= {"finish_reason": "length"}
        choice["message"] |= {"content": None, "reasoning": "let me see"}
    elif do == "thoughts":
        choice["message"]["reasoning"] = "deep"
        choice["token_ids"] = [*spelt("<think>deep</think>"), *choice["token_ids"]]
    elif do == "other ids":
        choice["token_ids"] = [END]
    elif do == "no end":
        choice["token_ids"].pop()
    elif do == "other prompt":
        completion["prompt_token_ids"][2] += 1
    elif do == "long prompt":
        completion["usage"]["prompt_tokens"] += 1
    else:
        choice["finish_reason"] = do
    return completion


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # head and body in one packet: two would wait 40 ms for each other
    state: State

    def log_message(self, *_: object) -> None:
        pass

    def reply(self, status: int, content: dict | str, headers: dict | None = None) -> None:
        data = (content if isinstance(content, str) else json.dumps(content)).encode()
        self.send_response(status)
        for name, value in {"Content-Length": len(data), **(headers or {})}.items():
            self.send_header(name, str(value))
        self.end_headers()
        self.wfile.write(data)

    def endless(self, part: bytes, pause: float) -> None:
        """A body that ends when the client hangs up."""
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        while True:
            self.wfile.write(b"%x\r\n%b\r\n" % (len(part), part))
            self.wfile.flush()
            time.sleep(pause)

    def do_GET(self) -> None:
        state = self.state
        if self.path == "/stats":
            self.reply(200, {"most": state.most, "asked": state.asked})
        elif self.path == "/v1/models":
            names = state.options.get("models", ["tiny"])
            self.reply(200, {"data": [{"id": name} for name in names]})
        else:
            self.reply(404, {"error": {"message": f"no such path {self.path}"}})

    def do_POST(self) -> None:
        state = self.state
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        key = self.headers.get("Authorization", "")
        with state.lock:
            state.under_way += 1
            state.most = max(state.most, state.under_way)
            state.asked.append({"body": body, "at": time.time(), "key": key})
        try:
            self.handle_chat(body, key)
        finally:
            with state.lock:
                state.under_way -= 1

    def handle_chat(self, body: dict, key: str) -> None:
        options = self.state.options
        time.sleep(options.get("delay", 0))
        if options.get("key") and key != f"Bearer {options['key']}":
            self.reply(401, {"error": {"message": "invalid\nkey"}})
            return
        fault = self.state.fault(body["messages"][-1]["content"])
        do = fault.get("do")
        if isinstance(do, int):
            self.reply(do, {"error": {"message": f"ordered {do}"}}, fault.get("headers"))
        elif do == "drop":
            self.close_connection = True
            self.connection.close()
        elif do == "garbage":
            self.reply(200, "<html>proxy</html>")
        elif do == "slow":
            time.sleep(fault["seconds"])
            self.reply(200, answer(body, options))
        elif do == "drip":
            self.endless(b" ", 0.1)
        elif do == "flood":
            self.endless(b" " * (1 << 18), 0)
        elif do == "raw":
            text = fault["body"] * fault.get("repeat", 1)
            self.reply(fault.get("status", 200), text, fault.get("headers"))
        elif do:
            self.reply(200, spoil(answer(body, options), do))
        else:
            self.reply(200, answer(body, options))


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients that hang up are part of the tests."""


if __name__ == "__main__":
    Handler.state = State(json.loads(sys.argv[1]))
    server = Server(("127.0.0.1", 0), Handler)
    print(server.server_address[1], flush=True)  # noqa: T201  how the tests learn the port
    server.serve_forever()
