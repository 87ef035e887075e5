//! Describes the texts that a regular expression matches anywhere in, without anchors and look-ahead.
//!
//! A look-ahead restricts the rest of a text, and so does `$`. The module processes an expression from its end to its
//! beginning. It puts each part before the texts that may follow it, and intersects each look-ahead with these texts.

use llguidance::derivre::RegexAst;

use super::pattern::Pattern;

/// The largest number of parts of the result.
const LARGEST: usize = 1_000_000;
/// The largest number of anchors and look-aheads. Each of them adds a level to the result.
const MOST_LOOKS: usize = 500;
/// The largest number of repetitions of a part with look-ahead.
const MOST_REPEATS: u32 = 8;

/// Whether a position is at the start of the text.
#[derive(Clone, Copy, PartialEq, Eq)]
enum AtStart {
    Yes,
    No,
    Unknown,
}

/// Returns the texts in which an expression has a match.
///
/// # Errors
/// The expression uses look-ahead or anchors where they are not supported.
pub(super) fn texts(pattern: &Pattern) -> Result<RegexAst, String> {
    let mut writer = Writer { left: LARGEST, looks: MOST_LOOKS };
    let anywhere = |texts| concat(RegexAst::Regex("(?s:.*)".into()), texts);
    if !pattern.has_start() {
        return Ok(anywhere(writer.then(pattern, any(), AtStart::No)?));
    }
    let at_start = writer.then(pattern, any(), AtStart::Yes)?;
    let later = writer.then(pattern, any(), AtStart::No)?;
    Ok(either(vec![at_start, concat(RegexAst::Regex("(?s:.+)".into()), later)]))
}

struct Writer {
    left: usize,
    looks: usize,
}

impl Writer {
    fn spend(&mut self, parts: usize) -> Result<(), String> {
        self.left = self.left.checked_sub(parts).ok_or("the regular expression is too large")?;
        Ok(())
    }

    /// Returns the texts that are a match followed by one of the texts `rest`.
    fn then(&mut self, pattern: &Pattern, rest: RegexAst, at: AtStart) -> Result<RegexAst, String> {
        self.spend(1)?;
        if !pattern.looks_around() {
            return Ok(concat(self.plain(pattern)?, rest));
        }
        self.looks =
            self.looks.checked_sub(1).ok_or("the regular expression has too many anchors and look-aheads")?;
        match pattern {
            Pattern::Start => match at {
                AtStart::Yes => Ok(rest),
                AtStart::No => Ok(RegexAst::NoMatch),
                AtStart::Unknown => Err("a ^ after a part that may be empty is not supported".into()),
            },
            Pattern::End => Ok(RegexAst::And(vec![rest, RegexAst::EmptyString])),
            Pattern::Ahead(ahead, must) => {
                let ahead = self.then(ahead, any(), at)?;
                let ahead = if *must { ahead } else { RegexAst::Not(Box::new(ahead)) };
                Ok(RegexAst::And(vec![rest, ahead]))
            }
            Pattern::Concat(parts) => {
                let mut places = vec![at];
                for part in parts {
                    places.push(at_end(part, places[places.len() - 1]));
                }
                self.all(parts, &places, rest)
            }
            Pattern::Either(parts) => {
                let mut all = Vec::with_capacity(parts.len());
                for part in parts {
                    self.spend(size(&rest))?;
                    all.push(self.then(part, rest.clone(), at)?);
                }
                Ok(either(all))
            }
            Pattern::Repeat(part, least, most) => self.repeat(part, *least, *most, rest, at),
            Pattern::Char(_) | Pattern::Class(_) => Ok(concat(self.plain(pattern)?, rest)),
        }
    }

    /// Returns the texts that are matches of all parts at their places, followed by one of the texts `rest`.
    fn all(&mut self, parts: &[Pattern], places: &[AtStart], mut rest: RegexAst) -> Result<RegexAst, String> {
        let mut end = parts.len();
        while end > 0 {
            let plain = parts[..end].iter().rev().take_while(|part| !part.looks_around()).count();
            if plain == 0 {
                end -= 1;
                rest = self.then(&parts[end], rest, places[end])?;
                continue;
            }
            let texts =
                parts[end - plain..end].iter().map(|part| self.plain(part)).collect::<Result<_, _>>()?;
            rest = concat(RegexAst::Concat(texts), rest);
            end -= plain;
        }
        Ok(rest)
    }

    fn repeat(
        &mut self,
        part: &Pattern,
        least: u32,
        most: u32,
        rest: RegexAst,
        at: AtStart,
    ) -> Result<RegexAst, String> {
        if most > MOST_REPEATS {
            return Err("look-ahead and anchors in a part that is repeated are not supported".into());
        }
        let mut texts = rest.clone();
        for n in (0..most).rev() {
            let at = if n == 0 { at } else { at_end(part, at) };
            texts = self.then(part, texts, at)?;
            if n >= least {
                self.spend(size(&rest))?;
                texts = either(vec![rest.clone(), texts]);
            }
        }
        Ok(texts)
    }

    /// Returns the matches of a part that has no anchors and no look-ahead.
    fn plain(&mut self, pattern: &Pattern) -> Result<RegexAst, String> {
        self.spend(1)?;
        Ok(match pattern {
            Pattern::Char(c) => RegexAst::Literal(c.to_string()),
            Pattern::Class(class) => RegexAst::Regex(class.clone()),
            Pattern::Concat(parts) => {
                RegexAst::Concat(parts.iter().map(|part| self.plain(part)).collect::<Result<_, _>>()?)
            }
            Pattern::Either(parts) => {
                RegexAst::Or(parts.iter().map(|part| self.plain(part)).collect::<Result<_, _>>()?)
            }
            // Derivre uses the same number for a repetition without an upper limit.
            Pattern::Repeat(part, least, most) => {
                RegexAst::Repeat(Box::new(self.plain(part)?), *least, *most)
            }
            Pattern::Start | Pattern::End | Pattern::Ahead(..) => RegexAst::EmptyString,
        })
    }
}

/// Returns whether the end of a match is at the start of the text, for a match that began at `at`.
fn at_end(pattern: &Pattern, at: AtStart) -> AtStart {
    match pattern.may_and_must_be_empty() {
        (_, true) => at,
        (false, _) => AtStart::No,
        (true, false) => {
            if at == AtStart::No {
                AtStart::No
            } else {
                AtStart::Unknown
            }
        }
    }
}

fn any() -> RegexAst {
    RegexAst::Regex("(?s:.*)".into())
}

fn concat(a: RegexAst, b: RegexAst) -> RegexAst {
    match (&a, &b) {
        (RegexAst::NoMatch, _) | (_, RegexAst::NoMatch) => RegexAst::NoMatch,
        _ => RegexAst::Concat(vec![a, b]),
    }
}

fn either(mut all: Vec<RegexAst>) -> RegexAst {
    all.retain(|texts| !matches!(texts, RegexAst::NoMatch));
    match all.len() {
        0 => RegexAst::NoMatch,
        1 => all.swap_remove(0),
        _ => RegexAst::Or(all),
    }
}

/// Returns the number of parts of an expression.
fn size(texts: &RegexAst) -> usize {
    1 + texts.get_args().iter().map(size).sum::<usize>()
}
