"""One line about a job of sanitize.sh, and the distinct reports in its log.

  python sanitize.py NAME EXIT_CODE SECONDS LOG

Its own exit code is 0 only if the job ended, with a summary and without a report.
"""

import re
import sys

FOUND, TIMED_OUT = 99, (124, 137)
SHOWN = 4
PREFIX = "========= "


def distinct(lines):
    """Reports of the tool and how often each occurs, without what differs from thread to thread."""
    reports, current = {}, []
    for line in [*lines, PREFIX]:
        text = line[len(PREFIX) :].rstrip() if line.startswith(PREFIX) else ""
        if re.match(r"(Error|Warning|Invalid|Barrier|Divergent|Missing|Uninitialized|Program hit)", text):
            current = [text]
        elif current and re.match(r" +(at|and|Read Thread|Write Thread|Device Frame)\b", text):
            current.append(text.strip())
        elif current and not text.startswith(" "):
            steady = re.sub(r"\+?0x[0-9a-f]+| \[\d+ hazards\]|Thread \([\d,]+\)|block \([\d,]+\)", "", "; ".join(current))
            reports[steady] = reports.get(steady, 0) + 1
            current = []
    return sorted(reports.items(), key=lambda item: -item[1])


def main():
    name, code, seconds, path = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4]
    with open(path, errors="replace") as file:
        lines = file.read().splitlines()
    summary = [line[len(PREFIX) :] for line in lines if re.match(PREFIX + r"(ERROR|RACECHECK) SUMMARY", line)]
    reports = distinct(lines)
    clean = code == 0 and summary and not reports
    if code in TIMED_OUT:
        said = [f"TIMEOUT {name} after {seconds} s, {sum(n for _, n in reports)} reports so far"]
    elif clean:
        said = [f"ok      {name} ({seconds} s)"]
    elif code == 0 and not summary:
        said = [f"FAILED  {name}: the tool gave no summary ({seconds} s)"]
    elif code in (0, FOUND):
        said = [f"ERRORS  {name} ({seconds} s): {' '.join(summary)}"]
    else:
        last = [line for line in lines if not line.startswith(PREFIX.strip()) and line.strip()][-3:]
        said = [f"FAILED  {name}: exit code {code} ({seconds} s)", *("          " + line[:240] for line in last)]
    said += [f"        {count} x {text[:400]}" for text, count in reports[:SHOWN]]
    # It is one write, because jobs that run at the same time print too.
    sys.stdout.write("\n".join(said) + "\n")
    return 0 if clean else 1


sys.exit(main())
