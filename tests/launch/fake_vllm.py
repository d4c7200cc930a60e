"""What vLLM's OpenAI-compatible server answers, without a model: for the tests of serve_check.

    python fake_vllm.py OPTIONS.json --port 8000 [--speculative-config '{...}'] ...

Prompts decide answers, and with ``pattern`` how many guesses each round accepts. ``OPTIONS`` order
faults; what they are stands where they are read. Needs nothing but Python.
"""

import json
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

CHARACTERS = ["\n", *(chr(code) for code in [*range(32, 127), *range(0xE0, 0xFD)])]
IDS = {letter: number for number, letter in enumerate(CHARACTERS, start=3)}
START, END = 1, 2  # <|im_start|> and <|im_end|>
LABELS = 'engine="0",model_name="fake"'


def spelt(text: str) -> list[int]:
    return [IDS[letter] for letter in text]


def rendered(messages: list[dict], writes: str) -> list[int]:
    """As the chat template of the tests' tiny tokenizer, with ``writes`` before the answer."""
    ids = []
    for message in messages:
        ids += [START, *spelt(f"{message['role']}\n{message['content']}"), END, *spelt("\n")]
    return [*ids, START, *spelt("assistant\n"), *spelt(writes)]


def answer_ids(prompt: list[int], tokens: int) -> list[int]:
    return [3 + (sum(prompt) * 31 + at * at * 7) % 100 for at in range(tokens)]


def rounds_of(prompt: list[int], tokens: int, pattern: list[int], n: int) -> list[int]:
    """Guesses accepted in each round; prefill gives the first token."""
    accepted, made = [], 1
    while made < tokens:
        accepted.append(min(pattern[(sum(prompt) + len(accepted)) % len(pattern)], n))
        made += accepted[-1] + 1
    return accepted


class State:
    def __init__(self, options: dict, n: int | None):
        self.options = options
        self.n = n  # guesses a round; None: it does not speculate
        self.generated = self.drafts = self.drafted = 0
        self.by_position = [0] * (n or 0)

    def count(self, prompt: list[int], tokens: int, by_chat: bool) -> None:
        options, n = self.options, self.n
        self.generated += tokens + options.get("foreign", 0)
        if n is None or options.get("stuck"):
            return
        pattern = options["pattern"]
        if by_chat:
            pattern = options.get("chat_pattern", pattern)
        if len(prompt) + tokens > options.get("far", 1 << 30):
            pattern = options["far_pattern"]
        rounds = rounds_of(prompt, tokens, pattern, n)
        if options.get("half"):  # every second round is made of plain steps
            rounds = rounds[::2]
        self.drafts += len(rounds)
        self.drafted += len(rounds) * options.get("guesses", n)
        for accepted in rounds:
            for position in range(accepted):
                self.by_position[position] += 1

    def metrics(self) -> str:
        spec = "vllm:spec_decode_num_"
        lines = ["# HELP vllm:generation_tokens_total Number of generation tokens processed."]
        if not self.options.get("uncounted"):
            lines.append(f"vllm:generation_tokens_total{{{LABELS}}} {float(self.generated)}")
        if self.n is not None:
            lines.append(f"{spec}drafts_total{{{LABELS}}} {float(self.drafts)}")
            lines.append(f"{spec}drafts_created{{{LABELS}}} 1.7e+09")
            lines.append(f"{spec}draft_tokens_total{{{LABELS}}} {float(self.drafted)}")
            accepted = float(sum(self.by_position))
            lines.append(f"{spec}accepted_tokens_total{{{LABELS}}} {accepted}")
            for at, value in enumerate(self.by_position):
                name = f"{spec}accepted_tokens_per_pos_total"
                lines.append(f'{name}{{{LABELS},position="{at}"}} {float(value)}')
        return "\n".join(lines) + "\n"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # head and body in one packet: two would wait 40 ms for each other
    state: State

    def log_message(self, *_: object) -> None:
        pass

    def reply(self, status: int, content: dict | str) -> None:
        data = (content if isinstance(content, str) else json.dumps(content)).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        options = self.state.options
        if self.path == "/health":
            self.reply(200, "")
        elif self.path == "/metrics":
            self.reply(200, self.state.metrics())
        elif self.path == "/v1/models":
            first = {"id": "fake", "root": options.get("root"), "max_model_len": 2048}
            first |= {"max_model_len": options.get("max_len", 2048)}
            self.reply(200, {"data": [first, {"id": "adapter"}]})
        else:
            self.reply(404, {"error": {"message": f"no such path {self.path}"}})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        options = self.state.options
        if options.get("refuses"):
            self.reply(500, {"error": {"message": "out of\nmemory"}})
        elif self.path == "/tokenize" and not options.get("tells_no_ids"):
            self.reply(200, {"tokens": self.render(body)})
        elif self.path == "/v1/completions":
            self.reply(200, self.completion(body, body["prompt"], False))
        elif self.path == "/v1/chat/completions":
            self.reply(200, self.completion(body, self.render(body), True))
        else:
            self.reply(404, {"error": {"message": f"no such path {self.path}"}})

    def render(self, body: dict) -> list[int]:
        """``thinks``: unless told not to. ``writes``: whatever it is told."""
        options = self.state.options
        given = body.get("chat_template_kwargs", {})
        thinks = options.get("thinks") and given.get("enable_thinking", True)
        return rendered(body["messages"], "<think>" if thinks else options.get("writes", ""))

    def completion(self, body: dict, prompt: list[int], by_chat: bool) -> dict:
        assert body["temperature"] == 0 and body["top_k"] == -1 and body["return_token_ids"]
        ids = answer_ids(prompt, body["max_tokens"])
        changes = self.state.options.get("changes")  # the token that the head changes
        if changes is not None and self.state.n is not None and len(ids) > 1:
            ids[changes] += 1
        self.state.count(prompt, len(ids), by_chat)
        choice: dict = {"token_ids": ids, "finish_reason": "length"}
        if body.get("logprobs"):
            assert body["return_tokens_as_token_ids"]
            # Of the tokens that ``changes`` confuses; the text before says which they are.
            assert prompt == self.state.options["before"]
            one = self.state.options["confused"]
            gap = self.state.options["gap"]
            named = {f"token_id:{one}": -0.5, f"token_id:{one + 1}": -0.5 - gap}
            choice["logprobs"] = {"top_logprobs": [named]}
        completion: dict = {"choices": [choice]}
        (completion if by_chat else choice)["prompt_token_ids"] = prompt
        return completion


class Server(ThreadingHTTPServer):
    daemon_threads = True


def made(options: dict, n: int | None, port: int = 0) -> Server:
    handler = type("Bound", (Handler,), {"state": State(options, n)})
    return Server(("127.0.0.1", port), handler)


def main() -> None:
    options = json.loads(Path(sys.argv[1]).read_text())
    words = sys.argv[2:]
    with Path(options["started"]).open("a") as log:
        log.write(json.dumps(words) + "\n")
    if "child" in options:  # as vLLM's engine core is one; it does not end when it is asked to
        stubborn = (
            "import os, signal, sys, time\n"
            "signal.signal(signal.SIGTERM, lambda *_: 0)\n"
            "print(os.getpid(), file=open(sys.argv[1], 'a'), flush=True)\n"
            "while 1: time.sleep(9)"
        )
        subprocess.Popen([sys.executable, "-c", stubborn, options["child"]])
    if "dies" in options:
        sys.exit(options["dies"])
    while options.get("silent"):
        time.sleep(1)
    speculative = None
    if "--speculative-config" in words:
        speculative = json.loads(words[words.index("--speculative-config") + 1])
    dtype = words[words.index("--dtype") + 1]
    about = f"model='m', dtype=torch.{dtype}, kv_cache_dtype=auto, quantization=None"
    sys.stdout.write(f"(EngineCore) Initializing a V1 LLM engine (v0) with config: {about}\n")
    sys.stdout.flush()
    port = int(words[words.index("--port") + 1])
    made(options, speculative and speculative["num_speculative_tokens"], port).serve_forever()


if __name__ == "__main__":
    main()
