"""Pictures for dark pages."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import PurePosixPath

from handbook.palette import DARK


def dark_svg(svg: str) -> str:
    """The picture with each color replaced by its counterpart on a dark page, and without a background."""
    return re.sub(r"#[0-9a-f]{6}\b", lambda color: DARK.get(color[0], color[0]), svg)


def dark_name(picture: str) -> str:
    """The file name of a picture's counterpart: `demo-dark.svg` for `demo.svg`."""
    path = PurePosixPath(picture)
    return path.with_stem(f"{path.stem}-dark").as_posix()


def with_dark_pictures(html: str, files: Iterable[str]) -> str:
    """The page with both variants of each picture that has a dark one; the theme shows one of them."""
    known = set(files)

    def both(tag: re.Match[str]) -> str:
        before, source, after = tag.groups()
        dark = dark_name(source)
        if dark not in known:
            return tag[0]
        return f"<img{before}{source}#only-light{after}><img{before}{dark}#only-dark{after}>"

    return re.sub(r'<img([^>]*? src=")([^"#]+)("[^>]*)>', both, html)
