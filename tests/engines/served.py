"""A server in a process of its own, one request to it, and a tokenizer for tiny models: words w0, w1, .."""

import json
import socket
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest


def answer(command: list, environment: dict, log: Path, path: str, body: dict) -> dict:
    """What the server `command --port PORT` answers to one request, sent when it listens. A server that ends, or that
    answers with an error, shows its log."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    url, sort = f"http://localhost:{port}{path}", {"Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), sort)
    with log.open("w") as to:
        server = subprocess.Popen([*command, "--port", str(port)], env=environment, stdout=to, stderr=to)
        with server:
            try:
                while server.poll() is None:
                    try:
                        with urllib.request.urlopen(request, timeout=600) as got:
                            return json.loads(got.read())
                    except urllib.error.HTTPError as why:
                        pytest.fail(f"{why}: {why.read()[-2000:]!r}\n{log.read_text()[-4000:]}")
                    except urllib.error.URLError:  # the server does not listen yet
                        time.sleep(1)
            finally:
                server.terminate()
    pytest.fail(f"the server ended with {server.returncode}:\n{log.read_text()[-6000:]}")


def tokenizer(words: int):
    """The chat template is the content alone."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    plain = Tokenizer(models.WordLevel({f"w{n}": n for n in range(words)}, unk_token="w0"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    made = PreTrainedTokenizerFast(tokenizer_object=plain, unk_token="w0", pad_token="w0")
    made.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    return made
