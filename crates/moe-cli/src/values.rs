//! Parses the values of flags.

use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail, ensure};
use model_runtime::CpuIsa;
use serde_json::{Map, Value};

use crate::error;

/// Parses a number of bytes such as 4096, 512MiB, 4GB or 1.5GiB.
pub fn parse_bytes(text: &str) -> Result<usize> {
    let bytes = parse_size(text)?;
    ensure!(bytes >= 1, "expected a size of at least one byte, got {text:?}");
    Ok(bytes)
}

/// Parses a number of bytes, where 0 stands for no memory at all.
pub fn parse_bytes_or_none(text: &str) -> Result<usize> {
    let bytes = parse_size(text)?;
    // Less than one byte is a mistake, and is not the same as none.
    let is_zero = !text.contains(|c: char| ('1'..='9').contains(&c));
    ensure!(bytes >= 1 || is_zero, "expected 0 or a size of at least one byte, got {text:?}");
    Ok(bytes)
}

/// Parses a number of bytes, rounded down.
fn parse_size(text: &str) -> Result<usize> {
    let split = text.find(|c: char| c.is_ascii_alphabetic()).unwrap_or(text.len());
    let (number, unit) = text.split_at(split);
    let factor: f64 = match unit.to_ascii_lowercase().as_str() {
        "" | "b" => 1.0,
        "kb" => 1e3,
        "mb" => 1e6,
        "gb" => 1e9,
        "k" | "kib" => 1024.0,
        "m" | "mib" => 1024.0 * 1024.0,
        "g" | "gib" => 1024.0 * 1024.0 * 1024.0,
        _ => bail!("unknown unit {unit:?}; expected bytes, or a number with KiB, MiB, GiB, KB, MB or GB"),
    };
    let number: f64 =
        number.trim().parse().with_context(|| format!("expected a size such as 4GiB, got {text:?}"))?;
    let bytes = number * factor;
    ensure!((0.0..=isize::MAX as f64).contains(&bytes), "expected a size such as 4GiB, got {text:?}");
    Ok(bytes as usize)
}

/// Parses a number of GiB such as 27 or 1.5, or a size with a unit. Returns bytes.
pub fn parse_gib(text: &str) -> Result<usize> {
    let is_number = !text.contains(|c: char| c.is_ascii_alphabetic());
    parse_bytes(&if is_number { format!("{text}GiB") } else { text.to_string() })
}

/// Parses a share: a number above 0 and at most 1.
pub fn parse_share(text: &str) -> Result<f64> {
    let share = text.parse().ok().filter(|share| *share > 0.0 && *share <= 1.0);
    share.with_context(|| format!("expected a number above 0, at most 1, got {text:?}"))
}

/// Parses a time in seconds.
pub fn parse_seconds(text: &str) -> Result<Duration> {
    let seconds = text.parse().ok().and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
    seconds.with_context(|| format!("expected a number of seconds, got {text:?}"))
}

/// Parses a price: a number that is not negative.
pub fn parse_price(text: &str) -> Result<f64> {
    let price = text.parse().ok().filter(|price: &f64| price.is_finite() && *price >= 0.0);
    price.with_context(|| format!("expected a price of at least 0, got {text:?}"))
}

/// Parses a JSON object.
pub fn parse_object(text: &str) -> Result<Map<String, Value>> {
    serde_json::from_str(text).with_context(|| format!("expected a JSON object, got {text:?}"))
}

/// Parses the name of an instruction set. The error is without candle's backtrace.
pub fn parse_cpu_isa(name: &str) -> Result<CpuIsa> {
    CpuIsa::from_name(name).map_err(|e| anyhow!(error::describe(&e.into())))
}

/// Parses a token's bias from ID=BIAS.
pub fn parse_bias(text: &str) -> Result<(u32, f32)> {
    let parts = text.split_once('=').and_then(|(id, bias)| Some((id.parse().ok()?, bias.parse().ok()?)));
    parts.with_context(|| format!("expected ID=BIAS such as 42=-1.5, got {text:?}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_units() {
        let sizes = ["4096", "1KiB", "512MiB", "1.5g", "2GB", "7 b"].map(|s| parse_bytes(s).unwrap());
        assert_eq!(sizes, [4096, 1024, 512 << 20, 3 << 29, 2_000_000_000, 7]);
        for bad in ["", "GiB", "4 parsecs", "-1", "0", "0.5", "nan", "1e300"] {
            assert!(parse_bytes(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn some_sizes_may_be_zero() {
        let sizes = ["0", "0MiB", "0.0", "1", "2KiB"].map(|s| parse_bytes_or_none(s).unwrap());
        assert_eq!(sizes, [0, 0, 0, 1, 2048]);
        for bad in ["", "-1", "0.5", "nan", "inf", "0 parsecs"] {
            assert!(parse_bytes_or_none(bad).is_err(), "{bad}");
        }
        let negative = parse_bytes_or_none("-1").unwrap_err().to_string();
        assert_eq!(negative, "expected a size such as 4GiB, got \"-1\"");
    }

    #[test]
    fn numbers_alone_are_gib() {
        let sizes = ["1", "1.5", "512MiB", " 2 "].map(|s| parse_gib(s).unwrap());
        assert_eq!(sizes, [1 << 30, 3 << 29, 512 << 20, 2 << 30]);
        for bad in ["", "0", "-1", "nan", "inf", "1e300"] {
            assert!(parse_gib(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn shares_are_of_a_whole() {
        assert_eq!([parse_share("0.9").unwrap(), parse_share("1").unwrap()], [0.9, 1.0]);
        for bad in ["0", "1.1", "-0.5", "nan", "90%", ""] {
            assert!(parse_share(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn prices_are_not_negative() {
        assert_eq!([parse_price("0").unwrap(), parse_price("1.25").unwrap()], [0.0, 1.25]);
        for bad in ["-1", "inf", "nan", "$2", ""] {
            assert!(parse_price(bad).is_err(), "{bad}");
        }
    }

    /// With RUST_BACKTRACE=1 candle's errors contain their backtrace.
    #[test]
    fn an_unknown_instruction_set_is_one_line() {
        let error = parse_cpu_isa("avx").unwrap_err().to_string();
        assert!(error.contains("avx512-bf16") && error.lines().count() == 1, "{error}");
    }

    #[test]
    fn biases_are_checked() {
        assert_eq!(parse_bias("42=-1.5").unwrap(), (42, -1.5));
        assert!(parse_bias("42").is_err() && parse_bias("-1=2").is_err() && parse_bias("x=2").is_err());
    }
}
