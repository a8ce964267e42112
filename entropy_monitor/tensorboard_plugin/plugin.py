"""The tab's routes: static files under fixed names, and GET routes that answer from a `RunStore`.

Nothing a log folder or an address holds may end in a traceback or in a script: parameters are
checked, names are looked up in what TensorBoard lists, and every failure is a 400 or 404 with a
JSON error, shown as text.
"""

import json
import logging
from collections.abc import Callable, Iterable, Mapping
from importlib import resources
from typing import Any

from tensorboard import errors, plugin_util
from tensorboard.plugins import base_plugin
from werkzeug import wrappers

from entropy_monitor.tensorboard_plugin import PLUGIN_NAME, answers
from entropy_monitor.tensorboard_plugin.history import History, HistoryError
from entropy_monitor.tensorboard_plugin.layout import LayoutError
from entropy_monitor.tensorboard_plugin.store import RunStore

STATIC = {".js": "text/javascript; charset=utf-8", ".css": "text/css; charset=utf-8"}
MAX_PARAMETER = 4096

logger = logging.getLogger(__name__)


class BadRequestError(ValueError):
    """A parameter is missing or is not what it should be."""


Answer = tuple[bytes, str]
Handler = Callable[[wrappers.Request], Answer]


class AttentionPlugin(base_plugin.TBPlugin):  # type: ignore[misc]  # TensorBoard is untyped
    """The "Attention" tab.

    Args:
        context: TensorBoard's; its data provider is all that is used.
    """

    plugin_name = PLUGIN_NAME

    def __init__(self, context: base_plugin.TBContext) -> None:
        self._store = RunStore(context.data_provider)

    def is_active(self) -> bool:
        """Leave it to TensorBoard, which shows the tab as soon as a run has our tensors."""
        return False

    def frontend_metadata(self) -> base_plugin.FrontendMetadata:
        """Name the tab and its entry module."""
        return base_plugin.FrontendMetadata(es_module_path="/index.js", tab_name="Attention")

    def get_plugin_apps(self) -> Mapping[str, Any]:
        """Return every route."""
        routes = {
            "/runs": self._runs,
            "/frames": self._frames,
            "/series": self._series,
            "/attribution": self._attribution,
            "/alerts": self._alerts,
        }
        apps: dict[str, Any] = {path: _application(handler) for path, handler in routes.items()}
        for name, content in static_files().items():
            apps[f"/{name}"] = _application(_static(content, STATIC[f".{name.rsplit('.', 1)[1]}"]))
        return apps

    def _runs(self, request: wrappers.Request) -> Answer:
        ctx = plugin_util.context(request.environ)
        experiment = plugin_util.experiment_id(request.environ)
        return _json(answers.runs_answer(self._store.list_runs(ctx, experiment)))

    def _frames(self, request: wrappers.Request) -> Answer:
        stat = _text(request, "stat")
        since = _since(request)
        return _binary(answers.frames_answer(self._history(request), stat, since))

    def _series(self, request: wrappers.Request) -> Answer:
        layer, head = _integer(request, "layer"), _integer(request, "head")
        since = _since(request)
        return _binary(answers.series_answer(self._history(request), layer, head, since))

    def _attribution(self, request: wrappers.Request) -> Answer:
        since = _since(request)
        if "to" in request.args:
            to = _integer(request, "to")
            return _json(answers.split_answer(self._history(request), since, to))
        return _binary(answers.attribution_answer(self._history(request), since))

    def _alerts(self, request: wrappers.Request) -> Answer:
        history = self._history(request)
        return _json({**answers.alerts_answer(history), "notices": list(history.notices)})

    def _history(self, request: wrappers.Request) -> History:
        ctx = plugin_util.context(request.environ)
        experiment = plugin_util.experiment_id(request.environ)
        return self._store.history(ctx, experiment, _text(request, "run"))


def static_files() -> dict[str, bytes]:
    """Return the front-end's files by name."""
    folder = resources.files("entropy_monitor.tensorboard_plugin") / "static"
    return {
        entry.name: entry.read_bytes()
        for entry in sorted(folder.iterdir(), key=lambda entry: entry.name)
        if entry.is_file() and entry.name.endswith(tuple(STATIC))
    }


def _application(handler: Handler) -> Any:
    """Wrap a handler as a WSGI application that answers GET only and turns failures into JSON."""

    def application(environ: Any, start_response: Any) -> Iterable[bytes]:
        request = wrappers.Request(environ)
        if request.method not in ("GET", "HEAD"):
            response = _response(*_error("Only GET is allowed."), 405)
            response.headers["Allow"] = "GET, HEAD"
            return response(environ, start_response)
        try:
            response = _response(*handler(request), 200)
        except (BadRequestError, LayoutError) as error:
            response = _response(*_error(str(error)), 400)
        except (HistoryError, errors.NotFoundError) as error:
            response = _response(*_error(str(error)), 404)
        except Exception:
            # A log folder may hold anything; the page shows an error, TensorBoard goes on.
            logger.exception("The Attention tab could not answer %s", request.path)
            response = _response(*_error("This could not be read; see TensorBoard's log."), 400)
        return response(environ, start_response)

    return application


def _response(body: bytes, content_type: str, status: int) -> wrappers.Response:
    response = wrappers.Response(body, status=status, content_type=content_type)
    response.headers["X-Content-Type-Options"] = "nosniff"
    response.headers["Cache-Control"] = "no-cache, must-revalidate"
    return response


def _static(content: bytes, content_type: str) -> Handler:
    return lambda request: (content, content_type)


def _json(value: Mapping[str, Any]) -> Answer:
    return json.dumps(value, allow_nan=False).encode(), "application/json"


def _error(message: str) -> Answer:
    return _json({"error": message})


def _binary(content: bytes) -> Answer:
    return content, "application/octet-stream"


def _text(request: wrappers.Request, name: str) -> str:
    value = request.args.get(name)
    if value is None:
        raise BadRequestError(f"`{name}` is missing.")
    if len(value) > MAX_PARAMETER:
        raise BadRequestError(f"`{name}` is longer than {MAX_PARAMETER} characters.")
    return str(value)


def _integer(request: wrappers.Request, name: str) -> int:
    text = _text(request, name)
    # int() also takes "1_0", " 1" and other scripts' digits.
    if not (text.isascii() and text.removeprefix("-").isdecimal() and len(text) <= 19):
        raise BadRequestError(f"`{name}` must be a whole number, got {text[:40]!r}.")
    return int(text)


def _since(request: wrappers.Request) -> int | None:
    if request.args.get("from", "baseline") == "baseline":
        return None
    return _integer(request, "from")
