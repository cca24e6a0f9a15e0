"""The DSCP map of tests that look at marks: class selector n for level n (RFC 2474)."""

from crux_torch.settings import Marks

CLASS_SELECTORS = tuple(8 * n for n in range(8))
#: As an argument of :class:`Settings`, and as a process's environment.
MARKED = {"dscp_map": CLASS_SELECTORS}
MARKED_ENV = {"CRUX_DSCP_MAP": ",".join(map(str, CLASS_SELECTORS))}
#: As orders and records have it, for TCP connections and queue pairs.
MARKS = Marks(CLASS_SELECTORS, CLASS_SELECTORS, tuple(range(8)))
