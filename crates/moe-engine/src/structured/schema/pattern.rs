//! The parts of a regular expression.

/// The upper limit of a repetition that has no limit.
pub(super) const ENDLESS: u32 = u32::MAX;

/// A regular expression.
#[derive(Clone, Debug)]
pub(super) enum Pattern {
    Char(char),
    /// A class that matches one character, in the syntax of the regex crate.
    Class(String),
    Concat(Vec<Pattern>),
    Either(Vec<Pattern>),
    Repeat(Box<Pattern>, u32, u32),
    /// `^`
    Start,
    /// `$`
    End,
    /// A look-ahead: what must follow here, or must not follow.
    Ahead(Box<Pattern>, bool),
}

impl Pattern {
    /// Returns whether the matches depend on the surrounding text.
    pub fn looks_around(&self) -> bool {
        match self {
            Self::Char(_) | Self::Class(_) => false,
            Self::Start | Self::End | Self::Ahead(..) => true,
            Self::Concat(parts) | Self::Either(parts) => parts.iter().any(Self::looks_around),
            Self::Repeat(part, ..) => part.looks_around(),
        }
    }

    /// Returns whether the pattern contains a `^`.
    pub fn has_start(&self) -> bool {
        match self {
            Self::Start => true,
            Self::Char(_) | Self::Class(_) | Self::End => false,
            Self::Concat(parts) | Self::Either(parts) => parts.iter().any(Self::has_start),
            Self::Repeat(part, ..) | Self::Ahead(part, _) => part.has_start(),
        }
    }

    /// Returns whether a match may be empty, and whether it must be empty.
    pub fn may_and_must_be_empty(&self) -> (bool, bool) {
        match self {
            Self::Char(_) | Self::Class(_) => (false, false),
            Self::Start | Self::End | Self::Ahead(..) => (true, true),
            Self::Concat(parts) => parts
                .iter()
                .map(Self::may_and_must_be_empty)
                .fold((true, true), |a, b| (a.0 && b.0, a.1 && b.1)),
            Self::Either(parts) => parts
                .iter()
                .map(Self::may_and_must_be_empty)
                .fold((false, true), |a, b| (a.0 || b.0, a.1 && b.1)),
            Self::Repeat(part, least, most) => {
                let (may, must) = part.may_and_must_be_empty();
                (may || *least == 0, must || *most == 0)
            }
        }
    }
}
