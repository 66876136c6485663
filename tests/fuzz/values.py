"""Unexpected values that files may contain."""

from hypothesis import strategies as st

# Troublesome for terminals, file systems, shells, markup or parsers.
AWKWARD = [
    "",
    " ",
    "\x00",
    "a\nb",
    "a\r\nb",
    "\x1b[2J\x1b]0;title\x07",
    "\u202eright to left",
    "\ufeff",
    "\ud800",
    "a\udcffb",
    "\u2028",
    "\U0010ffff",
    "../../x",
    "/etc/passwd",
    "~nobody-of-that-name/x",
    "C:\\con",
    "$(touch x)",
    "<script>alert(1)</script>",
    "{{ 7 * 7 }}",
    "%s%n{0}",
    "[bold]x[/bold]",
    "x" * 300,
    "null",
    "true",
    "NaN",
    "0x10",
    "1e400",
    "-",
    "--out",
]
TEXTS = st.sampled_from(AWKWARD) | st.text(max_size=12)
NUMBERS = (
    st.integers()
    | st.sampled_from([0, -1, 1, 2**31, 2**63, -(2**63), 10**18, 10**400, -(10**400)])
    | st.floats()
    | st.sampled_from([0.0, -0.0, 1e-320, 1e308, float("nan"), float("inf"), -float("inf")])
)
LEAVES = st.none() | st.booleans() | NUMBERS | TEXTS
JSON = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3), max_leaves=6
)
