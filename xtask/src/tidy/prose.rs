//! The prose of a Markdown page: its text without code.

/// The text of a page with blanks in place of code, so that lines and columns stay where they are.
pub fn prose(page: &str) -> String {
    let mut fenced = false;
    let mut text = String::with_capacity(page.len());
    for line in page.split_inclusive('\n') {
        let is_fence = line.trim_start().starts_with("```");
        if is_fence || fenced {
            text.extend(line.chars().map(blank));
        } else {
            text.push_str(line);
        }
        fenced ^= is_fence;
    }
    without_spans(&text)
}

/// The text with blanks in place of spans of code. A span may go on in the next line, but not in the next paragraph.
fn without_spans(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(start) = rest.find('`') {
        let ticks = rest[start..].chars().take_while(|c| *c == '`').count();
        let (before, span) = rest.split_at(start);
        out.push_str(before);
        let inside = &span[ticks..];
        let paragraph = inside.find("\n\n").unwrap_or(inside.len());
        match inside[..paragraph].find(&"`".repeat(ticks)) {
            Some(end) => {
                let (code, after) = span.split_at(ticks + end + ticks);
                out.extend(code.chars().map(blank));
                rest = after;
            }
            None => {
                out.push_str(&span[..ticks]);
                rest = inside;
            }
        }
    }
    out.push_str(rest);
    out
}

fn blank(c: char) -> char {
    if c == '\n' { '\n' } else { ' ' }
}

#[cfg(test)]
mod tests {
    use super::prose;

    #[test]
    fn code_becomes_blanks() {
        assert_eq!(prose("a `b` c\n```\nd\n```\ne\n"), "a     c\n   \n \n   \ne\n");
        assert_eq!(prose("``a ` b`` c `d\ne` f"), "          c   \n   f");
    }

    #[test]
    fn a_single_tick_hides_nothing() {
        assert_eq!(prose("a ` b\n\nc ` d"), "a ` b\n\nc ` d");
    }
}
