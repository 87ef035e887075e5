//! The texts in which a regular expression finds something, without anchors and look-ahead.
//!
//! Look-ahead says something about the rest of a text, and so does `$`. From the end of an expression to its beginning
//! each part is put in front of the texts that may follow it, and what looks ahead is intersected with them.

use llguidance::derivre::RegexAst;

use super::pattern::Pattern;

/// Parts of the result.
const LARGEST: usize = 1_000_000;
/// Anchors and look-aheads: each is a level of the result.
const MOST_LOOKS: usize = 500;
/// Times that a part with look-ahead is repeated at most.
const MOST_REPEATS: u32 = 8;

/// Whether nothing stands before a place.
#[derive(Clone, Copy, PartialEq, Eq)]
enum AtStart {
    Yes,
    No,
    Unknown,
}

/// The texts in which an expression finds something.
///
/// # Errors
/// It uses look-ahead or anchors where they are not supported.
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

    /// A match, and after it one of the texts.
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
                AtStart::Unknown => Err("a ^ behind what may be empty is not supported".into()),
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
                    places.push(behind(part, places[places.len() - 1]));
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

    /// All parts at their places, and after them one of the texts.
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
            let at = if n == 0 { at } else { behind(part, at) };
            texts = self.then(part, texts, at)?;
            if n >= least {
                self.spend(size(&rest))?;
                texts = either(vec![rest.clone(), texts]);
            }
        }
        Ok(texts)
    }

    /// The matches of a part that does not look around.
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
            // Derivre has the same number for a repetition without an end.
            Pattern::Repeat(part, least, most) => {
                RegexAst::Repeat(Box::new(self.plain(part)?), *least, *most)
            }
            Pattern::Start | Pattern::End | Pattern::Ahead(..) => RegexAst::EmptyString,
        })
    }
}

/// Where a match that began at a place ends.
fn behind(pattern: &Pattern, at: AtStart) -> AtStart {
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

/// Parts that it consists of.
fn size(texts: &RegexAst) -> usize {
    1 + texts.get_args().iter().map(size).sum::<usize>()
}
