"""Check a built site: every local link leads to a file and an anchor, and nothing is loaded from a network.

python docs/check_links.py docs/build
"""

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

LOADED = {"img": "src", "script": "src", "link": "href", "source": "srcset"}
"""Where elements name what a browser loads with the page."""


class Page(HTMLParser):
    """The links, resources and anchors of a page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self.links: list[str] = []
        self.resources: list[str] = []
        self.anchors: set[str] = set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Collect what an element names."""
        values = {name: value for name, value in attrs if value}
        self.anchors |= {values[name] for name in ("id", "name") if name in values}
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        if tag in LOADED and LOADED[tag] in values:
            self.resources.append(values[LOADED[tag]])


def problems(site: Path) -> list[str]:
    """Return what is wrong, one line for every link."""
    pages = {path.resolve(): Page(path) for path in site.rglob("*.html")}
    found = []
    for page in pages.values():
        where = page.path.relative_to(site)
        found += [f"{where}: loads {link}" for link in page.resources if urlsplit(link).netloc]
        for link in page.links + page.resources:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (page.path.parent / unquote(parts.path)).resolve() if parts.path else page.path.resolve()
            if not target.is_file():
                found.append(f"{where}: {link} leads nowhere")
            elif parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].anchors:
                found.append(f"{where}: {link} has no such anchor")
    return found


def main() -> None:
    """Print what is wrong, and fail if there is anything."""
    found = problems(Path(sys.argv[1]))
    sys.exit("\n".join(found) if found else 0)


if __name__ == "__main__":
    main()
