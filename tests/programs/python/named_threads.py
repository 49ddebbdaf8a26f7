# SPDX-License-Identifier: Apache-2.0
"""Threads whose objects keep their names in every way that CPython has. Prints the
names by tid; ends with its input."""

import sys
import threading

wait = threading.Event().wait


class Many(threading.Thread):
    """More attributes than the instances of a class share the keys of."""

    def __init__(self, name):
        super().__init__(target=wait, name=name, daemon=True)
        for number in range(60):
            setattr(self, f"attribute_{number}", number)


class Slots(threading.Thread):
    """Attributes before those of the base class, and some outside its dict."""

    __slots__ = ("first", "second")

    def __init__(self, name):
        self.before, self.first = 1, 2
        super().__init__(target=wait, name=name, daemon=True)


def plain(name=None):
    return threading.Thread(target=wait, name=name, daemon=True)


def main():
    threads = [plain(f"loader-{number}") for number in range(20)]
    threads += [plain(), Many("many"), Slots("slots"), plain("a\0b\n\x1b[31m"), plain("é" * 20)]
    threads += [plain("数据加载" * 20), plain("x" * 500), plain("🚀 to the moon" * 4)]
    replaced, looked_at = plain("replaced"), plain("looked at")
    replaced.__dict__ = dict(reversed(replaced.__dict__.items()))
    threads += [replaced, looked_at]
    for it in threads:
        it.start()
    vars(looked_at)
    for number in range(3000):  # an ended thread leaves a gap where it was
        threading._active[-number] = None
        if number % 2:
            del threading._active[-number]
    for number in range(0, 3000, 2):
        del threading._active[-number]
    print(ascii({it.native_id: it.name for it in threading.enumerate()}), flush=True)
    sys.stdin.read()


main()
