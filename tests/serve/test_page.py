"""The page in a real browser, by keyboard alone."""

from collections.abc import Iterator

import pytest

from redrafter.serve.model import Served
from tests.helpers import browser as chromium
from tests.helpers.serving import make_served, plain, running

PROGRAM = chromium.find()
pytestmark = pytest.mark.skipif(PROGRAM is None, reason="no Chromium here: apt-get install chromium")


@pytest.fixture(scope="module")
def served() -> Served:
    return make_served()


@pytest.fixture(scope="module")
def browser() -> Iterator[chromium.Browser]:
    assert PROGRAM is not None
    with chromium.browsing(PROGRAM) as made:
        yield made


@pytest.fixture
def page(browser: chromium.Browser) -> Iterator[chromium.Browser]:
    with running(make_served()) as url:
        browser.log.clear()
        browser.open(url)
        browser.until("model === 'letters'")
        browser.run("for (const [id, v] of [['temperature', 1], ['seed', 5], ['most', 40]]) at(id).value = v")
        browser.run("at('say').focus()")
        yield browser
        away = [line for line in browser.log if line.startswith("request") and url not in line and "data:" not in line]
        assert away == [], "the page works without any other host"
        assert [line for line in browser.log if line.startswith("error")] == []


def ask(page: chromium.Browser, text: str, lanes: int = 1) -> None:
    page.type(text)
    page.press("Enter")
    page.until(f"document.querySelectorAll('.lane').length >= {lanes} && at('stop').disabled && !at('say').value")


def written(served: Served, text: str) -> str:
    messages = [{"role": "user", "content": text}]
    return plain(served).generate([messages], max_new_tokens=40, temperature=1.0, seed=5)[0].text


def lane(mode: str) -> str:
    return f"document.querySelector('.lane[data-mode={mode}]')"


def test_a_chat_by_keyboard_with_coloured_tokens_and_a_tree(page: chromium.Browser, served: Served) -> None:
    ask(page, "hello")
    assert page.run(f"{lane('speculative')}.querySelector('.text').textContent") == written(served, "hello")
    assert page.run("document.querySelectorAll('.text .d').length") > 0
    assert page.run("document.querySelectorAll('.text .t').length") > 0
    assert page.run("getComputedStyle(document.querySelector('.d')).color") != page.run(
        "getComputedStyle(document.querySelector('.t')).color"
    )
    assert page.run("document.querySelectorAll('.tree rect').length") == 10
    assert page.run("document.querySelectorAll('.tree g.on').length") >= 1
    assert "guesses" in page.run("document.querySelector('.tree svg').getAttribute('aria-label')")
    assert float(page.run("document.querySelector('.rate').textContent")) > 0
    assert float(page.run("document.querySelector('.each').textContent")) > 1
    assert page.run("document.activeElement.id") == "say", "ready for the next turn"
    ask(page, "more", lanes=2)
    assert page.run("talk.length") == 4


def test_a_race_writes_the_same_text_twice(page: chromium.Browser, served: Served) -> None:
    page.run("at('mode').value = 'race'")
    page.run(
        "{ const usual = answer; turns = []; answer = async (...given) => "
        "{ turns.push('begins'); await usual(...given); turns.push('ends'); }; }"
    )
    ask(page, "race", lanes=2)
    assert page.run("turns") == ["begins", "ends"] * 2, "rows share steps: plain decoding would wait for guesses"
    texts = page.run("[...document.querySelectorAll('.lane .text')].map(x => x.textContent)")
    assert texts == [written(served, "race")] * 2
    assert page.run(f"{lane('plain')}.querySelectorAll('.d').length") == 0
    assert page.run(f"{lane('plain')}.querySelectorAll('.tree rect').length") == 0
    assert float(page.run(f"{lane('plain')}.querySelector('.each').textContent")) == 1
    assert "the same text" in page.run("document.querySelector('.verdict').textContent")
    left, right = page.run("[...document.querySelectorAll('.lane')].map(x => x.getBoundingClientRect().left)")
    assert left != right, "side by side"


def test_escape_stops_and_shift_enter_breaks_the_line(page: chromium.Browser) -> None:
    page.type("one")
    page.press("Enter", shift=True)
    page.type("two")
    assert page.run("at('say').value") == "one\ntwo"
    page.run("at('most').value = 60; at('say').value = 'x'")
    page.press("Enter")
    page.until("stops.length > 0")
    page.press("Escape")
    page.until("at('stop').disabled")
    assert page.run("document.querySelector('.error')?.textContent ?? 'ended'") in ("stopped", "ended")
    assert page.run("document.querySelector('main').children.length") == 2


def test_every_control_is_reached_by_tab_and_has_a_name(page: chromium.Browser) -> None:
    wanted = page.run("[...document.querySelectorAll('input, select, textarea, button:not(:disabled)')].length")
    reached = set()
    for _ in range(wanted + 3):
        page.press("Tab")
        reached.add(page.run("document.activeElement.id || document.activeElement.textContent"))
    names = page.run("[...document.querySelectorAll('input, select, textarea')].map(x => x.id)")
    assert {*names, "Send", "clear"} <= reached
    unnamed = page.run(
        "[...document.querySelectorAll('input, select, textarea')]"
        ".filter(x => !x.labels?.length && !x.ariaLabel).map(x => x.id)"
    )
    assert unnamed == []


def test_markup_in_a_text_stays_text(page: chromium.Browser) -> None:
    ask(page, "<img src=x onerror=alert(1)>")
    assert page.run("document.querySelectorAll('img').length") == 0
    assert page.run("document.querySelector('.said').textContent") == "<img src=x onerror=alert(1)>"


def test_an_error_is_shown(page: chromium.Browser) -> None:
    page.run("at('most').value = 4000")
    page.type("a")
    page.press("Enter")
    page.until("!!document.querySelector('.error')")
    assert "max_tokens is 4000" in page.run("document.querySelector('.error').textContent")
    page.log[:] = [line for line in page.log if "400 (Bad Request)" not in line]
