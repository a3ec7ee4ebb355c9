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


NEVER = """{
    const usual = fetch, never = signal => new ReadableStream({start(out) {
        signal.addEventListener("abort", () => out.error(signal.reason));
    }});
    fetch = async (path, how) => path === "/v1/models" ? usual(path, how) : new Response(never(how.signal));
}"""
"""An answer of which no token comes until it is stopped."""


@pytest.mark.parametrize("how", ["Escape", "click"])
def test_an_answer_is_stopped(page: chromium.Browser, how: str) -> None:
    page.run(NEVER)
    page.run("document.querySelector('.examples button').click()")
    page.until("!at('stop').disabled && document.querySelectorAll('.lane').length === 2")
    if how == "Escape":
        page.press("Escape")
    else:
        page.run("at('stop').click()")
    page.until("at('stop').disabled")
    assert page.run("[...document.querySelectorAll('.error')].map(x => x.textContent)") == ["stopped"]
    assert page.run("at('status').textContent") == "the answer was not finished"
    assert page.run("talk.length") == 0, "the next question does not follow half an answer"


def test_shift_enter_breaks_the_line(page: chromium.Browser) -> None:
    page.type("one")
    page.press("Enter", shift=True)
    page.type("two")
    assert page.run("at('say').value") == "one\ntwo"


def test_first_sight_offers_a_race(page: chromium.Browser, served: Served) -> None:
    assert page.run("document.querySelectorAll('.examples button').length") == 3
    assert page.run("at('more').open") is False, "options are folded away"
    page.run("document.querySelectorAll('.examples button')[2].focus()")
    page.press("Enter")
    page.until("!!document.querySelector('.verdict') && at('stop').disabled")
    texts = page.run("[...document.querySelectorAll('.lane .text')].map(x => x.textContent)")
    assert texts == [written(served, page.run("document.querySelector('.said').textContent"))] * 2
    assert page.run("at('status').textContent") == page.run("document.querySelector('.verdict').textContent")
    assert page.run("!!at('intro')") is False
    page.run("at('clear').click()")
    assert page.run("!!at('intro') && document.querySelectorAll('.lane').length === 0")


def test_the_slider_shows_every_step_again(page: chromium.Browser) -> None:
    ask(page, "hello")
    count = int(page.run("document.querySelector('.replay input').max"))
    assert count > 3
    page.run("document.querySelector('.replay input').focus()")
    page.press("Home")
    line = "document.querySelector('.about').textContent"
    page.until(f"{line}.startsWith('Step 1 of {count}: 9 guesses, ')")
    assert page.run("document.querySelector('.replay input').getAttribute('aria-valuetext')") == page.run(line)
    kept = 0
    for number in range(1, count + 1):
        page.until(f"{line}.startsWith('Step {number} of {count}: ')")
        kept += page.run("document.querySelectorAll('.tree g.on').length") - 1  # without the root
        later = page.run("document.querySelectorAll('.text .later').length")
        assert (later > 0) == (number < count), "what came later is faint"
        assert " 0.0 ms for" not in page.run(line), "each step has its own time"
        page.press("ArrowRight")
    assert kept >= page.run("document.querySelectorAll('.text .d').length") > 0, "the last step may be cut"


def test_what_a_step_cost_and_what_was_expected_of_it(page: chromium.Browser) -> None:
    step = "{tree: {tokens: ['a', 'b', 'c'], path: [0, 1]}, expected: 1.26, tokens: 2, took: 30}"
    assert page.run(f"about({step}, 2, 9, 20)") == (
        "Step 2 of 9: 2 guesses, 1 kept (the planner expected 1.3). 30.0 ms for 2 tokens, 15.0 ms each; "
        "plain decoding took 20.0 ms a token."
    )


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [360, 1200])
def test_nothing_is_cut_and_colours_are_readable(page: chromium.Browser, width: int, dark: bool) -> None:
    with page.shown_as(width, dark):
        page.run("at('mode').value = 'race'; at('more').open = true")
        ask(page, "race", lanes=2)
        page.until("!!document.querySelector('.replay')")
        assert page.run("document.documentElement.scrollWidth") <= width
        tall = page.run("at('talk').getBoundingClientRect().height")
        assert tall > 100, "options do not push the answer away"
        assert page.run("at('say').getBoundingClientRect().width") > 0.5 * width
        lefts = page.run("[...document.querySelectorAll('.lane')].map(x => x.getBoundingClientRect().left)")
        assert (lefts[0] == lefts[1]) == (width == 360)
        for kind, back in ((".d", ".d"), (".lane .t", ".lane"), (".about", "body"), (".said", "body")):
            assert contrast(page, kind, back) > 4.5, kind


def contrast(page: chromium.Browser, text: str, back: str) -> float:
    """Of a text's colour and of what is behind it, as the accessibility guidelines define it."""
    bright = []
    for where, which in ((text, "color"), (back, "backgroundColor")):
        colour = page.run(f"getComputedStyle(document.querySelector('{where}')).{which}.match(/\\d+/g).map(Number)")
        parts = [c / 255 / 12.92 if c <= 10 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in colour]
        bright.append(0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2])
    return (max(bright) + 0.05) / (min(bright) + 0.05)


def test_every_control_is_reached_by_tab_and_has_a_name(page: chromium.Browser) -> None:
    page.press("Tab")
    page.press("Tab")
    assert page.run("document.activeElement.tagName") == "SUMMARY", "behind the button that sends"
    page.press("Enter")
    wanted = page.run("[...document.querySelectorAll('input, select, textarea, button:not(:disabled)')].length")
    reached = set()
    for _ in range(wanted + 4):
        page.press("Tab")
        reached.add(page.run("document.activeElement.id || document.activeElement.textContent.trim().split('\\n')[0]"))
    names = page.run("[...document.querySelectorAll('input, select, textarea')].map(x => x.id)")
    assert {*names, "Send", "clear", "talk", "Write a function"} <= reached
    unnamed = page.run(
        "[...document.querySelectorAll('input, select, textarea')]"
        ".filter(x => !x.labels?.length && !x.ariaLabel).map(x => x.id)"
    )
    assert unnamed == []
    assert page.run("at('status').getAttribute('role')") == "status", "what happened is said once, not token by token"
    assert page.run("at('talk').getAttribute('aria-live')") is None


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
