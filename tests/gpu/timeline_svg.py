"""The picture of timeline.py, microseconds around the end of a step: python timeline_svg.py timeline.json >
timeline.svg"""

import json
import sys

WIDTH, LEFT, BAR, GAP, PANEL = 1000, 70, 26, 6, 125
# Colours that colour-blind readers can distinguish; waiting is pale.
COLOURS = {"schedule": "#0072b2", "step": "#e69f00", "upload": "#cc79a7", "launch": "#d55e00", "collect": "#009e73", "wait": "#e0e0e0"}
DEVICE = "#56b4e9"
# The spans, in the order in which they are painted over each other.
HOST = ["schedule", "step", "collect", "upload", "launch", "wait"]


def place(us, window):
    return LEFT + (us - window[0]) / (window[1] - window[0]) * (WIDTH - LEFT - 20)


def bar(event, window, y, colour, label):
    """A rectangle of an event, cut at the edges of the picture, with a title that says how long it took."""
    begin, end = max(event["us"], window[0]), min(event["us"] + event["dur"], window[1])
    x = place(begin, window)
    width = place(end, window) - x
    text = f'<text x="{x + 4:.1f}" y="{y + BAR - 9}">{label}</text>' if label and width > 7 * len(label) else ""
    title = f"<title>{event['name']} {event['dur']:.1f} us</title>"
    return f'<rect x="{x:.2f}" y="{y}" width="{width:.2f}" height="{BAR}" fill="{colour}">{title}</rect>{text}'


def panel(batch, row, top):
    events, window, parts = row["events"], row["window"], []
    hidden = f"{row['work']:.0f} us of the host's work a step, {row['idle']:.1f} us of it not hidden"
    parts.append(f'<text x="{LEFT}" y="{top + 14}">B = {batch}: a step every {row["period"]:.0f} us, {hidden}</text>')
    host, device = top + 24, top + 24 + BAR + GAP
    parts += [f'<text x="8" y="{y + BAR - 9}">{name}</text>' for name, y in (("host", host), ("device", device))]
    for name in HOST:
        parts += [bar(e, window, host, COLOURS[name], "") for e in events if e["row"] == "host" and e["name"] == name]
    steps = [e for e in events if e["row"] == "device" and e["name"] == "step"]
    parts += [bar(e, window, device, DEVICE, f"step of {e['dur']:.0f} us") for e in steps]
    bottom = device + BAR + 4
    for us in range(int(window[0]), int(window[1]) + 1, 50):
        x = place(us, window)
        parts.append(f'<path d="M{x:.1f} {bottom}v4" stroke="black"/><text x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{us}</text>')
    return parts


def draw(found):
    height = PANEL * len(found) + 30
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" font-family="sans-serif" font-size="12">',
             f'<rect width="{WIDTH}" height="{height}" fill="white"/>']
    for i, (batch, row) in enumerate(found.items()):
        parts += panel(batch, row, i * PANEL + 6)
    names = COLOURS | {"device step": DEVICE}
    labels = {"step": "build", "wait": "wait for tokens"}
    for i, (name, colour) in enumerate(names.items()):
        x = LEFT + i * 125
        parts.append(f'<rect x="{x}" y="{height - 22}" width="12" height="12" fill="{colour}"/><text x="{x + 17}" y="{height - 12}">{labels.get(name, name)}</text>')
    return "\n".join([*parts, "</svg>", ""])


if __name__ == "__main__":
    with open(sys.argv[1]) as file:
        print(draw(json.load(file)), end="")
