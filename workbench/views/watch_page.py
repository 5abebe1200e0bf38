"""`WatchServer`: a page on this machine that follows a study while it is written, and survives its kernel, its page and an ssh connection."""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock, Thread
from urllib.parse import parse_qs, urlsplit

from workbench.errors import WorkbenchError
from workbench.findings.diagnosis import verdict_table
from workbench.playbook import diagnosis_of
from workbench.record.folder import is_locked, last_change
from workbench.record.read import StudyRecord, open_record
from workbench.report.templates import page_css, render, table
from workbench.report.write import draw_figure, trial_rows
from workbench.topics.registry import FIGURES, STUDIES
from workbench.views.curves import CSS, SCRIPT, plain
from workbench.views.study_curves import StudyCurves
from workbench.views.summary import study_sentence

LOOPBACK = "127.0.0.1"
_COLUMNS = ("trial", "stage", "state", "peak_lr", "best_value", "best_step", "steps_run", "seed")


class WatchServer(ThreadingHTTPServer):
    """Serves one study to whoever on this machine has the token; nothing is written, and nothing but the study is read.

    Args:
        folder: of the study.
        port: 0 takes a free one.
    """

    daemon_threads = True

    def __init__(self, folder: Path, *, port: int = 0) -> None:
        self.folder, self.token = folder, secrets.token_urlsafe(24)
        self._lock, self._seen, self._body = Lock(), (-1.0, False), ""
        super().__init__((LOOPBACK, port), _Handler)

    @property
    def address(self) -> str:
        """What to open in a browser."""
        return f"http://{LOOPBACK}:{self.server_port}/?token={self.token}"

    def body(self) -> str:
        """Return what there is to see now, drawn again only where the study has changed."""
        with self._lock:
            now = newest, _ = last_change(self.folder), is_locked(self.folder)  # a killed training changes no file
            if now != self._seen:
                self._seen, self._body = now, f"<!-- {newest} -->{study_body(self.folder)}"
            return self._body


class _Handler(BaseHTTPRequestHandler):
    server: WatchServer

    def do_GET(self) -> None:
        """Answer with the page, or with its changing part, to whoever has the token and asks for this machine by its own name."""
        asked = urlsplit(self.path)
        token = parse_qs(asked.query).get("token", [""])[0]
        here = {f"{name}:{self.server.server_port}" for name in (LOOPBACK, "localhost")}
        if not hmac.compare_digest(token, self.server.token) or self.headers.get("Host") not in here:
            said = "The token is missing or wrong: open the address that workbench watch printed."
            self._send(HTTPStatus.FORBIDDEN, said, "text/plain")
        elif asked.path == "/":
            css = f"{page_css('report.css')}\n{CSS}"
            nonce = secrets.token_urlsafe(12)
            name = self.server.folder.name
            page = render("watch.html.j2", Path(__file__).parent, css=css, nonce=nonce, script=SCRIPT, name=name)
            self._send(HTTPStatus.OK, page, "text/html", policy=f"default-src 'none'; connect-src 'self'; img-src data:; style-src 'unsafe-inline'; script-src 'nonce-{nonce}'")  # fmt: skip
        elif asked.path == "/now":
            self._send(HTTPStatus.OK, self.server.body(), "text/html")
        elif asked.path == "/curves":
            self._send(HTTPStatus.OK, study_curves(self.server.folder), "application/json")
        else:
            self._send(HTTPStatus.NOT_FOUND, "There is nothing here.", "text/plain")

    def _send(self, status: HTTPStatus, text: str, kind: str, *, policy: str = "default-src 'none'") -> None:
        data = text.encode()
        self.send_response(status)
        headers = {
            "Content-Type": f"{kind}; charset=utf-8", "Content-Length": str(len(data)), "Content-Security-Policy": policy,
            "Cache-Control": "no-store", "Referrer-Policy": "no-referrer", "X-Content-Type-Options": "nosniff",
        }  # fmt: skip
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        with suppress(ConnectionError):  # a page that was closed meanwhile
            self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Say nothing of requests."""


def study_curves(folder: Path) -> str:
    """Return what the page's curves are told of a study as it is on disk, as JSON; nothing where it cannot be read."""
    try:
        content, buffers = StudyCurves.of(open_record(folder)).everything()
        return plain(({**content, "still": not is_locked(folder)}, buffers))
    except WorkbenchError:
        return "[]"


def study_body(folder: Path) -> str:
    """Return sentence, curves, verdict and trials of a study as they are on disk, as HTML; why there is nothing where it cannot be read."""
    try:
        record = open_record(folder)
        diagnosis = diagnosis_of(record)
    except WorkbenchError as error:
        return render(
            "watch_now.html.j2", Path(__file__).parent, said=str(error), figures=[], trains=False, verdict="", trials=""
        )
    kind = str(record.study.get("kind")) if isinstance(record, StudyRecord) else "trial"
    names = STUDIES[kind].pictures if kind in STUDIES else ("loss-curves",)
    figures = [
        draw_figure(figure, record, diagnosis)
        for name in names
        for figure in FIGURES
        if figure.name == name != "loss-curves"
    ]
    return render(
        "watch_now.html.j2", Path(__file__).parent, said=study_sentence(record, counts=record.steps.empty), figures=figures, trains=is_locked(folder),
        verdict=verdict_table(diagnosis), trials=table(*trial_rows(record, _COLUMNS)),
    )  # fmt: skip


@contextmanager
def serving(folder: Path, *, port: int = 0) -> Iterator[WatchServer]:
    """Serve a study while the block runs."""
    server = WatchServer(folder, port=port)
    thread = Thread(target=server.serve_forever, name="workbench watch", daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
