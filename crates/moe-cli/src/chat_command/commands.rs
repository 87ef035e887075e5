//! Parses a line of the user: a message, or one of the commands.

/// The commands: name, arguments, and description.
const COMMANDS: [(&str, &str, &str); 10] = [
    ("regenerate", "", "another answer to what was said last"),
    ("clear", "", "forget the conversation (also /reset)"),
    ("system", "TEXT", "tell the model something beforehand; without TEXT: nothing"),
    ("history", "", "show the conversation"),
    ("save", "FILE", "write the conversation as OpenAI's JSON messages; /save! FILE replaces a file"),
    ("load", "FILE", "go on with a conversation of such a file"),
    ("set", "NAME VALUE", "a sampling value (/set temperature 0.7, or default); /set alone lists all"),
    ("stats", "", "tokens of the conversation, and the speed of the last answer"),
    ("help", "", "this list"),
    ("quit", "", "leave, as Ctrl-D does"),
];

/// Names that are accepted but not listed.
const ALIASES: [(&str, &str); 3] = [("reset", "clear"), ("exit", "quit"), ("save!", "save!")];

/// The meaning of a line.
#[derive(Debug, PartialEq)]
pub enum Input<'a> {
    /// A message.
    Say(&'a str),
    /// A command by its name, with its arguments.
    Command(&'static str, &'a str),
    /// An unknown command.
    Unknown(&'a str),
}

impl<'a> Input<'a> {
    /// What a line asks for.
    pub fn parse(text: &'a str) -> Self {
        match text.trim().strip_prefix('/') {
            None => Self::Say(text.trim()),
            Some(text) if text.starts_with('/') => Self::Say(text),
            Some(command) => {
                let (name, rest) = command.split_once(char::is_whitespace).unwrap_or((command, ""));
                let listed = COMMANDS.iter().map(|(known, ..)| (*known, *known)).chain(ALIASES);
                let known = listed.filter(|(known, _)| *known == name).map(|(_, meant)| meant).next();
                known.map_or(Self::Unknown(name), |meant| Self::Command(meant, rest.trim()))
            }
        }
    }
}

/// The list of commands.
pub fn help() -> String {
    let line = |(name, argument, does): &(&str, &str, &str)| {
        format!("{:<16} {does}\n", format!("/{name} {argument}").trim_end())
    };
    let lines: String = COMMANDS.iter().map(line).collect();
    format!(
        "{lines}{:<16} a message that begins with /\nA backslash at the end of a line continues it. Ctrl-C stops an \
         answer.",
        "//TEXT"
    )
}

/// The message about an unknown command.
pub fn unknown(name: &str) -> String {
    let names = COMMANDS.iter().map(|(known, ..)| *known).chain(ALIASES.map(|(known, _)| known));
    let nearest = nearest(name, names).map(|name| format!(" Did you mean /{name}?")).unwrap_or_default();
    format!("there is no /{name}.{nearest} /help shows the commands.")
}

/// The name that is most similar to a misspelt one, if any is similar enough.
pub fn nearest<'a>(word: &str, names: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    // clap uses this limit for flags.
    const ALIKE: f64 = 0.7;
    let scored = names.map(|name| (strsim::jaro(word, name), name)).filter(|(score, _)| *score > ALIKE);
    scored.max_by(|(a, _), (b, _)| a.total_cmp(b)).map(|(_, name)| name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_and_messages_are_told_apart() {
        assert_eq!(Input::parse(" hello "), Input::Say("hello"));
        assert_eq!(Input::parse("/system be  kind\n"), Input::Command("system", "be  kind"));
        assert_eq!(Input::parse("/system"), Input::Command("system", ""));
        assert_eq!(Input::parse("/reset"), Input::Command("clear", ""));
        assert_eq!(Input::parse("/save! a b"), Input::Command("save!", "a b"));
        assert_eq!(Input::parse("//etc/passwd"), Input::Say("/etc/passwd"));
        assert_eq!(Input::parse("/resett"), Input::Unknown("resett"));
        assert_eq!([Input::parse(" \n"), Input::parse("/")], [Input::Say(""), Input::Unknown("")]);
    }

    #[test]
    fn a_misspelt_command_is_named_with_the_nearest() {
        assert!(unknown("regenrate").contains("Did you mean /regenerate?"));
        assert!(unknown("resett").contains("Did you mean /reset?"));
        assert!(!unknown("xyzzy").contains("mean"));
        assert!(help().lines().all(|line| line.len() < 100) && help().contains("/save FILE"));
    }
}
