"""A server whose model has an endless chat template: it still stops, and leaves no process behind."""

import os
import signal
import subprocess
import threading
import time
from contextlib import suppress
from pathlib import Path

import httpx2
import psutil
from tests.chat.conftest import build_tokenizer
from tests.e2e.conftest import serving
from tests.patience import PATIENCE_S
from tests.server.conftest import write_model

ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


def renderers(server: int) -> list[psutil.Process]:
    """The server's processes that render templates."""
    children = psutil.Process(server).children()
    return [child for child in children if "hone.chat.jinja_child" in child.cmdline()]


def test_a_server_stops_while_a_template_renders_without_end(
    environment: dict[str, str], tmp_path: Path
):
    template = "{% if messages[0].content == 'slow' %}" + ENDLESS + "{% endif %}{{ messages }}"
    model = write_model(tmp_path / "model", build_tokenizer("smollm2-instruct", template))
    with serving(tmp_path / "root", environment) as server:
        url = f"http://127.0.0.1:{server.port}/v1/chat/completions"

        def ask(text: str) -> httpx2.Response:
            messages = [{"role": "user", "content": text}]
            body = {"model": str(model), "messages": messages, "max_tokens": 1}
            return httpx2.post(url, json=body, timeout=PATIENCE_S)

        assert ask("hi").status_code == 200
        (child,) = renderers(server.pid)
        used = sum(child.cpu_times()[:2])

        def ask_slow() -> None:
            with suppress(httpx2.HTTPError):  # the server stops meanwhile
                ask("slow")

        asking = threading.Thread(target=ask_slow)
        asking.start()
        while sum(child.cpu_times()[:2]) < used + 0.2:  # it renders
            time.sleep(0.05)
        os.kill(server.pid, signal.SIGTERM)
        asking.join(PATIENCE_S)
        psutil.wait_procs([child], timeout=PATIENCE_S)
        assert not child.is_running(), "the template still renders"
    ended = subprocess.run(["ps", "-p", str(server.pid)], capture_output=True)
    assert ended.returncode == 1, "the server still runs"
