//! The model families that this project runs. Each has a module with its config, its tensors and how it is loaded.
#![doc = include_str!("../README.md")]

pub mod deepseek_v2;
pub mod deepseek_v3;
mod embedded;
pub mod ernie4_5_moe;
mod fixed_keys;
pub mod glm4_moe;
pub mod glm4_moe_lite;
pub mod gpt_oss;
mod grouped_query;
mod hybrid;
pub mod latent;
mod latent_config;
pub mod minimax_m2;
pub mod mixtral;
pub mod olmoe;
pub mod qwen2_moe;
pub mod qwen3_5_moe;
pub mod qwen3_moe;
pub mod qwen3_next;
pub mod spec;

use moe_engine::{Families, ModelFamily};

pub use embedded::EMBEDDED;

/// Every family has a row. Examples in the program that runs all families use a model of the first row.
pub const TABLE: &[ModelFamily] = &[
    qwen3_moe::FAMILY,
    deepseek_v2::FAMILY,
    mixtral::FAMILY,
    olmoe::FAMILY,
    qwen2_moe::FAMILY,
    glm4_moe::FAMILY,
    deepseek_v3::FAMILY,
    deepseek_v3::KIMI_K2,
    glm4_moe_lite::FAMILY,
    minimax_m2::FAMILY,
    ernie4_5_moe::FAMILY,
    gpt_oss::FAMILY,
    qwen3_next::FAMILY,
    qwen3_5_moe::FAMILY,
    qwen3_5_moe::TEXT,
];

/// The families of a program that runs all of them.
pub const ALL: Families = Families { table: TABLE, only: None };

/// The families of a program that runs one of them.
pub const fn only(family: &ModelFamily) -> Families {
    Families { table: TABLE, only: Some(family.model_type) }
}

#[cfg(test)]
mod tests;
