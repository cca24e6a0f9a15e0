"""Page of torch's debug server (``torch.distributed.debug``) with the status of Crux on all ranks.

A module of its own, because it imports parts of torch that torch before 2.11 lacks. Its import
registers the handler that answers for this rank.
"""

from __future__ import annotations

import ctypes
import json
from typing import Any

from torch._C._distributed_c10d import _register_handler
from torch.distributed.debug import _frontend as frontend

from crux_torch.agent import AGENT

#: Name of the handler that answers for one rank, and the page that shows the answers of all.
HANDLER, PAGE = "crux_status", "/crux"


class CruxHandler(frontend.DebugHandler):
    """The page; ``start_debug_server`` may send it to another process."""

    def routes(self) -> list[frontend.Route]:
        return [frontend.Route(PAGE, self._page)]

    def nav_links(self) -> list[frontend.NavLink]:
        """Returns the link in the head of every page."""
        return [frontend.NavLink(PAGE, "Crux")]

    def dump(self) -> str:
        """Returns the answers of all ranks, for the server's periodic dumps."""
        addresses, answers = frontend.fetch_all(HANDLER, timeout=self.fetch_timeout)
        ranks = zip(addresses, answers, strict=True)
        return "\n".join(f"{address}\n{answer.text}" for address, answer in ranks)

    def dump_filename(self) -> str:
        return HANDLER

    def _page(self, request: frontend.HTTPRequestHandler) -> bytes:
        addresses, answers = frontend.fetch_all(HANDLER, timeout=self.fetch_timeout)
        return request.frontend.render_template(
            "json_resp.html", title="Crux", addrs=addresses, resps=answers
        )


def _answer(_request: Any, response: Any) -> None:
    response.set_content(json.dumps(AGENT.status(), default=str), "application/json")
    response.set_status(200)


# Torch frees it at the end of the process without the GIL, which would be fatal: never free it.
ctypes.pythonapi.Py_IncRef(ctypes.py_object(_answer))
_register_handler(HANDLER, _answer)
