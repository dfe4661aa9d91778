"""What the table of ``python -m tests.faults`` is made of: a test's mark names its attack, and each of its tries is counted."""

import pytest


class Attempt:
    """Counts the tries of one test. Call it before each, where there are several; the test ends at the first that fails."""

    def __init__(self):
        self.number = 0

    def __call__(self) -> None:
        self.number += 1


@pytest.fixture(name="attempt")
def count_of_tries() -> Attempt:
    return Attempt()


@pytest.fixture(autouse=True)
def named(request) -> None:
    assert request.node.get_closest_marker("attack"), "pytest.mark.attack(..) must name what this test tries"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call):
    report = yield
    mark = item.get_closest_marker("attack")
    if mark and (report.when == "call" or not report.passed):
        counted = item.funcargs.get("attempt")
        tried = 0 if report.skipped else max(1, counted.number) if counted else 1
        report.user_properties.append(("attack", (mark.args[0], tried, tried - report.failed)))
    return report
