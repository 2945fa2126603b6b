"""`make pictures`: the pictures of the live view in docs/pictures, taken anew from a Manta on a machine at rest.

    playground.png   a prompt painted by what was reused of it, before anybody else asks
    why.png          that request explained
    live_view.png    the page while some users chat
    killed.gif       the river while a replica is killed: its requests go on in another lane
    fetched.png      the river after users came at once with a prefix that one replica had: others fetched it
"""

import base64
import contextlib
import io
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count, pairwise
from pathlib import Path
from threading import Event

from PIL import Image
from selenium.webdriver.common.keys import Keys

from deployments.places import ROOT
from deployments.settings.constants import EXPERIMENTS_VARIABLE
from tests.browser.chromium import Page, open_chromium
from tests.serve.running import HTTP, Running, serving
from tests.serve.test_serve_fetches import burst
from tests.waiting import until

FOLDER = ROOT / "docs" / "pictures"
MOST_BYTES, MOST_MOVING_BYTES = 300_000, 1_500_000
MOST_LOAD = 1.0  # of the machine, before a picture is taken: beside other work its figures would be of that
USERS = 3
LOAD_S = 40.0  # until there is something to see
FRAME_S, BEFORE_S, AFTER_S = 0.5, 4.0, 20.0  # of the moving picture, around the kill
ANSWER_S = 90.0  # at most, of the playground
GAP = 12  # px
TOPICS = ("harbours", "winters", "letters", "engines")
QUESTIONS = ("Who was first?", "What came of it?", "Tell it shorter.", "And in other countries?")
STORY = (
    "The harbour had been quiet for most of the winter. Then, in the first week of March, a grey ship came in on the "
    "morning tide, flying no flag, and nobody on the quay could say whose it was. "
) * 4

PLACE = """const at = document.querySelector(arguments[0]).getBoundingClientRect();
return [at.left, at.top, at.right, at.bottom].map(Math.round)"""


class Load:
    """Users who each hold a conversation under one of a few system prompts, until `stop`."""

    def __init__(self, url: str, users: int) -> None:
        self._url = url
        self._over = Event()
        self._names = count(1)
        self._pool = ThreadPoolExecutor(users)
        self._users = [self._pool.submit(self._talk, number) for number in range(users)]

    def stop(self) -> None:
        self._over.set()
        for user in self._users:
            user.result()
        self._pool.shutdown()

    def _talk(self, user: int) -> None:
        round_ = 0
        while not self._over.wait(0.7 * user):  # they do not all begin at once
            topic = TOPICS[(user + round_) % len(TOPICS)]
            system = f"You are a patient teller of stories about {topic}, and you never hurry. " * (8 + 4 * (user % 3))
            messages = [{"role": "system", "content": system}]
            for question in QUESTIONS[: 2 + user % 3]:
                if not self._over.is_set():
                    messages.append({"role": "user", "content": f"({user}, {round_}) {question}"})
                    messages.append({"role": "assistant", "content": self._ask(messages, 24 + 16 * (user % 4))})
            round_ += 1

    def _ask(self, messages: list[dict[str, str]], most: int) -> str:
        body = {"messages": messages, "max_tokens": most, "temperature": 0.7, "ignore_eos": True}
        headers = {"X-Request-Id": f"chat-{next(self._names)}"}
        answer = HTTP.post(f"{self._url}/v1/chat/completions", json=body, headers=headers, timeout=120)
        return str(answer.raise_for_status().json()["choices"][0]["message"]["content"])


@contextmanager
def loaded(app: Running, users: int) -> Iterator[None]:
    """Users of ``app``, with some history."""
    load = Load(app.url, users)
    try:
        Event().wait(LOAD_S)
        yield
    finally:
        load.stop()


def check_rest() -> None:
    """Exit where the machine does other work."""
    if (load := os.getloadavg()[0]) > MOST_LOAD:
        sys.exit(f"the load of this machine is {load:.1f}; pictures are taken at {MOST_LOAD:g} or less. Try later")


def main() -> int:
    """Take the pictures; returns the exit code."""
    check_rest()
    with tempfile.TemporaryDirectory(prefix="manta-pictures-") as name:
        page = open_chromium(Path(name) / "chromium")
        try:
            take(page, Path(name) / "app")
            take_fetched(page, Path(name) / "fetches")
        except BaseException:
            page.picture("pictures_failed")
            raise
        finally:
            page.close()
    for path in sorted(each for each in FOLDER.iterdir() if each.suffix in (".png", ".gif")):
        most = MOST_MOVING_BYTES if path.suffix == ".gif" else MOST_BYTES
        print(f"{path.relative_to(ROOT)}: {path.stat().st_size / 1000:.0f} kB")
        assert path.stat().st_size < most, f"{path} is larger than {most} bytes"
    return 0


def take(page: Page, folder: Path) -> None:
    """Of three replicas, one of which is killed."""
    replicas = {"count": 3, "cpus": 0.5, "health_period_s": 1}
    folder.mkdir()
    with serving(folder, observatory=True, replicas=replicas, cache={"max_total_tokens": 6_000}) as app:
        page.open(f"{app.url}/manta/#tab=try", width=1440, height=1000)
        page.one(".play-settings summary").click()
        page.one(".play-settings input[type=number]").send_keys(Keys.BACKSPACE * 4 + "48")
        page.one(".play-settings summary").click()
        type_and_send(page, f"{STORY}Who came?")
        type_and_send(page, "What did they want?")
        page.resize(1440, 1600)
        keep(shot(page, "#side"), "playground")
        page.one("#requests tbody [data-rid]").click()
        page.one("#pane-why .sentence, #pane-why .why-sentence")
        keep(shot(page, "#side"), "why")
        with loaded(app, USERS):
            page.open(f"{app.url}/manta/#tab=why", width=1440, height=1000)
            page.one("#river canvas")
            Event().wait(3)
            keep(shot(page), "live_view")
            page.open(f"{app.url}/manta/#tab=why", width=1024, height=1600, theme="dark")
            page.one("#river canvas")
            save_moving(list(moving(page, app)), FOLDER / "killed.gif")


def take_fetched(page: Page, folder: Path) -> None:
    """Of two replicas that fetch."""
    folder.mkdir()
    with serving(folder, observatory=True, environment={EXPERIMENTS_VARIABLE: "1"}, replicas={"count": 2, "cpus": 1},
                 cache={"max_total_tokens": 24_000}, transfer={"fetch": "auto"}) as app:  # fmt: skip
        burst(app)  # the second one finds replicas that have measured themselves
        page.open(f"{app.url}/manta/#tab=why", width=1440, height=1400)
        page.one("#river canvas")
        next(each for each in page.all("#river button") if each.text == "10 s").click()
        burst(app)
        Event().wait(1)
        keep(shot(page, "#river"), "fetched")


def type_and_send(page: Page, text: str) -> None:
    """A turn in the playground, and the whole answer to it."""
    box = page.one("#play-text")
    before = len(page.all("#side .turn-figures"))
    box.send_keys(text)
    Event().wait(1.5)  # where it would go is asked for meanwhile
    page.one("button.play-send.primary").click()
    page.until(lambda: len(page.all("#side .turn-figures")) > before, "an answer")
    until(lambda: page.all("button.play-send.primary"), ANSWER_S)
    Event().wait(1.5)


def shot(page: Page, *selectors: str) -> Image.Image:
    """What is on the screen, or these parts of it, one below the other."""
    taken = page.command("Page.captureScreenshot", format="png", optimizeForSpeed=True)
    screen = Image.open(io.BytesIO(base64.b64decode(taken["data"]))).convert("RGB")
    parts = [screen.crop(tuple(page.js(PLACE, selector))) for selector in selectors]
    if len(parts) < 2:
        return parts[0] if parts else screen
    size = max(part.width for part in parts), sum(part.height for part in parts) + GAP * (len(parts) - 1)
    whole = Image.new("RGB", size, screen.getpixel((2, screen.height - 2)))  # the page's ground
    top = 0
    for part in parts:
        whole.paste(part, (0, top))
        top += part.height + GAP
    return whole


def keep(picture: Image.Image, name: str) -> None:
    picture.quantize(256, method=Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE).save(
        FOLDER / f"{name}.png", optimize=True
    )


def moving(page: Page, app: Running) -> Iterator[tuple[float, Image.Image]]:
    """Frames with their times, in s from the first; the busiest replica is killed after BEFORE_S."""
    started_s = time.monotonic()
    killed = False
    while (at_s := time.monotonic() - started_s) < BEFORE_S + AFTER_S:
        if not killed and at_s >= BEFORE_S:
            os.kill(busiest(app), signal.SIGKILL)
            killed = True
        yield at_s, shot(page, ".health", "#river")
        Event().wait(max(0.0, at_s + FRAME_S - (time.monotonic() - started_s)))


def busiest(app: Running) -> int:
    """The process of the replica that runs most requests."""
    state = max(app.states(), key=lambda each: int(each["stats"]["num_running"]))
    return int(state["replica"]["pid"])


def save_moving(frames: list[tuple[float, Image.Image]], path: Path) -> None:
    """One palette for all, made of the first, the last and one in the middle: colours do not flicker."""
    height = max(image.height for _, image in frames)
    sheet = Image.new("RGB", (frames[0][1].width, 3 * height))
    for row, (_, image) in enumerate((frames[0], frames[len(frames) // 2], frames[-1])):
        sheet.paste(image, (0, row * height))
    palette = sheet.quantize(96, method=Image.Quantize.MEDIANCUT)
    size, ground = (sheet.width, height), frames[0][1].getpixel((0, 0))  # a lane more makes a frame higher
    even = [Image.new("RGB", size, ground) for _ in frames]
    for (_, image), whole in zip(frames, even, strict=True):
        whole.paste(image, (0, 0))
    images = [image.quantize(palette=palette, dither=Image.Dither.NONE) for image in even]
    times_s = [at_s for at_s, _ in frames] + [frames[-1][0] + 2.0]  # the last one stays
    durations = [int(1000 * (after - at)) for at, after in pairwise(times_s)]
    images[0].save(path, save_all=True, append_images=images[1:], duration=durations, loop=0, optimize=True)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main())
