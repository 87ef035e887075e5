//! Values that several kinds of headers contain: bits and groups.

use moe_kernels::QuantGroup;
use serde_json::json;

use super::header::{Header, value_error};
use crate::error::QuantError;

/// The keys that may hold the number of bits. The usual one comes first.
pub(super) const BITS: [&str; 3] = ["bits", "w_bit", "wbits"];
pub(super) const GROUP_SIZE: [&str; 2] = ["group_size", "q_group_size"];
/// The largest group that a header may have. No row has that many columns.
const LARGEST_GROUP: i64 = 1 << 24;

/// Reads the bits of the integers. `works` lists the numbers that can be read.
pub(super) fn bits(header: &Header, keys: &[&str], method: &str, works: &[u8]) -> Result<u8, QuantError> {
    let Some((key, bits)) = header.int(keys)? else {
        return Err(missing(header, keys[0], "the number of bits"));
    };
    let known = u8::try_from(bits).ok().filter(|bits| (1..=8).contains(bits));
    let list = works.iter().map(|b| format!("{b}")).collect::<Vec<_>>().join(" or ");
    match known {
        Some(bits) if works.contains(&bits) => Ok(bits),
        Some(bits) => Err(QuantError::unsupported(
            format!("{method} with {bits} bits (`{key}`)"),
            format!("{method} with {list} bits works"),
        )),
        None => Err(value_error(key, format!("{list} bits"), &json!(bits))),
    }
}

/// Reads the number of columns that share a scale. -1 means a whole row.
pub(super) fn group(header: &Header, keys: &[&str]) -> Result<QuantGroup, QuantError> {
    let Some((key, size)) = header.int(keys)? else {
        return Err(missing(header, keys[0], "the size of a group, or -1 for whole rows"));
    };
    match size {
        -1 => Ok(QuantGroup::Channel),
        1..=LARGEST_GROUP => Ok(QuantGroup::Size(size as usize)),
        _ => Err(value_error(key, "the size of a group, or -1 for whole rows", &json!(size))),
    }
}

/// Returns the error for a key that is missing.
pub(super) fn missing(header: &Header, key: &str, expected: &str) -> QuantError {
    QuantError::Value { key: header.key(key), expected: expected.to_string(), got: "nothing".to_string() }
}
