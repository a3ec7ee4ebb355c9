"""A pytest option for `.ci/run`: a test may be skipped for want of a GPU and for no other reason."""

import pytest

OPTION = "--no-skips-but-gpu"
"""Fails the run if a test is skipped for any reason that does not name a GPU. `.ci/run` gives it."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(OPTION, action="store_true", help="fail if a test is skipped for another reason than a GPU")


def unwanted_skips(config: pytest.Config) -> list[str]:
    """Where and why tests were skipped, if not because of a GPU."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or not config.getoption(OPTION):  # a worker of pytest-xdist has no reporter of its own
        return []
    reasons = [(report.nodeid, report.longrepr[2]) for report in reporter.stats.get("skipped", ())]
    return [f"{where}: {reason}" for where, reason in reasons if "GPU" not in reason]


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if exitstatus == pytest.ExitCode.OK and unwanted_skips(session.config):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skipped = unwanted_skips(terminalreporter.config)
    if skipped:
        terminalreporter.section(f"skipped, which {OPTION} forbids", red=True)
        for line in skipped:
            terminalreporter.line(line)
