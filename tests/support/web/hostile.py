"""At least 200 strings that a page must show as text: HTML, attributes, htmx, templates, addresses, terminals, Unicode.

`NAMES` are those that the server accepts as names and tags: printable, without control characters.
"""

from __future__ import annotations

import unicodedata

_HTML = (
    "<script>x()</script>",
    "<img src=x onerror=x()>",
    "<svg/onload=x()>",
    "</pre></textarea><b>bold</b>",
    "<base href=//e>",
    "<iframe src=javascript:x()>",
    "<form action=//e><input name=csrf>",
    "<meta http-equiv=refresh content=0;url=//e>",
    "<link rel=stylesheet href=//e>",
    "<!-- comment",
    "<style>*{display:none}</style>",
    "<a href=javascript:x()>link</a>",
    "<dialog open>hello</dialog>",
    "<template><script>x()</script></template>",
)
_ATTRIBUTES = (
    '" onfocus=x() autofocus="',
    "' style='display:none",
    "` onmouseover=x() `",
    "&quot;&#39;&lt;b&gt;",
    "a=b onmouseover=x()",
    '"><script>x()</script>',
    "'><img src=x onerror=x()>",
)
_HTMX = (
    "<hx-partial hx-target=body>gone</hx-partial>",
    "<b hx-get=/ui hx-trigger=load>",
    "<b data-hx-post=/ui/sign-out data-hx-trigger=load>",
    "<b hx-swap-oob=true id=main>gone</b>",
    "<b id=connection>live</b>",
    "<b hx-on:click=x()>",
    "</hx-partial><script>x()</script>",
)
_TEMPLATES = (
    "{{7*7}}",
    "{% raw %}{{ csrf }}{% endraw %}",
    "${7*7}",
    "#{7*7}",
    "</script><!--",
    "{# comment #}",
    "{{ self.__init__.__globals__ }}",
)
_ADDRESSES = (
    "javascript:x()",
    "data:text/html,<script>x()</script>",
    "//evil/ui",
    "/\\evil",
    "next=%2F%2Fevil",
    "https://evil@host/",
    "../../etc/passwd",
    "..%2f..%2fetc",
)
_UNICODE = (
    "a\u202eb",
    "a\u200bb",
    "x" + "\u0301" * 100,
    "\u2028line",
    "\ufeffbom",
    "\U0001f4a5",
    "ａ＜ｂ＞",
    "\u0130I",
)
_EXPORTS = ('=HYPERLINK("//e")', "@SUM(1)", "+1+1", "-1-1", "=cmd|'/c calc'!A0", "%0A=1")
_TERMINAL = (
    "\x1b]8;;javascript:x()\x07link\x1b]8;;\x07",
    "\x1b[2J",
    "\x1b[999999999m",
    "\x1b]0;title",
    "\x9b31m",
    "\x1bPq#0;2;0;0;0",
    "\rover",
    "\x00nul",
    "a\r\nX: y",
    "a\tb",
)
SEEDS = (*_HTML, *_ATTRIBUTES, *_HTMX, *_TEMPLATES, *_ADDRESSES, *_UNICODE, *_EXPORTS, *_TERMINAL)
_AROUND = ("{}", "before {}", "{} after", "{0}{0}")


def corpus() -> list[str]:
    """Return the strings, each once."""
    return list(dict.fromkeys(around.format(seed) for around in _AROUND for seed in SEEDS))


def is_printable(text: str) -> bool:
    """Return whether the server accepts a text as a name."""
    return text == text.strip() and all(unicodedata.category(letter)[0] not in "CZ" or letter == " " for letter in text)


CORPUS = corpus()
NAMES = [text for text in CORPUS if is_printable(text) and len(text) <= 200]
