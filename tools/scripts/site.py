#!/usr/bin/env python3
"""Prepares the pages for mdBook, and checks the links of the book.

    tools/scripts/site.py prepare FOLDER    # writes FOLDER/source with SUMMARY.md, FOLDER/book.toml
    tools/scripts/site.py check BOOK        # fails if a link of the book leads nowhere

docs/README.md decides about the pages and their order. Pages keep their paths, so links between
them work as they do in the repository. Other files that pages link to become pages of their text,
and folders become lists of their files.
"""

import html
import html.parser
import os
import posixpath
import re
import shutil
import subprocess
import sys
import urllib.parse

INDEX = "docs/README.md"
API = "docs/api.md"
IMAGES = (".svg", ".png")
# What has pages of its own below it.
INDEXES = {"docs/decisions/README.md": "docs/decisions/", "docs/benchmarks.md": "bench/results/"}
LINK = re.compile(r"(\]\()([^)\s]+)")
FILE_PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>{name}</title><style>
body {{ font-family: sans-serif; margin: 1rem auto; max-width: 70rem; padding: 0 1rem; }}
pre {{ font-size: 0.85rem; line-height: 1.4; overflow-x: auto; }}
</style></head><body><p><a href="{top}README.html">Farside</a> / {name}</p>
{body}
</body></html>
"""


def read(path):
    with open(path, encoding="utf-8") as file:
        return file.read()


def write(path, text):
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)


def prose(text):
    """Splits a page into pieces, and tells of each whether it is prose, and not code."""
    pieces = re.split(r"(^```.*?^```|`[^`\n]+`)", text, flags=re.MULTILINE | re.DOTALL)
    return [(piece, at % 2 == 0) for at, piece in enumerate(pieces)]


def links(text):
    """The targets of a page's links to files of the repository."""
    found = (link for piece, is_prose in prose(text) if is_prose for _, link in LINK.findall(piece))
    return [link for link in found if ":" not in link and not link.startswith("#")]


def resolve(page, link):
    return posixpath.normpath(posixpath.join(posixpath.dirname(page), link.split("#")[0]))


def title(page):
    heading = re.search(r"^# (.*)", read(page), flags=re.MULTILINE)
    if heading:
        return heading[1].replace("`", "")
    # A part of the page beside it.
    return f"{title(posixpath.dirname(page) + '/README.md')}: {posixpath.basename(page)[:-3]}"


def linked_pages(page):
    """The pages to which a page leads, in its order."""
    targets = [resolve(page, link) for link in links(read(page))]
    return list(dict.fromkeys(target for target in targets if target.endswith(".md")))


def summary(files):
    """The table of contents, and the pages in it."""
    known = ["README.md", INDEX]
    lines = ["# Summary", "", *(f"[{title(page)}]({page})" for page in known), ""]

    def add(page, depth):
        if page in known or page not in files:
            return
        known.append(page)
        lines.append(f"{'    ' * depth}- [{title(page)}]({page})")
        if page in INDEXES:
            for below in linked_pages(page):
                if below.startswith(INDEXES[page]):
                    add(below, depth + 1)

    for section in re.split(r"^## ", read(INDEX), flags=re.MULTILINE)[1:]:
        heading, body = section.split("\n", 1)
        lines.extend(["", f"# {heading}", ""])
        for row in body.splitlines():
            if "cargo doc" in row:
                lines.append(f"- [API of the Rust library]({API})")
            for link in links(row):
                add(resolve(INDEX, link), 0)
    # Pages that only other pages lead to.
    more = [target for page in known for target in linked_pages(page)]
    more = [page for page in dict.fromkeys(more) if page in files and page not in known]
    if more:
        lines.extend(["", "# More", ""])
    for page in more:
        add(page, 0)
    return "\n".join(lines) + "\n", known


def file_page(path, files):
    """A page with the text of a file, or the list of the files in a folder."""
    if path in files:
        body = f"<pre>{html.escape(read(path))}</pre>"
    else:
        names = [name for name in sorted(files) if name.startswith(path + "/")]
        body = "<pre>" + html.escape("\n".join(names)) + "</pre>"
    return FILE_PAGE.format(name=html.escape(path), top="../" * path.count("/"), body=body)


def prepare(folder):
    source = os.path.join(folder, "source")
    shutil.rmtree(source, ignore_errors=True)
    arguments = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(arguments, capture_output=True, text=True, check=True).stdout
    files = {path for path in listed.split("\0") if os.path.isfile(path)}
    contents, pages = summary(files)
    write(os.path.join(source, "SUMMARY.md"), contents)
    others = set()

    def rewrite(page, link):
        target = resolve(page, link)
        is_page = target in pages
        if not is_page:
            others.add(target)
        is_same = is_page or target.endswith(IMAGES)
        # A folder's list has a name beside the folder.
        return link if is_same else link.split("#")[0].rstrip("/") + ".html"

    for page in pages:
        text = ""
        for piece, is_prose in prose(read(page)):
            if is_prose:
                replace = lambda found: found[1] + (
                    found[2] if ":" in found[2] or found[2].startswith("#")
                    else rewrite(page, found[2]))
                piece = LINK.sub(replace, piece)
            text += piece
        # The table of the index names the command that makes these pages.
        text = text.replace("| `cargo doc --open -p farside` |",
                            f"| [the API]({posixpath.basename(API)}) |")
        write(os.path.join(source, page), text)
    # `client` has no page, and its list may not be named as the page of a file there.
    for path in sorted(others):
        if path.endswith(IMAGES):
            target = os.path.join(source, path)
            os.makedirs(os.path.dirname(target), exist_ok=True)
            shutil.copy(path, target)
        else:
            write(os.path.join(source, path + ".html"), file_page(path, files))
    write(os.path.join(source, API),
          "# API of the Rust library\n\n[The documentation of the crate `farside`]"
          "(../api/farside/index.html) has every type and method, with examples. The other pages\n"
          "of this book are those of the repository.\n")
    for name in ("book.toml", "site.css"):
        shutil.copy(os.path.join("tools/site", name), folder)
    print(f"{len(pages)} pages, {len(others)} other files")


class Page(html.parser.HTMLParser):
    """The links and the anchors of a page of the book."""

    def __init__(self, path):
        super().__init__()
        self.links, self.anchors = [], set()
        self.feed(read(path))

    def handle_starttag(self, tag, attrs):
        for name, value in attrs:
            if name in ("href", "src") and value:
                self.links.append(value)
            if name in ("id", "name") and value:
                self.anchors.add(value)


def check(book):
    pages, broken, count = {}, [], 0

    def page(path):
        if path not in pages:
            pages[path] = Page(path)
        return pages[path]

    for folder, _, names in os.walk(book):
        # rustdoc checks its own links.
        if os.path.relpath(folder, book).split(os.sep)[0] == "api":
            continue
        for name in sorted(names):
            path = os.path.join(folder, name)
            # The page for unknown addresses has links from the site's root.
            if not name.endswith(".html") or name == "404.html":
                continue
            for link in page(path).links:
                url = urllib.parse.urlsplit(link)
                if url.scheme or url.netloc:
                    continue
                count += 1
                target = os.path.normpath(os.path.join(folder, urllib.parse.unquote(url.path)))
                target = target if url.path else path
                if not os.path.isfile(target):
                    broken.append(f"{os.path.relpath(path, book)}: {link}: no such file")
                elif url.fragment and target.endswith(".html"):
                    if urllib.parse.unquote(url.fragment) not in page(target).anchors:
                        broken.append(f"{os.path.relpath(path, book)}: {link}: no such heading")
    print("\n".join(broken))
    print(f"{count} links of {len(pages)} pages, {len(broken)} of them broken")
    return 1 if broken or not count else 0


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["prepare", folder]:
            prepare(folder)
        case ["check", book]:
            sys.exit(check(book))
        case _:
            sys.exit(__doc__)
