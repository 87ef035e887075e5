//! Typed reads of environment variables through a caller's lookup.

use crate::error::LaunchError;
use crate::launcher::Launcher;

/// Reads variables. An empty variable counts as unset, because job templates clear variables that way.
pub(crate) struct Env<'a>(pub &'a dyn Fn(&str) -> Option<String>);

impl Env<'_> {
    pub(crate) fn get(&self, name: &str) -> Option<String> {
        (self.0)(name).map(|v| v.trim().to_string()).filter(|v| !v.is_empty())
    }

    pub(crate) fn any(&self, names: &[&str]) -> bool {
        names.iter().any(|name| self.get(name).is_some())
    }

    pub(crate) fn complete(
        &self,
        launcher: Launcher,
        names: &[&str],
        remedy: &str,
    ) -> Result<(), LaunchError> {
        let (present, missing): (Vec<&str>, Vec<&str>) = names.iter().partition(|name| self.any(&[name]));
        if missing.is_empty() {
            return Ok(());
        }
        Err(LaunchError::Incomplete {
            launcher,
            present: present.join(", "),
            missing: missing.join(", "),
            remedy: remedy.to_string(),
        })
    }

    pub(crate) fn optional_number(&self, name: &str) -> Result<Option<usize>, LaunchError> {
        // The number is bounded, so that arithmetic on ranks and job numbers cannot overflow.
        let Some(value) = self.get(name) else { return Ok(None) };
        match value.parse::<u32>() {
            Ok(n) => Ok(Some(n as usize)),
            Err(_) => Err(invalid(name, &value, "a whole number of at least 0")),
        }
    }

    pub(crate) fn number(&self, name: &str) -> Result<usize, LaunchError> {
        self.optional_number(name)?.ok_or_else(|| invalid(name, "", "a whole number of at least 0"))
    }

    pub(crate) fn port(&self, name: &str) -> Result<Option<u16>, LaunchError> {
        let Some(value) = self.get(name) else { return Ok(None) };
        match value.parse::<u16>() {
            Ok(port) if port > 0 => Ok(Some(port)),
            _ => Err(invalid(name, &value, "a port between 1 and 65535")),
        }
    }

    pub(crate) fn address(&self, name: &str) -> Result<Option<String>, LaunchError> {
        match self.get(name) {
            Some(value) if value.chars().any(char::is_whitespace) => {
                Err(invalid(name, &value, "a host name or address"))
            }
            value => Ok(value),
        }
    }
}

/// The error for a variable whose value cannot be read.
pub(crate) fn invalid(name: &str, value: &str, expected: &str) -> LaunchError {
    LaunchError::Variable { name: name.to_string(), value: value.to_string(), expected: expected.to_string() }
}
