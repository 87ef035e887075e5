//! The ops against independent definitions: bit for bit where the order of additions is part of
//! the contract, in f64 where it is not.

#![allow(clippy::unwrap_used)]

#[path = "ops/attention.rs"]
mod attention;
#[path = "ops/common.rs"]
mod common;
#[path = "ops/delta.rs"]
mod delta;
#[path = "ops/errors.rs"]
mod errors;
#[path = "ops/experts.rs"]
mod experts;
#[path = "ops/heads_norm.rs"]
mod heads_norm;
#[path = "ops/mla.rs"]
mod mla;
#[path = "ops/moved.rs"]
mod moved;
#[path = "ops/panels.rs"]
mod panels;
#[path = "ops/product_rows.rs"]
mod product_rows;
#[path = "ops/products.rs"]
mod products;
#[path = "ops/quant.rs"]
mod quant;
#[path = "ops/quant_experts.rs"]
mod quant_experts;
#[path = "ops/quantised.rs"]
mod quantised;
#[path = "ops/rows.rs"]
mod rows;
#[path = "ops/segments.rs"]
mod segments;
#[path = "ops/stacked.rs"]
mod stacked;
