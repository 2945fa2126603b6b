"""Draws the house from its imports (docs/pictures/rooms.svg), and the files that a chat request runs (way.svg).

    python -m tools.house              draw both anew (the second needs the embedded model: `make model`)

Owns:      which file stands in which room, and on which level: one above the highest room that it imports.
Invariant: rooms import in one direction only; a circle is an error that names it.
An arrow that others imply is left out: where a -> b -> c is drawn, a -> c is not.
"""

import ast
import json
import pathlib
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from html import escape

ROOT = pathlib.Path(__file__).parents[1]
PICTURES = ROOT / "docs" / "pictures"
HOUSES = ("deployments", "routing", "replicas", "kvtransfer", "dashboards")
COLOURS = {
    "deployments": "#dbe9f6",
    "routing": "#fde8c8",
    "replicas": "#dcefdc",
    "kvtransfer": "#f0dcec",
    "dashboards": "#e8e8e8",
}
WIDE, HIGH, GAP_X, GAP_Y, MARGIN = 146, 38, 14, 40, 12  # pixels

Graph = dict[str, set[str]]


def room_of(path: pathlib.Path) -> str:
    """The folder of a file; a file that stands outside all rooms of its house is one by itself."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    folder = parts[:-1] if parts[-1] == "__init__" or len(parts) > 2 else parts
    return "/".join(folder[:2]) if folder[0] in ("deployments", "replicas", "kvtransfer") else folder[0]


def product_files() -> list[pathlib.Path]:
    return [path for house in HOUSES for path in sorted((ROOT / house).rglob("*.py")) if path.name != "__init__.py"]


def module_file(name: str) -> pathlib.Path | None:
    path = ROOT.joinpath(*name.split(".")).with_suffix(".py")
    return path if path.exists() else None


def is_module(name: str) -> bool:
    path = ROOT.joinpath(*name.split("."))
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists()


def imports(source: str) -> list[str]:
    """Modules that ``source`` imports anywhere in it; ``from a import b`` is a.b where that is a module of ours."""
    found: list[str] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import of {node.module}; name the floor you import from"
            module = node.module or ""
            inner = [f"{module}.{alias.name}" for alias in node.names]
            found += [name if is_module(name) else module for name in inner]
    return found


def imports_of(path: pathlib.Path) -> set[pathlib.Path]:
    """Files of ours that ``path`` imports anywhere in it."""
    found = {module_file(name) for name in imports(path.read_text())}
    return {each for each in found if each is not None and each.relative_to(ROOT).parts[0] in HOUSES}


def room_imports() -> Graph:
    """Room -> the rooms that its files import, itself left out."""
    graph: Graph = {}
    for path in product_files():
        room = room_of(path)
        graph.setdefault(room, set()).update(room_of(each) for each in imports_of(path) if room_of(each) != room)
    return graph


def levels(graph: Graph) -> dict[str, int]:
    """Room -> its level; 0 imports nothing. Raises: ValueError with the rooms of a circle."""
    found: dict[str, int] = {}

    def level(room: str, path: tuple[str, ...]) -> int:
        if room in path:
            raise ValueError(f"rooms import each other: {' -> '.join([*path[path.index(room) :], room])}")
        if room not in found:
            found[room] = 1 + max((level(each, (*path, room)) for each in sorted(graph[room])), default=-1)
        return found[room]

    for room in sorted(graph):
        level(room, ())
    return found


def drawn_arrows(graph: Graph) -> Graph:
    """The arrows that no others imply (the transitive reduction)."""
    below: dict[str, set[str]] = {}
    for room in sorted(graph, key=levels(graph).__getitem__):
        below[room] = graph[room] | {each for direct in graph[room] for each in below[direct]}
    return {
        room: {each for each in targets if not any(each in below[other] for other in targets - {each})}
        for room, targets in graph.items()
    }


def rooms_svg() -> str:
    """All rooms by level, from the top; what a room imports stands below it."""
    graph = room_imports()
    level, arrows = levels(graph), drawn_arrows(graph)
    size = Counter(room_of(path) for path in product_files())
    rows = [sorted(room for room in graph if level[room] == at) for at in range(max(level.values()), -1, -1)]
    for _ in range(8):  # each room near the middle of those that import it
        place = {room: at - len(row) / 2 for row in rows for at, room in enumerate(row)}
        for row in rows[1:]:
            above = {room: [place[other] for other in graph if room in arrows[other]] or [place[room]] for room in row}
            row.sort(key=lambda room: (sum(above[room]) / len(above[room]), room))
    width = max(len(row) for row in rows) * (WIDE + GAP_X) + 2 * MARGIN
    centre: dict[str, tuple[float, float]] = {}
    for number, row in enumerate(rows):
        left = (width - len(row) * (WIDE + GAP_X) + GAP_X) / 2
        for at, room in enumerate(row):
            centre[room] = left + at * (WIDE + GAP_X) + WIDE / 2, MARGIN + number * (HIGH + GAP_Y) + HIGH / 2
    parts = [_arrow(centre[room], centre[each]) for room in sorted(graph) for each in sorted(arrows[room])]
    for room in sorted(centre):
        label = f"{size[room]} files" if size[room] > 1 else "1 file"
        parts.append(_box(centre[room], room, label, COLOURS[room.split("/")[0]]))
    return svg(width, 2 * MARGIN + len(rows) * (HIGH + GAP_Y) - GAP_Y, parts)


def _arrow(start: tuple[float, float], end: tuple[float, float]) -> str:
    (x1, y1), (x2, y2) = start, end
    y1, y2 = y1 + HIGH / 2, y2 - HIGH / 2 - 3
    bend = min(GAP_Y, (y2 - y1) / 2)
    return (
        f'<path d="M{x1:.0f},{y1:.0f} C{x1:.0f},{y1 + bend:.0f} {x2:.0f},{y2 - bend:.0f} {x2:.0f},{y2:.0f}" '
        'fill="none" stroke="#8a93a0" stroke-width="1" marker-end="url(#tip)"/>'
    )


def _box(centre: tuple[float, float], name: str, label: str, colour: str) -> str:
    x, y = centre
    return (
        f'<rect x="{x - WIDE / 2:.0f}" y="{y - HIGH / 2:.0f}" width="{WIDE}" height="{HIGH}" rx="5" fill="{colour}" '
        f'stroke="#5a6472"/><text x="{x:.0f}" y="{y - 3:.0f}" class="name">{escape(name)}</text>'
        f'<text x="{x:.0f}" y="{y + 12:.0f}" class="size">{escape(label)}</text>'
    )


def way_svg(files: Iterable[str]) -> str:
    """A request's way: the rooms in the order in which it enters them, each with its files in that order."""
    rooms: dict[str, list[str]] = {}
    for file in files:
        rooms.setdefault(room_of(ROOT / file), []).append(pathlib.PurePath(file).stem)
    columns, width, line = 4, 232, 14
    heights = [0] * columns
    parts, last = [], None
    for number, (room, names) in enumerate(rooms.items(), 1):
        lines = _wrapped(names, 36)
        column = min((number - 1) * columns // len(rooms), columns - 1)
        top, high = MARGIN + heights[column], 24 + line * len(lines)
        heights[column] += high + 16
        left = MARGIN + column * (width + 26)
        parts.append(
            f'<rect x="{left}" y="{top}" width="{width}" height="{high}" rx="5" '
            f'fill="{COLOURS[room.split("/")[0]]}" stroke="#5a6472"/>'
            f'<text x="{left + 8}" y="{top + 15}" class="room">{number}. {escape(room)}</text>'
        )
        parts += [
            f'<text x="{left + 8}" y="{top + 29 + line * at}" class="file">{escape(text)}</text>'
            for at, text in enumerate(lines)
        ]
        here = (left, top, high, column)
        if last is not None:
            parts.append(_next(last, here, width))
        last = here
    return svg(2 * MARGIN + columns * (width + 26) - 26, 2 * MARGIN + max(heights) - 16, parts)


def _next(start: tuple[int, int, int, int], end: tuple[int, int, int, int], width: int) -> str:
    (left, top, high, column), (left2, top2, _, column2) = start, end
    if column == column2:
        path = f"M{left + 30},{top + high} V{top2 - 3}"
    else:
        path = f"M{left + width},{top + high / 2:.0f} H{left + width + 13} V{top2 + 12} H{left2 - 3}"
    return f'<path d="{path}" fill="none" stroke="#8a93a0" marker-end="url(#tip)"/>'


def _wrapped(names: list[str], width: int) -> list[str]:
    lines = [""]
    for name in names:
        if lines[-1] and len(lines[-1]) + len(name) + 2 > width:
            lines.append("")
        lines[-1] += f"{', ' if lines[-1] else ''}{name}"
    return lines


def svg(width: float, height: float, parts: list[str]) -> str:
    style = (
        "text{font-family:system-ui,sans-serif;fill:#1d232b}.name{font-size:11px;font-weight:600;text-anchor:middle}"
        ".size{font-size:9.5px;text-anchor:middle;fill:#4a5462}.room{font-size:12px;font-weight:600}.file{font-size:10.5px}"
    )
    tip = (
        '<marker id="tip" viewBox="0 0 6 6" refX="5" refY="3" markerWidth="6" markerHeight="6" orient="auto">'
        '<path d="M0,0 L6,3 L0,6 z" fill="#8a93a0"/></marker>'
    )
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}">'
    return "\n".join(
        [
            head,
            f"<style>{style}</style><defs>{tip}</defs>",
            '<rect width="100%" height="100%" fill="#fff"/>',
            *parts,
            "</svg>\n",
        ]
    )


def ways() -> Mapping[str, list[str]]:
    """The files that requests run, by what they are (tests/way.py), in the order of their first call."""
    run = subprocess.run(
        [sys.executable, "-m", "tests.way"], cwd=ROOT, capture_output=True, text=True, timeout=600, check=False
    )
    if not run.stdout:
        raise RuntimeError(f"tests.way failed:\n{run.stderr}")
    found: dict[str, list[str]] = json.loads(run.stdout.splitlines()[-1])
    return found


if __name__ == "__main__":
    (PICTURES / "rooms.svg").write_text(rooms_svg())
    (PICTURES / "way.svg").write_text(way_svg(ways()["chat"]))
