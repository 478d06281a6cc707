"""Ctrl-C between two steps of work."""

import signal
import threading

import pytest

from lit_collect.tools.interruption import Interruption


def interrupting(items):
    """Items, with a Ctrl-C while the second one is made."""
    for number, item in enumerate(items):
        if number == 1:
            signal.raise_signal(signal.SIGINT)
        yield item


def test_the_item_that_is_being_made_is_the_last(capfd):
    before = signal.getsignal(signal.SIGINT)
    with Interruption() as interruption:
        assert list(interruption.until_noted(interrupting("abc"))) == ["a", "b"]
        assert interruption.noted
    assert signal.getsignal(signal.SIGINT) is before
    assert "Ctrl-C again to stop at once" in capfd.readouterr().err


def test_the_second_one_interrupts_at_once():
    before = signal.getsignal(signal.SIGINT)
    with Interruption() as interruption:
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert interruption.noted
    assert signal.getsignal(signal.SIGINT) is before


def test_a_signal_that_is_ignored_stays_so():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Interruption() as interruption:
            signal.raise_signal(signal.SIGINT)
        assert not interruption.noted
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_other_threads_change_nothing():
    before, found = signal.getsignal(signal.SIGINT), []

    def enter():
        with Interruption() as interruption:
            found.extend(interruption.until_noted(iter("ab")))
            found.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert found == ["a", "b", before]
