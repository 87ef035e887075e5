//! Values that several headers share: bits and groups.

use moe_kernels::QuantGroup;
use serde_json::json;

use super::header::{Header, value_error};
use crate::error::QuantError;

/// Names of the number of bits and of the group's size, the usual one first.
pub(super) const BITS: [&str; 3] = ["bits", "w_bit", "wbits"];
pub(super) const GROUP_SIZE: [&str; 2] = ["group_size", "q_group_size"];
/// The largest group that a header may name: more than any row has columns.
const LARGEST_GROUP: i64 = 1 << 24;

/// Bits of the integers; `works` says which ones are read.
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

/// Columns that share a scale: -1 for whole rows.
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

/// A key that must be there.
pub(super) fn missing(header: &Header, key: &str, expected: &str) -> QuantError {
    QuantError::Value { key: header.key(key), expected: expected.to_string(), got: "nothing".to_string() }
}
