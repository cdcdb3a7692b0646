"""The process that renders templates: the text that transformers renders, within limits."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version
from tests.chat.conftest import TEMPLATES, build_tokenizer
from tests.prose import Prose

from hone.chat.chatml import PROBE_CONVERSATIONS
from hone.chat.jinja import Jinja
from hone.chat.jinja_process import JinjaProcesses, resident_bytes
from hone.chat.messages import Message
from hone.chat.template import ChatTemplate
from hone.errors import TemplateError, TemplateLimit

HI = {"messages": [{"role": "user", "content": "hi"}]}
MEBIBYTE = 1 << 20
ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"

FEATURES = {
    "tojson": "{{ messages | tojson(indent=2) }}{{ {'b': 1, 'a': '<\u00e9>'} | tojson(sort_keys=true) }}",
    "ascii": "{{ '\u00e9' | tojson(ensure_ascii=true) }}{{ [1, 2] | tojson(separators=(',', ':')) }}",
    "space": "  {% if true %}\n  x\n  {%- endif %}\n\n {{ 'a' }}\n",
    "loops": "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m }}{% break %}"
    "{% endfor %}",
    "namespace": "{% set n = namespace(x=1) %}{% for m in messages %}{% set n.x = n.x + 1 %}"
    "{% endfor %}{{ n.x }}{{ dict(a=1) }}{{ dict.fromkeys('ab', 2) }}",
    "underscore": "{% set n = namespace() %}{% set n._x = 1 %}",
    "escape": "{{ ''.__class__.__mro__ }}",
    "append": "{% set l = [] %}{% set _ = l.append(1) %}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "reasoning": "{% for m in messages %}{{ m.thinking }}|{{ m.reasoning_content }}{% endfor %}",
    "refusal": "{{ raise_exception('roles must alternate, not ' ~ messages[0].role) }}",
    "undefined": "{{ nothing }}{{ messages[0].nothing.deeper }}",
    "specials": "{{ bos_token }}{{ eos_token }}{{ unk_token }}{{ pad_token }}",
    "values": "{{ documents }}{{ tools }}{{ add_generation_prompt }}{{ tone }}{{ tools is none }}",
    "syntax": "{% for m in messages %}",
    "string + number": "{{ 'a' + 1 }}",
}


@pytest.fixture
def small() -> Iterator[JinjaProcesses]:
    processes = JinjaProcesses(time_s=0.2, memory_bytes=64 * MEBIBYTE)
    yield processes
    processes.close()


def rendered(own: Jinja, messages: list[Message], tools: list[dict[str, Any]]) -> str:
    try:
        return own.text(messages, tools, True)
    except TemplateError as error:
        return f"refused: {error.__cause__}"


def rendered_by_transformers(
    own: Jinja, messages: list[Message], tools: list[dict[str, Any]]
) -> str:
    from jinja2 import TemplateError as JinjaError

    try:
        return own.tokenizer.apply_chat_template(
            [message.plain() for message in messages],
            tools=tools or None,
            add_generation_prompt=True,
            tokenize=False,
            **own.kwargs,
        )
    except (JinjaError, TypeError) as error:
        return f"refused: {error}"


@pytest.mark.parametrize(
    "template",
    [*FEATURES.values(), *(file.read_text() for file in sorted(TEMPLATES.glob("*.jinja")))],
    ids=[*FEATURES, *(file.stem for file in sorted(TEMPLATES.glob("*.jinja")))],
)
@pytest.mark.skipif(
    Version(version("transformers")) < Version("5.22"),
    reason="older ones render some texts otherwise",
)
def test_a_template_renders_as_transformers_renders_it(template: str):
    tokenizer = build_tokenizer("smollm2-instruct", template)
    kwargs = {"tone": {"kind": [1, 2.5, None, "\u00e9"]}, "enable_thinking": False}
    used = {key: value for key, value in kwargs.items() if key in template}
    own = Jinja(tokenizer, used, date(2026, 1, 1))
    for messages, tools in PROBE_CONVERSATIONS:
        expected = rendered_by_transformers(own, messages, tools)
        assert rendered(own, messages, tools) == expected


@pytest.mark.parametrize(
    "template",
    [
        "{{ 'A' * 10**10 }}",  # built by Jinja's optimizer, when it compiles
        "{{ messages[0].content * 10**10 }}",
        "{{ '%10000000000d' % 1 }}",
        "{{ 'x' | center(10**10) }}",
        "{% set n = namespace(s='x' * 1000) %}{% for i in range(99) %}{% set n.s = n.s + n.s %}"
        "{% endfor %}",
    ],
)
def test_a_template_that_takes_too_much_memory_is_refused(
    prose: Prose, small: JinjaProcesses, template: str
):
    with pytest.raises(TemplateLimit) as caught:
        small.render(template, HI)
    prose(caught)
    assert small.render("{{ messages[0].content }}", HI) == "hi"


@pytest.mark.parametrize(
    "template",
    [
        ENDLESS,
        "{{ 9 ** (9 ** 9) }}",  # one operation, which no Python code can interrupt
    ],
)
def test_a_template_that_takes_too_long_is_ended(
    prose: Prose, small: JinjaProcesses, template: str
):
    with pytest.raises(TemplateLimit) as caught:
        small.render(template, HI)
    prose(caught)
    assert small.pids == []
    assert small.render("{{ messages[0].content }}", HI) == "hi"


def test_a_template_that_writes_too_much_is_refused_and_a_long_prompt_is_not(
    prose: Prose,
    small: JinjaProcesses,
):
    loop = "{% for i in range(9999) %}{{ 'A' * 999 }}{% endfor %}"
    with pytest.raises(TemplateLimit) as caught:
        small.render(loop, HI)
    prose(caught)
    long = {"messages": [{"role": "user", "content": "hi" * MEBIBYTE}]}
    assert small.render("{{ messages[0].content }}", long) == "hi" * MEBIBYTE


@pytest.mark.parametrize(
    "template", ["{{ 1 / 0 }}", "{{ range(10**9) | list }}", "{{ [1] | map | list }}"]
)
def test_any_error_of_a_template_is_a_refusal(small: JinjaProcesses, template: str):
    with pytest.raises(TemplateError) as refused:
        small.render(template, HI)
    assert not isinstance(refused.value, TemplateLimit) and str(refused.value)


def test_a_template_that_takes_too_long_is_refused_when_it_is_loaded_after_one_attempt(
    small: JinjaProcesses, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("hone.chat.jinja.PROCESSES", small)
    started: list[int] = []
    start = small._start
    monkeypatch.setattr(small, "_start", lambda: started.append(1) or start())
    tokenizer = build_tokenizer("smollm2-instruct", "{{ 9 ** (9 ** 9) }}")
    with pytest.raises(TemplateLimit):
        ChatTemplate.load(tokenizer)
    assert len(started) == 1


def test_all_templates_of_a_process_share_one_child_while_none_waits(small: JinjaProcesses):
    for i in range(5):
        assert small.render(f"{{{{ {i} }}}}", HI) == str(i)
    assert len(small.pids) == 1


def test_only_a_few_idle_processes_are_kept(small: JinjaProcesses, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("hone.chat.jinja_process.MAX_IDLE", 0)
    assert small.render("{{ 1 }}", {}) == "1" and small.pids == []


def test_a_process_that_is_killed_while_it_is_idle_is_replaced(small: JinjaProcesses):
    assert small.render("{{ 1 }}", {}) == "1"
    (pid,) = small.pids
    os.kill(pid, signal.SIGKILL)
    while _runs(pid):
        time.sleep(0.01)
    assert small.render("{{ 2 }}", {}) == "2" and pid not in small.pids


def test_nothing_is_imported_from_the_working_directory(
    small: JinjaProcesses, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "jinja2.py").write_text("raise SystemExit('the wrong one')")
    monkeypatch.chdir(tmp_path)
    assert small.render("{{ messages[0].content }}", HI) == "hi"


def test_where_the_system_does_not_limit_memory_the_parent_does(prose: Prose):
    assert MEBIBYTE < resident_bytes(os.getpid()) < 1 << 40
    watching = JinjaProcesses(time_s=60, memory_bytes=4 * MEBIBYTE, watch_memory=True)
    try:  # a loop takes no memory, so only the parent can find that the process has more than 4 MiB
        with pytest.raises(TemplateLimit) as caught:
            watching.render(ENDLESS, HI)
        prose(caught)
    finally:
        watching.close()


@pytest.mark.e2e
@pytest.mark.parametrize("template", ["x", "{{ 9 ** (9 ** 9) }}"], ids=["idle", "busy"])
def test_the_process_ends_when_its_parent_is_killed(template: str):
    program = (
        "import sys, threading, time\n"
        "from hone.chat.jinja_process import JinjaProcesses\n"
        "processes = JinjaProcesses(time_s=2)\n"
        "render = lambda: processes.render(sys.argv[1], {})\n"
        "threading.Thread(target=render, daemon=True).start()\n"
        "while not processes.pids: time.sleep(0.01)\n"
        "print(*processes.pids, flush=True)\n"
        "time.sleep(60)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, template], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        (child,) = map(int, parent.stdout.readline().split())
        parent.send_signal(signal.SIGKILL)
    for _ in range(600):
        if not _runs(child):
            return
        time.sleep(0.1)
    pytest.fail("the child still runs")


@pytest.mark.e2e
def test_a_forked_process_has_processes_of_its_own():
    program = (
        "import os, sys\n"
        "from hone.chat.jinja_process import PROCESSES\n"
        "PROCESSES.render('x', {})\n"
        "(before,) = PROCESSES.pids\n"
        "if os.fork() == 0:\n"
        "    sys.exit(PROCESSES.render('y', {}) != 'y' or before in PROCESSES.pids)\n"
        "assert os.wait()[1] == 0\n"
        "assert PROCESSES.render('z', {}) == 'z' and PROCESSES.pids == [before]\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def _runs(pid: int) -> bool:
    listed = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True)
    return listed.stdout.strip()[:1] not in ("", "Z")
